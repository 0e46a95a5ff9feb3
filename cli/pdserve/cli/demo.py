"""`pdserve demo`: three processes, one question, the answer and its timeline."""

from collections import deque
from typing import Annotated

import typer
from rich.markup import escape
from rich.text import Text

from pdserve.cli.cluster_plan import ClusterOptions, PlannedCluster, plan_cluster
from pdserve.cli.cluster_tls import own_tls
from pdserve.cli.events import Event
from pdserve.cli.findable import findable
from pdserve.cli.model_steps import ProgressBars, ready_model
from pdserve.cli.report import errors_output, output, run_async, show_error
from pdserve.cli.steady_reporter import SteadyReporter
from pdserve.cli.supervision import supervise
from pdserve.cli.supervisor import ClusterFailed, Supervisor
from pdserve.core.handed_secret import HandedSecret
from pdserve.core.models import DEFAULT_MODEL

QUESTION = "What is 2+2?"
MAX_TOKENS = 48


def demo(
    prompt: Annotated[str, typer.Option(help="Question to ask, through the model's chat template.")] = QUESTION,
    model: Annotated[str, typer.Option(help="Alias or model folder.")] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = MAX_TOKENS,
) -> None:
    """Start a router, a prefill node and a decode node, stream an answer with its timeline, and stop everything."""
    # A free port, so that the demo runs beside a cluster; a small pool, because one question needs no more.
    shared = {"model": model, "port": "0", "http_port": "off", "kv_blocks": "128", "drain_s": "10"}
    with HandedSecret() as secret:
        planned = plan_cluster(ClusterOptions(shared=shared), secret)
        with ProgressBars() as progress:
            ready_model(model, progress)
        try:
            code = run_async(show(planned, prompt, max_tokens))
        except ClusterFailed as error:
            show_error(str(error))
            code = error.exit_code
    raise typer.Exit(code)


async def show(planned: PlannedCluster, prompt: str, max_tokens: int) -> int:
    """Run the cluster, ask the question, and stop it."""
    from pdserve.cli.generate import ask
    from pdserve.cli.router_probe import RouterProbe
    from pdserve.cli.timeline_view import timeline_view
    from pdserve.client import Chat, Options, Turn

    plan = planned.plan
    tls = own_tls(plan.tls, plan.host)
    probe, shown = RouterProbe(tls, planned.api_key), DemoReporter()
    reporter = SteadyReporter(shown)
    errors_output().print("starting a router, a prefill node and a decode node", style="dim")

    async def work() -> None:
        output().print(f"\n[bold]{escape(prompt)}[/bold]")
        question = Chat((Turn("user", prompt),))
        options = Options(max_tokens=max_tokens, timeout_s=120.0)
        key = planned.api_key
        answer = await ask(supervisor.address, question, options, stream=True, tls=tls, api_key=key)
        if answer.summary is not None:
            output().print()
            output().print(timeline_view(answer.summary))
            output().print()

    try:
        with findable(plan) as on_addresses:
            supervisor = Supervisor(plan, reporter, probe, on_addresses)
            return await supervise(supervisor, reporter, plan.drain_s, work)
    except BrokenPipeError:
        raise
    except BaseException:
        shown.show_tail()
        raise
    finally:
        await probe.close()


class DemoReporter:
    """Shows events on standard error; keeps log lines back, and shows the last of them if the demo fails."""

    def __init__(self) -> None:
        self._tail: deque[str] = deque(maxlen=40)
        self._console = errors_output()

    def event(self, event: Event) -> None:
        """Show one event."""
        if event.kind not in ("draining", "exited", "failed"):
            self._console.print(Text(event.line() if event.kind != "ready" else "ready", style="dim"))

    def log(self, name: str, line: str) -> None:
        """Keep one line that process `name` wrote."""
        self._tail.append(f"{name:<10}│ {line}")

    def show_tail(self) -> None:
        """Show the last log lines."""
        for line in self._tail:
            self._console.print(Text(line))
