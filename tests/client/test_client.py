"""The client against the contract served over real gRPC."""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator

import pytest

from pdserve.client import Answer, AsyncClient, Chat, Delta, JsonSchema, NamedTool, Options, Turn
from pdserve.client.checks import check_address
from pdserve.client.request import Prompt
from pdserve.core.errors import InternalError, InvalidRequest, Overloaded, Unreachable
from pdserve.core.work import FinishReason
from pdserve.rpc.server import GrpcServer
from pdserve.v1 import inference_pb2 as pb
from tests.client.stub_router import ANSWER, stub_router

DEADLINE_S = 30.0


@pytest.mark.asyncio
async def test_answer_arrives_part_by_part_and_whole() -> None:
    async with stub_router() as (_, address), AsyncClient(address) as client:
        answer = Answer()
        async for part in client.generate("hello"):
            answer.add(part)
        assert answer.text == "Zwölf Bären"
        assert answer.token_ids == [5, 6, 7]
        assert [delta.logprobs for delta in answer.deltas] == [(-0.5,), (-0.25, -0.125)]
        assert answer.finished is not None
        assert (answer.finished.reason, answer.finished.stop_token_id) == (FinishReason.STOP, 7)
        assert answer.summary is not None
        assert answer.summary.usage.cached_prompt_tokens == 1
        assert [stage.name for stage in answer.summary.timeline.stages] == ["prefill", "decode"]
        assert answer.summary.timeline.stages[0].nodes == (("prefill.compute", 0.4),)
        assert answer.summary.timeline.stalls[0].cause == "decode_lost"
        arrivals = [delta.arrival_s for delta in answer.deltas]
        assert arrivals == sorted(arrivals)


@pytest.mark.asyncio
async def test_unset_options_stay_unset_and_given_ones_travel() -> None:
    async with stub_router() as (router, address), AsyncClient(address) as client:
        await client.complete("text")
        await client.complete((1, 2), Options(temperature=0.0, max_tokens=1, stop=("x",), seed=0))
        await client.complete(Chat((Turn("user", "hi"),)), Options(top_p=0.5, ignore_eos=True, stop_token_ids=(3,)))
        bare, ids, chat = router.requests
        assert bare == pb.GenerateRequest(text="text", stream=False)
        assert not bare.HasField("sampling")
        assert not bare.HasField("stop")
        assert list(ids.token_ids.ids) == [1, 2]
        assert ids.sampling.HasField("temperature")
        assert ids.sampling.HasField("seed")
        assert (ids.stop.max_tokens, list(ids.stop.stop)) == (1, ["x"])
        assert chat.chat.messages[0].content == "hi"
        assert chat.sampling.top_p == 0.5
        assert (chat.stop.ignore_eos, list(chat.stop.stop_token_ids)) == (True, [3])


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("text", Options(max_tokens=-1), "max_tokens must be a whole number from 1 to 4,294,967,295, not -1"),
        ("text", Options(top_k=2**32), "top_k must be a whole number from 0 to 4,294,967,295"),
        ("text", Options(seed=-1), "seed must be a whole number from 0 to 18,446,744,073,709,551,615"),
        ("text", Options(timeout_s=0.0), "timeout_s must be above 0"),
        ("text", Options(timeout_s=math.nan), "timeout_s must be above 0"),
        ("text", Options(timeout_s=86_400.5), "timeout_s must be above 0, at most 86,400"),
        ("text", Options(stop_token_ids=(1, -2)), "id -2 at index 1"),
        ((1, 2**32), Options(), "id 4294967296 at index 1"),
        ("\udcff", Options(), "the prompt is not valid UTF-8"),
        (Chat((Turn("user", "\ud800"),)), Options(), "the prompt is not valid UTF-8"),
        ("text", Options(stop=("\udcff",)), "the stop text is not valid UTF-8"),
        (Chat((Turn("user", "a", name="\ud800"),)), Options(), "chat.messages[0] is not valid UTF-8"),
        (
            Chat((Turn("user", "a"), Turn("assistant", "a", reasoning="\ud800"))),
            Options(),
            "chat.messages[1] is not valid",
        ),
        (Chat((Turn("user", "a"),), tools=({}, {"a": "\ud800"})), Options(), "chat.tools[1] is not valid UTF-8"),
        (Chat((Turn("user", "a"),), tools=({"a": {1}},)), Options(), "chat.tools[0]: an object that is no JSON"),
        (Chat((Turn("user", "a"),), tool_choice=NamedTool("\ud800")), Options(), "chat.tool_choice is not valid UTF-8"),
        (
            Chat((Turn("user", "a"),), template_arguments="\ud800"),
            Options(),
            "chat.template_arguments is not valid UTF-8",
        ),
        ("text", Options(structured_output=JsonSchema({"a": "\ud800"})), "structured_output is not valid UTF-8"),
    ],
)
@pytest.mark.asyncio
async def test_what_cannot_be_sent_is_refused_by_name(prompt: Prompt, options: Options, said: str) -> None:
    async with stub_router() as (router, address), AsyncClient(address) as client:
        with pytest.raises(InvalidRequest, match=re.escape(said)) as refused:
            await client.complete(prompt, options)
        assert refused.value.field
        assert router.requests == []


@pytest.mark.asyncio
async def test_tokenize_refuses_what_cannot_be_sent() -> None:
    async with stub_router() as (_, address), AsyncClient(address) as client:
        with pytest.raises(InvalidRequest, match="text is not valid UTF-8"):
            await client.tokenize("\ud800")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "is empty"),
        ("localhost", "has no port"),
        ("[::1]", "has no port"),
        (":50051", "has no host"),
        ("host:", "has no port from 1 to 65,535"),
        ("host:0", "has no port from 1 to 65,535"),
        ("host:65536", "has no port from 1 to 65,535"),
        ("host:50051/x", "has no port from 1 to 65,535"),
        ("http://host:50051", "has a scheme (http://)"),
        ("::1:50051", "several colons"),
        ("a b:1", "has characters that no address has"),
    ],
)
def test_address_says_what_is_wrong_with_it(address: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        check_address(address)


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:65535", "[::1]:50051", "pod-0.nodes.svc:50051"])
def test_address_that_is_host_and_port_is_taken(address: str) -> None:
    check_address(address)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as a server of another protocol."""
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


@pytest.mark.asyncio
async def test_stranger_that_answers_is_told_as_that() -> None:
    node = GrpcServer("127.0.0.1", 0)
    await node.start()
    try:
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as web:
            for port in (node.port, web.sockets[0].getsockname()[1]):
                async with AsyncClient(f"127.0.0.1:{port}") as client:
                    with pytest.raises(Unreachable, match=f"what answers at 127.0.0.1:{port} is no pdserve router"):
                        await client.cluster_state()
                    with pytest.raises(Unreachable, match="is no pdserve router"):
                        await client.complete("hello")
    finally:
        await node.stop(0)


@pytest.mark.asyncio
async def test_routers_error_arrives_typed_after_the_parts_before_it() -> None:
    async with stub_router() as (router, address), AsyncClient(address) as client:
        router.answer = ANSWER[:1]
        router.error = Overloaded("queues are full", hint="come back", retry_after_s=2.0)
        answer = Answer()
        with pytest.raises(Overloaded) as refused:
            async for part in client.generate("hello"):
                answer.add(part)
        assert answer.text == "Zwölf"
        assert (refused.value.message, refused.value.hint) == ("queues are full", "come back")
        assert refused.value.retry_after_s == 2.0


@pytest.mark.asyncio
async def test_message_that_grpc_refuses_for_its_size_is_no_overload() -> None:
    """A prompt of 9 MB was told as "no capacity, try again", in gRPC's words."""
    async with stub_router() as (router, address), AsyncClient(address) as client:
        with pytest.raises(InvalidRequest, match="the request is larger than the router takes") as refused:
            await client.complete("w" * (5 << 20))
        assert "--max-message-bytes" in refused.value.hint
        with pytest.raises(InvalidRequest, match="the request is larger"):
            await client.complete("w" * (65 << 20))
        router.answer = (pb.GenerateResponse(deltas=[pb.Delta(text="w" * (65 << 20))]),)
        with pytest.raises(InvalidRequest, match="the answer is larger"):
            await client.complete("hello")


@pytest.mark.asyncio
async def test_stream_that_ends_without_a_summary_is_an_error() -> None:
    async with stub_router() as (router, address), AsyncClient(address) as client:
        router.answer = ANSWER[:2]
        with pytest.raises(InternalError, match="without a summary"):
            await client.complete("hello")


@pytest.mark.asyncio
async def test_nothing_at_the_address_is_told_with_what_to_do() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unreachable, match=r"no router answers at 127\.0\.0\.1:1 \(connection refused\)") as refused:
            await client.cluster_state()
        assert "pdserve up" in refused.value.hint
        assert not await client.is_ready()


@contextlib.asynccontextmanager
async def relay_to(address: str) -> AsyncIterator[tuple[asyncio.Server, list[asyncio.StreamWriter]]]:
    """A TCP relay in front of `address`; its open connections can be cut."""
    host, _, port = address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, far_writer))
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    async with await asyncio.start_server(on_connection, "127.0.0.1", 0) as server:
        yield server, writers


@pytest.mark.asyncio
async def test_connection_that_breaks_in_mid_answer_is_told_as_that() -> None:
    async with stub_router() as (router, address), relay_to(address) as (relay, writers):
        router.answer, router.hangs = ANSWER[:1], True
        port = relay.sockets[0].getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            parts = client.generate("hello")
            assert isinstance(await anext(parts), Delta)
            for writer in writers:
                writer.transport.abort()
            with pytest.raises(Unreachable, match="was lost before the answer was complete"):
                await anext(parts)


@pytest.mark.asyncio
async def test_leaving_the_answer_cancels_the_call() -> None:
    async with stub_router() as (router, address), AsyncClient(address) as client:
        router.answer, router.hangs = ANSWER[:1], True
        parts = client.generate("hello")
        await anext(parts)
        await parts.aclose()
        async with asyncio.timeout(DEADLINE_S):
            await router.cancelled.wait()


@pytest.mark.asyncio
async def test_cluster_state_and_models() -> None:
    async with stub_router() as (_, address), AsyncClient(address) as client:
        state = await client.cluster_state()
        assert [(node.state, node.process is None) for node in state.nodes] == [("ready", False), ("down", True)]
        assert state.sessions[0].state == "DECODING"
        assert (await client.models())[0].has_chat_template
        assert await client.is_ready()
