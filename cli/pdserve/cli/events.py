"""What a supervised cluster does, as events, and the ways to show them: lines for people, JSON lines for programs."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Protocol, TextIO

from rich.text import Text

from pdserve.cli.report import PipeConsole, write_json

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the cluster."""

    kind: ClassVar[str] = ""

    def line(self) -> str:
        """Return the event as a line for people."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Preparing(Event):
    """A model is being made ready; `fraction` of the stage, 0 to 1."""

    kind: ClassVar[str] = "preparing"
    model: str
    stage: str
    fraction: float

    def line(self) -> str:
        """Return the event as a line for people."""
        return f"model {self.model}: {self.stage} {self.fraction:.0%}"


@dataclass(frozen=True, slots=True)
class Started(Event):
    """A process listens. `addresses` has "grpc", "kv" and "admin" where there are such ports, and "http" of a router."""

    kind: ClassVar[str] = "started"
    name: str
    role: str
    pid: int
    addresses: Mapping[str, str]

    def line(self) -> str:
        """Return the event as a line for people."""
        where = ", ".join(f"{name} {address}" for name, address in self.addresses.items())
        return f"{self.name} started: {where} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """The cluster is not ready yet, and what for."""

    kind: ClassVar[str] = "waiting"
    waited_s: float
    reason: str

    def line(self) -> str:
        """Return the event as a line for people."""
        return f"waiting ({self.waited_s:.0f} s): {self.reason}"


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """The router serves, over gRPC at `address` and, unless `http_address` is empty, over HTTP there.

    With TLS `tls_options` are what a command must be given to call it.
    """

    kind: ClassVar[str] = "ready"
    address: str
    http_address: str = ""
    tls_options: str = ""

    def line(self) -> str:
        """Return the event as a line for people."""
        scheme, tls = ("https", f" {self.tls_options}") if self.tls_options else ("http", "")
        http = f"; OpenAI's API at {scheme}://{self.http_address}/v1" if self.http_address else ""
        return f'ready: pdserve generate --server {self.address}{tls} --chat "What is 2+2?"{http}'


@dataclass(frozen=True, slots=True)
class Exited(Event):
    """A process ended, wanted or not. `status` is its exit status, negative for a signal."""

    kind: ClassVar[str] = "exited"
    name: str
    role: str
    pid: int
    status: int
    reason: str

    def line(self) -> str:
        """Return the event as a line for people."""
        return f"{self.name} (pid {self.pid}) {self.reason}"


@dataclass(frozen=True, slots=True)
class Restarting(Event):
    """A process that died is started again at its old address."""

    kind: ClassVar[str] = "restarting"
    name: str
    role: str
    delay_s: float

    def line(self) -> str:
        """Return the event as a line for people."""
        is_router = self.role == "router"
        meaning = "open requests are lost, so ask again" if is_router else "the router reconnects by itself"
        return f"{self.name} starts again in {self.delay_s:g} s, at the same port; {meaning}"


@dataclass(frozen=True, slots=True)
class Draining(Event):
    """The cluster takes no new work and finishes what it has."""

    kind: ClassVar[str] = "draining"
    within_s: float

    def line(self) -> str:
        """Return the event as a line for people."""
        return f"draining within {self.within_s:g} s; press Ctrl-C again to stop at once"


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """No process of the cluster is left. `drained` says whether all ended by themselves."""

    kind: ClassVar[str] = "stopped"
    drained: bool

    def line(self) -> str:
        """Return the event as a line for people."""
        return "stopped" if self.drained else "stopped before everything had drained"


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The cluster could not start, or could not go on. `reason` is an upper-snake name, e.g. ADDRESS_IN_USE."""

    kind: ClassVar[str] = "failed"
    message: str
    exit_code: int
    reason: str
    hint: str = ""

    def line(self) -> str:
        """Return the event as a line for people."""
        return self.message


def is_alarming(event: Event) -> bool:
    """Whether an event tells that something went wrong."""
    return isinstance(event, Restarting | Failed) or (isinstance(event, Exited) and event.status != 0)


class Reporter(Protocol):
    """Shows events, and the log lines of processes."""

    def event(self, event: Event) -> None:
        """Show one event."""

    def log(self, name: str, line: str) -> None:
        """Show one line that process `name` wrote."""


class JsonReporter:
    """Events as JSON lines on standard output; log lines on standard error, as JSON too if `json_logs`."""

    def __init__(self, *, json_logs: bool = False) -> None:
        self._json_logs = json_logs

    def event(self, event: Event) -> None:
        """Show one event."""
        write_json({"event": event.kind, **asdict(event)})

    def log(self, name: str, line: str) -> None:
        """Show one line that process `name` wrote."""
        sys.stderr.write((json_line(name, line) if self._json_logs else f"{name} | {line}") + "\n")
        sys.stderr.flush()


class JsonLogReporter:
    """One stream of JSON log lines: those of the processes, and events as lines of the process `pdserve`."""

    def event(self, event: Event) -> None:
        """Show one event."""
        level = "error" if is_alarming(event) else "info"
        entry = {"time": time.time(), "level": level, "event": event.kind, "message": event.line()}
        self.log("pdserve", json.dumps(entry))

    def log(self, name: str, line: str) -> None:
        """Show one line that process `name` wrote."""
        sys.stdout.write(json_line(name, line) + "\n")
        sys.stdout.flush()


def json_line(process: str, line: str) -> str:
    """Return a log line as a JSON object that names its process; what is no JSON object becomes the message of one."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    return json.dumps({"process": process, **(entry if isinstance(entry, dict) else {"message": line})})


class ConsoleReporter:
    """One stream for people: a coloured prefix per process, events under the name `pdserve`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = PipeConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._colours: dict[str, str] = {"pdserve": "bold"}

    def event(self, event: Event) -> None:
        """Show one event."""
        style = "bold red" if is_alarming(event) else "bold green" if isinstance(event, Ready) else "bold"
        self._line("pdserve", Text(event.line(), style=style))

    def log(self, name: str, line: str) -> None:
        """Show one line that process `name` wrote."""
        self._line(name, Text(line))

    def _line(self, name: str, text: Text) -> None:
        colour = self._colours.setdefault(name, COLOURS[(len(self._colours) - 1) % len(COLOURS)])
        self._console.print(Text.assemble((f"{name:<10}│ ", colour), text))
