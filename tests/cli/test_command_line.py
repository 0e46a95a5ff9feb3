"""The command as users and programs meet it: what it loads, what it says, how it ends."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from pdserve.cli.exit_codes import ExitCode, exit_code_of
from pdserve.cli.timeline_view import BAR_CELLS, bar_of, timeline_view
from pdserve.client.pb import summary_from_pb
from pdserve.core.errors import GRPC_CODES, AttemptsExhausted, ConfigError, Overloaded
from tests.client.stub_router import ANSWER, SUMMARY, stub_router

DEADLINE_S = 60.0
PDSERVE = (sys.executable, "-P", "-m", "pdserve.cli")
NOWHERE = "127.0.0.1:1"


def pdserve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PDSERVE, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


async def pdserve_beside(*arguments: str) -> tuple[int, str, str]:
    """Run the command while this process serves; return its exit status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *PDSERVE, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["up", "--help"], ["decode", "--help"]])
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from pdserve.cli.__main__ import run
status = run({arguments!r})
heavy = sorted({{"torch", "grpc", "transformers", "tokenizers", "zmq", "numpy"}} & sys.modules.keys())
sys.exit(f"exit status {{status}}, loaded {{heavy}}" if status or heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "pdserve" in done.stdout


def test_version_names_version_and_commit() -> None:
    done = pdserve("--version", PDSERVE_COMMIT="abc123")
    assert done.returncode == 0
    assert done.stdout.endswith("(abc123)\n")


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nonsense"], ExitCode.USAGE, "nonsense"),
        (["generate"], ExitCode.USAGE, "PROMPT"),
        (["decode", "--port", "-1"], ExitCode.USAGE, "port"),
        (["generate", "hello", "--server", NOWHERE, "--max-tokens", "-1"], ExitCode.USAGE, "max_tokens"),
        (["up", "--model", "no-such-model"], ExitCode.MODEL, "no-such-model"),
        (["pull", "no-such-model"], ExitCode.MODEL, "no-such-model"),
        (["generate", "hello", "--server", NOWHERE], ExitCode.UNAVAILABLE, NOWHERE),
        (["status", "--server", NOWHERE], ExitCode.UNAVAILABLE, NOWHERE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_have_a_line_and_an_exit_status_of_their_own(arguments: list[str], status: ExitCode, said: str) -> None:
    done = pdserve(*arguments)
    assert done.returncode == status
    assert said.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_busy_port_is_a_named_error(busy_port: int) -> None:
    done = pdserve("up", "--port", str(busy_port))
    assert done.returncode == ExitCode.ADDRESS
    assert f"port {busy_port}" in done.stderr
    assert "--port" in done.stderr


def test_traceback_is_shown_when_asked_for() -> None:
    assert "Traceback" in pdserve("--debug", "status", "--server", NOWHERE).stderr


def test_every_error_class_has_an_exit_status() -> None:
    statuses = {kind: exit_code_of(ConfigError([]) if kind is ConfigError else kind("")) for kind in GRPC_CODES}
    assert ExitCode.OK not in statuses.values()
    assert statuses[Overloaded] == ExitCode.UNAVAILABLE
    assert statuses[AttemptsExhausted] == ExitCode.FAILED


@pytest.mark.asyncio
async def test_answer_is_text_on_standard_output() -> None:
    async with stub_router() as (router, address):
        status, out, err = await pdserve_beside("generate", "hi", "--system", "be brief", "--server", address)
        assert (status, out, err) == (0, "Zwölf Bären\n", "")
        assert [(m.role, m.content) for m in router.requests[0].chat.messages] == [
            ("system", "be brief"),
            ("user", "hi"),
        ]


@pytest.mark.asyncio
async def test_json_has_every_token_with_its_arrival() -> None:
    async with stub_router() as (_, address):
        status, out, _err = await pdserve_beside("generate", "hi", "--json", "--server", address)
        *deltas, answer = [json.loads(line) for line in out.splitlines()]
        assert status == 0
        assert [delta["text"] for delta in deltas] == ["Zwölf", " Bären"]
        assert [token["id"] for token in answer["tokens"]] == [5, 6, 7]
        assert [token["logprob"] for token in answer["tokens"]] == [-0.5, -0.25, -0.125]
        arrivals = [token["arrival_s"] for token in answer["tokens"]]
        assert arrivals == sorted(arrivals)
        assert (answer["text"], answer["finish_reason"]) == ("Zwölf Bären", "STOP")
        assert answer["timeline"]["stages"][0]["name"] == "prefill"
        assert answer["processes"][0]["role"] == "router"
        status, out, _err = await pdserve_beside("generate", "hi", "--json", "--no-stream", "--server", address)
        assert [json.loads(line)["event"] for line in out.splitlines()] == ["answer"]


@pytest.mark.asyncio
async def test_routers_error_is_told_and_decides_the_exit_status() -> None:
    async with stub_router() as (router, address):
        router.answer, router.error = (), Overloaded("queues are full", hint="come back", retry_after_s=2.0)
        status, out, err = await pdserve_beside("generate", "hi", "--json", "--server", address)
        told = json.loads(out)
        assert status == told["exit_code"] == ExitCode.UNAVAILABLE
        assert (told["reason"], told["hint"], told["retry_after_s"]) == ("OVERLOADED", "come back", 2.0)
        assert "queues are full" in err


@pytest.mark.asyncio
async def test_ctrl_c_cancels_the_request() -> None:
    async with stub_router() as (router, address):
        router.answer, router.hangs = ANSWER[:1], True
        process = await asyncio.create_subprocess_exec(
            *PDSERVE,
            "generate",
            "hi",
            "--server",
            address,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            assert await process.stdout.read(len("Zwölf".encode())) == "Zwölf".encode()
            process.send_signal(signal.SIGINT)
            await router.cancelled.wait()
            _, told = await process.communicate()
            assert process.returncode == ExitCode.INTERRUPTED
            assert told == b"error: interrupted\n"


@pytest.mark.asyncio
async def test_status_shows_every_node() -> None:
    async with stub_router() as (_, address):
        status, out, _err = await pdserve_beside("status", "--json", "--server", address)
        told = json.loads(out)
        assert status == 0
        assert (told["router"]["address"], told["router"]["gauges"]) == (address, {"sessions": 1.0})
        assert [(node["address"], node["state"]) for node in told["nodes"]] == [
            ("127.0.0.1:1", "ready"),
            ("127.0.0.1:2", "down"),
        ]
        assert told["nodes"][0]["role"] == "prefill"
        assert told["sessions"][0]["state"] == "DECODING"
        status, out, _err = await pdserve_beside("status", "--server", address)
        assert status == 0
        for text in ("127.0.0.1:1", "127.0.0.1:2", "down", "it hung up", "DECODING"):
            assert text in out


def test_doctor_finds_nothing_broken_here() -> None:
    done = pdserve("doctor", "--json")
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == 0, findings
    names = {finding["name"] for finding in findings}
    assert {"python", "torch", "devices", "compiler", "triton", "shared memory", "cores", "memory", "cache"} <= names
    assert all(finding["advice"] for finding in findings if finding["verdict"] != "ok")


def test_timeline_shows_every_stage_nested_parts_and_totals() -> None:
    console = Console(width=120, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(timeline_view(summary_from_pb(SUMMARY)))
    shown = capture.get()
    for text in (
        "prefill (attempt 1)",
        "prefill.compute",
        "hop",
        "decode",
        "500.0",
        "25%",
        "1.0 MiB in 4 frames",
        "decode_lost",
    ):
        assert text in shown


def test_bars_follow_each_other_and_never_leave_their_column() -> None:
    assert bar_of(0.0, 1.0, 2.0) == "█" * (BAR_CELLS // 2)
    assert bar_of(1.0, 1.0, 2.0) == " " * (BAR_CELLS // 2) + "█" * (BAR_CELLS // 2)
    assert bar_of(2.0, 0.0, 2.0) == " " * (BAR_CELLS - 1) + "█"
    assert bar_of(0.0, 0.0, 0.0) == ""
