"""A local cluster under supervision: nodes first, then the router; started, kept alive, drained, and never left behind."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.cli.child import Child, ChildDied, ProcessPlan
from pdserve.cli.cluster_tls import options_of
from pdserve.cli.events import Exited, Ready, Reporter, Restarting, Started, Waiting
from pdserve.cli.exit_codes import ExitCode
from pdserve.cli.restarts import RestartPolicy
from pdserve.core.certificates import TlsFiles
from pdserve.core.errors import AddressInUse
from pdserve.core.handed_secret import HandedSecret

POLL_S = 0.2
TELL_EVERY_S = 5.0
KILL_WAIT_S = 5.0

Probe = Callable[[str], Awaitable[str]]
"""Asks a router at an address; returns "" when it serves, else what it still waits for."""


class ClusterFailed(Exception):
    """The cluster cannot go on. `exit_code` is the status of the process that ended it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The processes of a cluster and its deadlines, seconds. `port` and `http_port` are the router's; 0 takes a free one.

    Without `http_port` the router is told none. `tls`: the files that its clients need. `secret` is handed to every process,
    also to one that is started again; None where each has one from its settings. `stop_grace_s` is what processes get beyond
    the drain to tell their clients, and to end by themselves.
    """

    router: ProcessPlan
    nodes: tuple[ProcessPlan, ...]
    host: str = "127.0.0.1"
    port: int = 50_051
    http_port: int | None = None
    tls: TlsFiles | None = None
    secret: HandedSecret | None = None
    drain_s: float = 30.0
    stop_grace_s: float = 10.0
    listen_wait_s: float = 120.0
    ready_wait_s: float = 600.0
    restarts: Callable[[], RestartPolicy] = RestartPolicy


@dataclass(slots=True)
class Member:
    """A place in the cluster: its plan, the addresses it was given, and its present run."""

    plan: ProcessPlan
    restarts: RestartPolicy
    addresses: Mapping[str, str] = field(default_factory=dict)
    child: Child | None = None
    mourned: Child | None = None
    """The last run whose end was reported."""

    @property
    def is_running(self) -> bool:
        """Whether a process stands in this place."""
        return self.child is not None and self.child.is_running


class Supervisor:
    """Runs one `plan`. The caller ends it with `drain` or `kill`, on every path."""

    def __init__(
        self,
        plan: ClusterPlan,
        reporter: Reporter,
        probe: Probe,
        on_addresses: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        """`on_addresses` is told the gRPC addresses that are known, whenever a process listens."""
        self._plan = plan
        self._on_addresses = on_addresses
        self._reporter = reporter
        self._probe = probe
        self._router = Member(plan.router, plan.restarts())
        self._nodes = [Member(node, plan.restarts()) for node in plan.nodes]

    @property
    def address(self) -> str:
        """The router's address, once it listens."""
        return self._router.addresses["grpc"]

    async def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Start everything, report `Ready`, and keep it alive until cancelled. Raises ClusterFailed or AddressInUse."""
        refuse_busy_port(self._plan.host, self._plan.port)
        refuse_busy_port(self._plan.host, self._plan.http_port or 0, "--http-port")
        try:
            async with asyncio.TaskGroup() as starts:
                for node in self._nodes:
                    starts.create_task(self._start(node))
            await self._start(self._router)
            await self._until_ready()
            self._reporter.event(
                Ready(self.address, self._router.addresses.get("http", ""), options_of(self._plan.tls))
            )
            if on_ready is not None:
                on_ready()
            async with asyncio.TaskGroup() as keepers:
                for member in self._members:
                    keepers.create_task(self._keep_alive(member), name=f"keeper of {member.plan.name}")
        except (ChildDied, ExceptionGroup) as error:
            raise failure_of(error) from None

    async def drain(self, within_s: float) -> bool:
        """Tell the router to finish what it has, then the nodes. Return whether all ended by themselves.

        Each is killed only when it is still there a grace after the drain's time: what it has accepted is over then, and it is
        busy with ending.
        """
        clock = asyncio.get_running_loop().time
        ends_s = clock() + within_s
        has_drained = True
        for members in ([self._router], self._nodes):
            for member in members:
                self._signal(member, signal.SIGTERM)
            patience_s = max(0.0, ends_s - clock()) + self._plan.stop_grace_s
            has_drained &= await self._all_gone(members, patience_s)
        return has_drained

    async def _all_gone(self, members: list[Member], within_s: float) -> bool:
        """Wait for the end of `members`; kill those that are left after `within_s`. Return whether none was."""
        try:
            async with asyncio.timeout(within_s):
                for member in members:
                    await self._gone(member)
        except TimeoutError:
            await self._kill(members)
            return False
        return True

    async def kill(self) -> None:
        """End every process at once."""
        await self._kill(self._members)

    async def _kill(self, members: list[Member]) -> None:
        for member in members:
            self._signal(member, signal.SIGKILL)
        async with asyncio.timeout(KILL_WAIT_S):
            for member in members:
                await self._gone(member)

    @property
    def _members(self) -> list[Member]:
        return [self._router, *self._nodes]

    async def _start(self, member: Member) -> None:
        """Start one member, at its old addresses if it had some, and wait until it listens."""
        child = Child(member.plan, self._reporter.log)
        member.child = child
        await child.start(self._arguments(member), () if self._plan.secret is None else (self._plan.secret.fd,))
        try:
            member.addresses = await child.addresses(self._plan.listen_wait_s)
        except ChildDied as death:
            if death.status is not None:
                self._report_end(member, death.status)
            raise
        self._on_addresses([its.addresses["grpc"] for its in self._members if "grpc" in its.addresses])
        self._reporter.event(Started(member.plan.name, member.plan.role, child.pid, dict(member.addresses)))

    def _arguments(self, member: Member) -> list[str]:
        first_port = self._plan.port if member is self._router else 0
        arguments = ["--host", self._plan.host, "--port", str(port_of(member.addresses, "grpc", first_port))]
        if self._plan.secret is not None:
            arguments += ["--cluster-secret-fd", str(self._plan.secret.fd)]
        if "kv" in member.addresses:
            arguments += ["--kv-port", str(port_of(member.addresses, "kv", 0))]
        if "admin" in member.addresses:
            arguments += ["--admin-port", str(port_of(member.addresses, "admin", 0))]
        if member is self._router:
            if self._plan.http_port is not None:
                arguments += ["--http-port", str(port_of(member.addresses, "http", self._plan.http_port))]
            for node in self._nodes:
                arguments += [f"--{node.plan.role}", node.addresses["grpc"]]
        return arguments

    async def _until_ready(self) -> None:
        """Poll the router until it serves. A process that dies before that ends the cluster."""
        clock = asyncio.get_running_loop().time
        began_s = told_s = clock()
        deaths = [asyncio.create_task(self._death(member)) for member in self._members]
        try:
            while missing := await self._probe(self.address):
                now_s = clock()
                if now_s - began_s > self._plan.ready_wait_s:
                    raise ClusterFailed(f"not ready after {now_s - began_s:.0f} s: {missing}", ExitCode.FAILED)
                if now_s - told_s > TELL_EVERY_S:
                    told_s = now_s
                    self._reporter.event(Waiting(now_s - began_s, missing))
                done, _ = await asyncio.wait(deaths, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for death in done:
                    death.result()
        finally:
            for death in deaths:
                death.cancel()
            await asyncio.gather(*deaths, return_exceptions=True)

    async def _death(self, member: Member) -> None:
        assert member.child is not None
        status = await member.child.ended()
        raise ChildDied(member.plan.name, status, self._report_end(member, status))

    async def _keep_alive(self, member: Member) -> None:
        """Start `member` again whenever it dies. Raises ClusterFailed when it dies too often."""
        clock = asyncio.get_running_loop().time
        while True:
            assert member.child is not None
            status = await member.child.ended()
            reason = self._report_end(member, status)
            delay_s = member.restarts.next_delay_s(clock())
            if delay_s is None:
                raise ClusterFailed(
                    f"{member.plan.name} {reason}; it died more than {member.restarts.max_restarts} times within "
                    f"{member.restarts.window_s:g} s",
                    status if status > 0 else ExitCode.FAILED,
                )
            self._reporter.event(Restarting(member.plan.name, member.plan.role, delay_s))
            await asyncio.sleep(delay_s)
            try:
                await self._start(member)
            except ChildDied:
                # It fell silent, or its death is counted by the next turn of the loop.
                member.child.send(signal.SIGKILL)

    def _signal(self, member: Member, number: signal.Signals) -> None:
        if member.child is not None and member.is_running:
            member.child.send(number)

    async def _gone(self, member: Member) -> None:
        if member.child is None or not member.is_running:
            return
        self._report_end(member, await member.child.ended())

    def _report_end(self, member: Member, status: int) -> str:
        """Report the end of the member's run, once, and return how it ended."""
        assert member.child is not None
        reason = member.child.reason(status)
        if member.mourned is not member.child:
            member.mourned = member.child
            self._reporter.event(Exited(member.plan.name, member.plan.role, member.child.pid, status, reason))
        return reason


def refuse_busy_port(host: str, port: int, option: str = "--port") -> None:
    """Raise AddressInUse, naming `option`, if `port` cannot be listened on, before anything is started."""
    if port == 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise AddressInUse(
                f"port {port} on {host} is taken ({error.strerror})",
                hint=f"another cluster may be running (`pdserve status`); choose another with {option}",
            ) from None


def port_of(addresses: Mapping[str, str], name: str, otherwise: int) -> int:
    """Return the port of the announced address `name`, or `otherwise` before anything was announced."""
    address = addresses.get(name)
    return otherwise if address is None else int(address.rpartition(":")[2])


def failure_of(error: Exception) -> Exception:
    """Return the first plain error of a group; a death becomes ClusterFailed with the status of the process that died."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ChildDied):
        return ClusterFailed(
            str(error), error.status if error.status is not None and error.status > 0 else ExitCode.FAILED
        )
    return error
