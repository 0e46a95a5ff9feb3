"""`pdserve chat` as a person at a terminal and as a pipe meet it, against the contract served over real gRPC."""

import asyncio
import signal

import pytest

from pdserve.cli.exit_codes import ExitCode
from pdserve.core.errors import Overloaded
from pdserve.v1 import inference_pb2 as pb
from tests.cli.terminal import CHAT, DEADLINE_S, terminal_chat
from tests.client.stub_router import ANSWER, SUMMARY, stub_router

CUT = (
    pb.GenerateResponse(deltas=[pb.Delta(text="x", token_ids=[5], logprobs=[-0.5])]),
    pb.GenerateResponse(finished=[pb.Finished(reason=pb.FINISH_REASON_LENGTH)], summary=SUMMARY),
)


async def piped(given: str | bytes, *arguments: str) -> tuple[int, str, str]:
    """Run `pdserve chat` with piped input; return its exit status, output and errors."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*CHAT, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate(given if isinstance(given, bytes) else given.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def turns(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


@pytest.mark.asyncio
async def test_each_piped_line_is_a_question_and_the_history_goes_along() -> None:
    async with stub_router() as (router, address):
        status, out, err = await piped(
            "one\n\ntwo\n/retry\n/reset\nthree", "--server", address, "--system", "be brief", "--top-k", "4"
        )
        assert (status, out, err) == (0, "Zwölf Bären\n" * 4, "")
        system, one, two = ("system", "be brief"), ("user", "one"), ("user", "two")
        answer = ("assistant", "Zwölf Bären")
        assert [turns(request) for request in router.requests] == [
            [system, one],
            [system, one, answer, two],
            [system, one, answer, two],
            [system, ("user", "three")],
        ]
        assert router.requests[0].sampling.top_k == 4


@pytest.mark.asyncio
async def test_models_length_makes_the_oldest_exchanges_go_with_a_notice() -> None:
    question = " ".join(["word"] * 20)
    async with stub_router() as (router, address):
        status, _, err = await piped(f"{question}\n" * 3, "--server", address)
        assert status == 0
        assert [len(request.chat.messages) for request in router.requests] == [1, 3, 3]
        assert err == "the model's length is reached: 1 oldest exchange forgotten\n"


@pytest.mark.asyncio
async def test_cut_answer_is_told_and_stats_are_there_for_the_asking() -> None:
    async with stub_router() as (router, address):
        router.answer = CUT
        status, out, err = await piped("one\n", "--server", address, "--stats")
        assert (status, out) == (0, "x\n")
        cut, stats = err.splitlines()
        assert cut.startswith("cut here: ")
        assert stats.startswith("TTFT 500 ms · TPOT 750.0 ms · 3 tokens")


@pytest.mark.asyncio
async def test_error_ends_a_pipe_with_its_exit_status() -> None:
    async with stub_router() as (router, address):
        router.refusals.append(Overloaded("queues are full", hint="come back", retry_after_s=2.0))
        status, out, err = await piped("one\ntwo\n", "--server", address)
        assert (status, out) == (ExitCode.UNAVAILABLE, "")
        assert err == "error: queues are full\nhint: come back\n"
        assert len(router.requests) == 1
        status, _, err = await piped("/exit\n", "--server", address)
        assert (status, err.splitlines()[0]) == (ExitCode.USAGE, "error: /exit is no command")
        status, _, err = await piped("hi\n", "--server", address, "--model", "other")
        assert (status, err.splitlines()[0]) == (ExitCode.MODEL, "error: --model: model other is not served here")
        status, _, err = await piped(b"ok\ncaf\xe9\n", "--server", address)
        assert (status, err) == (ExitCode.USAGE, "error: line 2 of the input is not valid UTF-8 (byte 3)\n")
    status, _, err = await piped("one\n", "--server", "127.0.0.1:1")
    assert status == ExitCode.UNAVAILABLE
    assert "no router answers at" in err


@pytest.mark.asyncio
async def test_interrupt_of_a_pipe_cancels_and_ends() -> None:
    async with stub_router() as (router, address):
        router.answer, router.hangs = ANSWER[:1], True
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*CHAT, "--server", address, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            process.stdin.write(b"one\n")
            assert await process.stdout.readexactly(6) == "Zwölf".encode()
            process.send_signal(signal.SIGINT)
            await router.cancelled.wait()
            _, told = await process.communicate()
        assert (process.returncode, told) == (ExitCode.INTERRUPTED, b"error: interrupted\n")


@pytest.mark.asyncio
async def test_ctrl_c_on_a_terminal_cancels_the_answer_and_nothing_else() -> None:
    async with stub_router() as (router, address), terminal_chat(address) as (person, process):
        assert "m, up to 64 tokens" in await person.read_until("> ")
        router.answer, router.hangs = ANSWER[:1], True
        person.type("one\n")
        await person.read_until("Zwölf")
        person.type("\x03")
        async with asyncio.timeout(DEADLINE_S):
            await router.cancelled.wait()
        await person.read_until("cancelled")
        await person.read_until("> ")
        router.answer, router.hangs = ANSWER, False
        person.type("two\n")
        await person.read_until("Zwölf Bären")
        assert "TTFT 500 ms" in await person.read_until("> ")
        assert turns(router.requests[1]) == [("user", "one"), ("assistant", "Zwölf"), ("user", "two")]
        person.type("/quit\n")
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0


@pytest.mark.asyncio
async def test_error_and_ctrl_c_at_the_prompt_do_not_end_a_terminal_ctrl_d_does() -> None:
    async with stub_router() as (router, address), terminal_chat(address, "--no-stats") as (person, process):
        await person.read_until("> ")
        router.refusals.append(Overloaded("queues are full", hint="come back"))
        person.type("one\n")
        await person.read_until("error: queues are full")
        await person.read_until("> ")
        person.type("/retry\n")
        await person.read_until("Zwölf Bären")
        assert "TTFT" not in await person.read_until("> ")
        assert turns(router.requests[1]) == [("user", "one")]
        person.type("half a li")
        # Ctrl-C has the terminal throw away what nobody has read yet; readline, told that there was something, waits for it.
        await person.read_until("half a li")
        await person.interrupt_until("Ctrl-D or /quit leaves")
        await person.read_until("> ")
        person.type("/help\n")
        await person.read_until("/system")
        await person.read_until("> ")
        person.type("\x04")
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
        assert len(router.requests) == 2
