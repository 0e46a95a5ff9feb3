"""The command as users and programs meet it: what it loads, what it says, how it ends."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from pdserve.cli.__main__ import run
from pdserve.cli.doctor import Finding, Verdict, compiler, models, native, ports
from pdserve.cli.exit_codes import ExitCode, exit_code_of
from pdserve.core.errors import GRPC_CODES, AttemptsExhausted, ConfigError, Overloaded
from pdserve.core.models import ALIASES, DEFAULT_MODEL, MANIFEST_NAME, prepared_dir
from pdserve.core.router_settings import RouterSettings
from pdserve.kernels.native.library import native_library
from tests.client.stub_router import ANSWER, stub_router

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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--timeout-s", "0"], "timeout_s must be above 0"),
        (["--timeout-s", "nan"], "timeout_s must be above 0, at most 86,400 seconds"),
        (["--timeout-s", "inf"], "timeout_s"),
        (["--timeout-s", "86401"], "timeout_s"),
        (["--seed", str(2**64)], "seed must be a whole number from 0 to 18,446,744,073,709,551,615"),
        (["--top-k", "-1"], "top_k must be a whole number from 0 to 4,294,967,295"),
        (["--no-chat", "--system", "be brief"], "--system needs a chat"),
        (["--server", "127.0.0.1"], "has no port"),
        (["--stop", os.fsdecode(b"\xff")], "not valid UTF-8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_request_that_can_never_work_is_refused_before_it_is_sent(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "hi", *arguments]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "given"), [("-", b"caf\xe9"), (os.fsdecode(b"caf\xe9"), b"")], ids=["stdin", "argument"]
)
def test_prompt_that_is_no_text_is_told_as_that(prompt: str, given: bytes) -> None:
    done = subprocess.run(
        [*PDSERVE, "generate", prompt], input=given, capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == b"error: the prompt is not valid UTF-8 (byte 3)\n"


def test_ctrl_c_before_anything_is_loaded_is_no_traceback() -> None:
    """A second's patience was not there: the imports were shown."""
    code = """
import sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "pdserve.cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
from pdserve.cli.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, "error: interrupted\n")


@pytest.mark.asyncio
async def test_closed_streams_take_nothing_and_change_nothing() -> None:
    """`pdserve … >&-` was told as a fault of pdserve's, and the stream's number would have gone to a socket."""
    closing = "import os, sys; os.close(0); os.close(1); os.execv(sys.argv[1], sys.argv[1:])"
    async with stub_router() as (_, address):
        command = (sys.executable, "-c", closing, *PDSERVE, "generate", "hi", "--server", address)
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        async with asyncio.timeout(DEADLINE_S):
            _, told = await process.communicate()
        assert (process.returncode, told) == (ExitCode.OK, b"")


@pytest.fixture
def full_disk() -> Iterator[IO[str]]:
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full is a device of Linux")
    with Path("/dev/full").open("w") as full:
        yield full


@pytest.mark.asyncio
async def test_full_disk_is_told_as_that(full_disk: IO[str]) -> None:
    async with stub_router() as (_, address):
        process = await asyncio.create_subprocess_exec(
            *PDSERVE, "generate", "hi", "--server", address, stdout=full_disk, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(DEADLINE_S):
            _, told = await process.communicate()
        assert process.returncode == ExitCode.FAILED
        assert told.startswith(b"error: cannot write: No space left on device\nhint: make room")


def test_letters_that_an_encoding_lacks_are_escaped() -> None:
    done = pdserve("doctor", PYTHONIOENCODING="ascii", PDSERVE_CAFE="é")
    assert "\\u2192" in done.stdout + done.stderr
    assert "itself failed" not in done.stderr


def test_busy_port_is_a_named_error(busy_port: int) -> None:
    done = pdserve("up", "--port", str(busy_port), "--json")
    assert done.returncode == ExitCode.ADDRESS
    assert f"port {busy_port}" in done.stderr
    assert "--port" in done.stderr
    told = json.loads(done.stdout)
    assert (told["event"], told["reason"], told["exit_code"]) == ("failed", "ADDRESS_IN_USE", ExitCode.ADDRESS)


@pytest.mark.parametrize(
    ("arguments", "event", "reason", "status"),
    [
        (["up", "--port", "x"], "failed", "CONFIG_ERROR", ExitCode.USAGE),
        (["up", "--model", "no-such-model"], "failed", "MODEL_UNAVAILABLE", ExitCode.MODEL),
        (["pull", "no-such-model"], "error", "MODEL_UNAVAILABLE", ExitCode.MODEL),
        (["status", "--server", "http://here:1"], "error", "INVALID_REQUEST", ExitCode.USAGE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_failure_is_a_json_object_too(
    arguments: list[str], event: str, reason: str, status: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    assert (told["event"], told["reason"], told["exit_code"]) == (event, reason, status)


def test_up_warns_once_of_a_variable_that_means_nothing() -> None:
    done = pdserve("up", "--port", "x", PDSERVE_KV_BLOKS="7")
    assert done.stderr.count("PDSERVE_KV_BLOKS") == 1
    assert "did you mean PDSERVE_KV_BLOCKS?" in done.stderr


def test_pull_takes_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    folder = prepared_dir(ALIASES[DEFAULT_MODEL])
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).touch()
    assert run(["pull"]) == ExitCode.OK


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


@pytest.mark.parametrize("place", ["file/cache", "link"])
def test_doctor_fails_a_cache_that_cannot_be_made(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / place))
    (found,) = models()
    assert (found.name, found.verdict) == ("cache", Verdict.FAIL)
    assert str(tmp_path / place) in found.fact
    assert "PDSERVE_CACHE" in found.advice


@pytest.mark.parametrize(("has_gpu", "verdict"), [(False, Verdict.OK), (True, Verdict.WARN)])
def test_doctor_misses_a_compiler_where_one_is_needed(
    has_gpu: bool, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    (found,) = compiler()
    assert (found.verdict, found.fact) == (verdict, "none")


def test_doctor_tells_which_native_operations_run(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_library()
    (found,) = native()
    if library is not None:
        assert (found.verdict, found.fact.partition(",")[0]) == (Verdict.OK, library.instruction_set)
    monkeypatch.setattr("pdserve.kernels.native.library.native_library", lambda: None)
    (found,) = native()
    assert (found.verdict, found.fact) == (Verdict.WARN, "not built for this processor")
    assert "C compiler" in found.advice


def test_doctor_looks_at_both_ports_of_a_router(busy_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterSettings.model_fields["http_port"], "default", busy_port)
    _, found = ports()
    assert found == Finding(
        "HTTP port",
        Verdict.WARN,
        f"{busy_port} is taken",
        "`pdserve status` tells whether it is a cluster; `pdserve up --http-port` takes another",
    )


def test_doctor_finds_nothing_broken_here() -> None:
    done = pdserve("doctor", "--json")
    told = json.loads(done.stdout)
    findings = told["findings"]
    assert done.returncode == told["exit_code"] == 0, findings
    names = {finding["name"] for finding in findings}
    assert {"python", "torch", "devices", "compiler", "triton", "shared memory", "cores", "memory", "cache"} <= names
    assert all(finding["advice"] for finding in findings if finding["verdict"] != "ok")
