"""The client of threads, and what both clients do with many prompts, against the contract served over real gRPC."""

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from pdserve.client import NO_RETRIES, AnswerStream, AsyncClient, Chat, Client, Delta, Options, Summary, Turn
from pdserve.core.errors import Cancelled, InternalError, InvalidRequest, Overloaded, Unreachable
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.client.stub_router import ANSWER, MAX_MODEL_LEN, StubRouter, stub_router

DEADLINE_S = 30.0
T = TypeVar("T")


async def in_thread(address: str, work: Callable[[Client], T]) -> T:
    """Do `work` with a client in a thread, while this one serves."""

    def run() -> T:
        with Client(address, retry=NO_RETRIES) as client:
            return work(client)

    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.to_thread(run)


@pytest.mark.asyncio
async def test_parts_come_one_by_one_and_make_the_answer() -> None:
    def work(client: Client) -> tuple[list[str], str]:
        with client.generate("hello") as parts:
            kinds = [type(part).__name__ for part in parts]
            return kinds, parts.answer.text

    async with stub_router() as (router, address):
        kinds, text = await in_thread(address, work)
        assert kinds == ["Delta", "Delta", "Finished", "Summary"]
        assert text == "Zwölf Bären"
        assert router.requests[0] == pb.GenerateRequest(text="hello", stream=True)


@pytest.mark.asyncio
async def test_every_short_call_has_its_typed_answer() -> None:
    def work(client: Client) -> None:
        assert client.complete((1, 2), Options(max_tokens=4)).summary is not None
        assert client.models()[0].max_model_len == MAX_MODEL_LEN
        assert client.cluster_state().sessions[0].state == "DECODING"
        assert client.is_ready()
        tokens = client.tokenize(Chat((Turn("user", "a bcd"),)))
        assert (tokens.token_ids, tokens.names, tokens.max_model_len) == ((1, 3), ("a", "bcd"), MAX_MODEL_LEN)
        assert client.detokenize([1, 3]) == "x xxx"

    async with stub_router() as (_, address):
        await in_thread(address, work)
        async with AsyncClient(address) as client:
            assert (await client.tokenize("a bcd")).token_ids == (1, 3)
            assert await client.detokenize((1, 3)) == "x xxx"
            with pytest.raises(InvalidRequest, match="token_ids"):
                await client.detokenize((-1,))


@pytest.mark.asyncio
async def test_errors_are_those_of_the_router() -> None:
    def broken(client: Client) -> None:
        with pytest.raises(InternalError, match="without a summary"):
            client.complete("hello")

    def full(client: Client) -> None:
        with client.generate("hello") as parts, pytest.raises(Overloaded) as refused:
            parts.whole()
        assert (refused.value.hint, refused.value.retry_after_s, parts.answer.text) == ("come back", 2.0, "Zwölf")

    def nowhere(client: Client) -> None:
        with pytest.raises(Unreachable, match="no router answers at"):
            client.models()
        assert not client.is_ready()

    async with stub_router() as (router, address):
        router.answer = ANSWER[:1]
        await in_thread(address, broken)
        router.error = Overloaded("full", hint="come back", retry_after_s=2.0)
        await in_thread(address, full)
    await in_thread("127.0.0.1:1", nowhere)
    with pytest.raises(InvalidRequest, match="has no port"):
        Client("localhost")


@pytest.mark.parametrize("how", ["with", "close", "let go"])
@pytest.mark.asyncio
async def test_leaving_the_answer_cancels_the_call(how: str) -> None:
    def work(client: Client) -> AnswerStream | None:
        if how == "let go":
            for _ in client.generate("hello"):
                break
            return None
        parts = client.generate("hello")
        assert isinstance(next(parts), Delta)
        if how == "close":
            parts.close()
        else:
            with parts:
                pass
        return parts

    async with stub_router() as (router, address):
        router.answer, router.hangs = ANSWER[:1], True
        with Client(address) as client:  # open to the end: closing it would cancel by itself
            async with asyncio.timeout(DEADLINE_S):
                left = await asyncio.to_thread(work, client)
                await router.cancelled.wait()
            assert (left is None) is (how == "let go")


@pytest.mark.asyncio
async def test_another_thread_cancels_and_the_one_that_reads_is_told() -> None:
    async with stub_router() as (router, address):
        router.answer, router.hangs = ANSWER[:1], True
        begun = threading.Event()

        def read() -> None:
            for _ in parts:
                begun.set()

        with Client(address) as client:
            parts = client.generate("hello")
            async with asyncio.timeout(DEADLINE_S):
                reading = asyncio.create_task(asyncio.to_thread(read))
                assert await asyncio.to_thread(begun.wait, DEADLINE_S)
                parts.cancel()
                with pytest.raises(Cancelled, match="by its own client"):
                    await reading
                await router.cancelled.wait()
            assert parts.answer.text == "Zwölf"


@pytest.mark.asyncio
async def test_cancelling_an_asyncio_answer_does_not_look_like_a_cancelled_task() -> None:
    async with stub_router() as (router, address), AsyncClient(address) as client:
        router.answer, router.hangs = ANSWER[:1], True
        async with asyncio.timeout(DEADLINE_S), client.generate("hello") as parts:
            await anext(parts)
            parts.cancel()
            with pytest.raises(Cancelled, match="by its own client"):
                await anext(parts)
            await router.cancelled.wait()


@pytest.mark.asyncio
async def test_closing_the_client_ends_its_answers_as_cancelled() -> None:
    async with stub_router() as (router, address):
        router.answer, router.hangs = ANSWER[:1], True
        async with asyncio.timeout(DEADLINE_S), AsyncClient(address) as client:
            parts = client.generate("hello")
            await anext(parts)
            await client.close()
            with pytest.raises(Cancelled):
                await anext(parts)
            await router.cancelled.wait()


@pytest.mark.asyncio
async def test_cancelled_task_stays_cancelled() -> None:
    async with stub_router() as (router, address), AsyncClient(address) as client:
        router.answer, router.hangs = (), True
        parts = client.generate("hello")
        task = asyncio.create_task(parts.whole())
        async with asyncio.timeout(DEADLINE_S):
            await router.asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await router.cancelled.wait()


class Crowd(StubRouter):
    """Answers with the prompt as text; counts how many requests it has at once. Holds all until `num` came, fails `bad`."""

    def __init__(self, num: int, bad: str = "") -> None:
        super().__init__()
        self.num, self.bad = num, bad
        self.now = self.most = self.num_cancelled = 0
        self.gate, self.all_cancelled = asyncio.Event(), asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: object) -> None:  # type: ignore[override] # as in StubRouter
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == self.num:
            self.gate.set()
        try:
            await self.gate.wait()
            if self.bad and request.text != self.bad:
                await asyncio.Event().wait()
            if self.bad:
                self.answer, self.error = (), InvalidRequest("bad prompt", field="text")
            else:
                self.answer = (pb.GenerateResponse(deltas=[pb.Delta(text=request.text)]), *ANSWER[2:])
            await super().Generate(request, context)  # type: ignore[arg-type] # gRPC passes its own context
        except asyncio.CancelledError:
            self.num_cancelled += 1
            if self.num_cancelled == self.num - 1:
                self.all_cancelled.set()
            raise
        finally:
            self.now -= 1


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.asyncio
async def test_many_prompts_run_a_few_at_once_and_keep_their_order(kind: str) -> None:
    prompts = [f"p{i}" for i in range(20)]
    router = Crowd(3)
    async with stub_router(router) as (_, address):
        if kind == "sync":
            answers = await in_thread(address, lambda client: client.complete_many(prompts, concurrency=3))
        else:
            async with AsyncClient(address) as client:
                answers = await client.complete_many(iter(prompts), concurrency=3)
        assert [answer.text for answer in answers] == prompts
        assert router.most == 3


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.asyncio
async def test_first_failure_of_many_cancels_the_others(kind: str) -> None:
    prompts = ["p0", "p1", "p2", "p3"]
    router = Crowd(3, bad="p1")

    async def ask() -> None:
        if kind == "sync":
            await in_thread(address, lambda client: client.complete_many(prompts, concurrency=3))
        else:
            async with AsyncClient(address) as client:
                await client.complete_many(prompts, concurrency=3)

    async with stub_router(router) as (_, address), asyncio.timeout(DEADLINE_S):
        with pytest.raises(InvalidRequest, match="bad prompt"):
            await ask()
        await router.all_cancelled.wait()
        assert len(router.requests) <= 2
    with pytest.raises(InvalidRequest, match="concurrency is 0"):
        Client("127.0.0.1:1").complete_many(["a"], concurrency=0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate of this test")
@pytest.mark.asyncio
async def test_tls_is_spoken_with_the_certificates_that_are_given(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    command = ["openssl", "req", "-x509", *curve, *subject, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(StubRouter(), server)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", root_certificates=certificate.read_bytes()) as client:
            assert (await client.complete("hello")).text == "Zwölf Bären"

        def ask() -> Summary | None:
            with Client(f"127.0.0.1:{port}", root_certificates=certificate.read_bytes()) as plain:
                return plain.complete("hello").summary

        assert await asyncio.to_thread(ask) is not None
        async with AsyncClient(f"127.0.0.1:{port}", retry=NO_RETRIES) as stranger:
            with pytest.raises(Unreachable):
                await stranger.complete("hello")
    finally:
        await server.stop(0)
