"""A real supervisor of stubs, in its own process: `python stub_supervisor.py ROUTER_BEHAVIOUR NODE_BEHAVIOUR DRAIN_S`."""

import asyncio
import sys
from pathlib import Path

from pdserve.cli.child import ProcessPlan
from pdserve.cli.restarts import RestartPolicy
from pdserve.cli.supervision import supervise
from pdserve.cli.supervisor import ClusterPlan, Supervisor
from pdserve.cli.up import reporter_of

STUB = Path(__file__).with_name("stub.py")


async def always_ready(address: str) -> str:
    """Say that nothing is missing."""
    return ""


def stub_plan(
    router: str = "normal",
    nodes: tuple[str, ...] = ("normal",),
    restarts: RestartPolicy | None = None,
    listen_wait_s: float = 30.0,
    stop_grace_s: float = 30.0,
) -> ClusterPlan:
    """Return a plan of stubs with the behaviours given."""
    policy = restarts or RestartPolicy(first_delay_s=0.0)
    return ClusterPlan(
        router=ProcessPlan("router", "router", (sys.executable, str(STUB), router)),
        nodes=tuple(
            ProcessPlan(f"prefill-{i}", "prefill", (sys.executable, str(STUB), node)) for i, node in enumerate(nodes)
        ),
        port=0,
        stop_grace_s=stop_grace_s,
        listen_wait_s=listen_wait_s,
        ready_wait_s=30.0,
        restarts=lambda: policy,
    )


def main() -> None:
    """Supervise until told to stop."""
    _, router, node, drain_s = sys.argv
    reporter = reporter_of("text", as_json=True)
    supervisor = Supervisor(stub_plan(router, (node,)), reporter, always_ready)
    sys.exit(asyncio.run(supervise(supervisor, reporter, float(drain_s))))


if __name__ == "__main__":
    main()
