"""How a cluster's events and log lines are shown."""

import errno
import io
import json

import pytest

from pdserve.cli.events import (
    ConsoleReporter,
    Event,
    Exited,
    Failed,
    JsonLogReporter,
    JsonReporter,
    Ready,
    Restarting,
    Stopped,
    json_line,
)
from pdserve.cli.model_steps import ProgressBars
from pdserve.cli.steady_reporter import SteadyReporter


def test_json_log_line_names_its_process_and_keeps_its_fields() -> None:
    line = json.dumps({"level": "info", "role": "prefill", "message": "ready"})
    assert json.loads(json_line("prefill-1", line)) == {
        "process": "prefill-1",
        "level": "info",
        "role": "prefill",
        "message": "ready",
    }


@pytest.mark.parametrize("line", ["error: the model is damaged", "7", '["x"]', '{"cut'])
def test_line_that_is_no_json_object_becomes_a_message(line: str) -> None:
    assert json.loads(json_line("router", line)) == {"process": "router", "message": line}


def test_one_stream_of_json_has_events_among_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = JsonLogReporter()
    reporter.log("router", '{"level":"info"}')
    reporter.event(Ready("127.0.0.1:1", "127.0.0.1:2"))
    reporter.event(Exited("router", "router", 7, 0, "ended (exit status 0)"))
    reporter.event(Exited("router", "router", 7, 1, "failed (exit status 1)"))
    told = capsys.readouterr()
    entries = [json.loads(line) for line in told.out.splitlines()]
    assert told.err == ""
    assert [entry["process"] for entry in entries] == ["router", "pdserve", "pdserve", "pdserve"]
    assert [entry["level"] for entry in entries] == ["info", "info", "info", "error"]
    assert "127.0.0.1:1" in entries[1]["message"]
    assert "http://127.0.0.1:2/v1" in entries[1]["message"]


def test_a_cluster_without_http_names_no_such_address() -> None:
    assert "http" not in Ready("127.0.0.1:1").line()


def test_logs_stand_beside_json_events_in_the_format_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for json_logs in (False, True):
        reporter = JsonReporter(json_logs=json_logs)
        reporter.log("decode-0", "hello")
    told = capsys.readouterr()
    assert told.err == 'decode-0 | hello\n{"process": "decode-0", "message": "hello"}\n'
    reporter.event(Failed("port 1 is taken", 5, "ADDRESS_IN_USE", "choose another"))
    assert json.loads(capsys.readouterr().out) == {
        "event": "failed",
        "message": "port 1 is taken",
        "exit_code": 5,
        "reason": "ADDRESS_IN_USE",
        "hint": "choose another",
    }


def test_restart_says_what_it_means_for_clients() -> None:
    assert "the router reconnects by itself" in Restarting("decode-0", "decode", 0.5).line()
    router = Restarting("router", "router", 0.5).line()
    assert "reconnects" not in router
    assert "open requests are lost" in router


class FullDisk:
    """Takes every second line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._turn = 0

    def event(self, event: Event) -> None:
        self.log("pdserve", event.line())

    def log(self, name: str, line: str) -> None:
        self._turn += 1
        if self._turn % 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.lines.append(line)


def test_full_disk_loses_lines_and_not_the_cluster() -> None:
    disk = FullDisk()
    reporter = SteadyReporter(disk)
    for _ in range(2):
        reporter.log("router", "a line")
        reporter.event(Stopped(drained=True))
    assert disk.lines == ["stopped", "stopped"]


def test_model_that_is_ready_adds_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars():
        pass
    assert capsys.readouterr() == ("", "")


class ClosedPipe(io.StringIO):
    """A stream that nobody reads."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_pipe_that_is_closed_is_an_error_and_no_exit() -> None:
    with pytest.raises(BrokenPipeError):
        ConsoleReporter(ClosedPipe()).event(Stopped(drained=True))
