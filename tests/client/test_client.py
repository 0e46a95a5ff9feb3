"""The client against the contract served over real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from pdserve.client import Answer, Chat, Client, Delta, Options, Turn
from pdserve.core.errors import InternalError, InvalidRequest, Overloaded, Unreachable
from pdserve.core.work import FinishReason
from pdserve.v1 import inference_pb2 as pb
from tests.client.stub_router import ANSWER, stub_router

DEADLINE_S = 30.0


@pytest.mark.asyncio
async def test_answer_arrives_part_by_part_and_whole() -> None:
    async with stub_router() as (_, address), Client(address) as client:
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
    async with stub_router() as (router, address), Client(address) as client:
        await client.complete("text")
        await client.complete((1, 2), Options(temperature=0.0, max_tokens=1, stop=("x",), seed=0))
        await client.complete(Chat((Turn("user", "hi"),)), Options(top_p=0.5, ignore_eos=True, stop_token_ids=(3,)))
        bare, ids, chat = router.requests
        assert bare == pb.GenerateRequest(text="text", stream=False, stop=bare.stop)
        assert not bare.HasField("sampling")
        assert not bare.stop.HasField("max_tokens")
        assert list(ids.token_ids.ids) == [1, 2]
        assert ids.sampling.HasField("temperature")
        assert ids.sampling.HasField("seed")
        assert (ids.stop.max_tokens, list(ids.stop.stop)) == (1, ["x"])
        assert chat.chat.messages[0].content == "hi"
        assert chat.sampling.top_p == 0.5
        assert (chat.stop.ignore_eos, list(chat.stop.stop_token_ids)) == (True, [3])


@pytest.mark.asyncio
async def test_number_that_the_field_cannot_hold_is_refused_by_name() -> None:
    async with stub_router() as (_, address), Client(address) as client:
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await client.complete("text", Options(max_tokens=-1))
        with pytest.raises(InvalidRequest, match="token_ids"):
            await client.complete((1, -2))


@pytest.mark.asyncio
async def test_routers_error_arrives_typed_after_the_parts_before_it() -> None:
    async with stub_router() as (router, address), Client(address) as client:
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
async def test_stream_that_ends_without_a_summary_is_an_error() -> None:
    async with stub_router() as (router, address), Client(address) as client:
        router.answer = ANSWER[:2]
        with pytest.raises(InternalError, match="without a summary"):
            await client.complete("hello")


@pytest.mark.asyncio
async def test_nothing_at_the_address_is_told_with_what_to_do() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1") as refused:
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
        async with Client(f"127.0.0.1:{port}") as client:
            parts = client.generate("hello")
            assert isinstance(await anext(parts), Delta)
            for writer in writers:
                writer.transport.abort()
            with pytest.raises(Unreachable, match="was lost before the answer was complete"):
                await anext(parts)


@pytest.mark.asyncio
async def test_leaving_the_answer_cancels_the_call() -> None:
    async with stub_router() as (router, address), Client(address) as client:
        router.answer, router.hangs = ANSWER[:1], True
        parts = client.generate("hello")
        await anext(parts)
        await parts.aclose()
        async with asyncio.timeout(DEADLINE_S):
            await router.cancelled.wait()


@pytest.mark.asyncio
async def test_cluster_state_and_models() -> None:
    async with stub_router() as (_, address), Client(address) as client:
        state = await client.cluster_state()
        assert [(node.state, node.process is None) for node in state.nodes] == [("ready", False), ("down", True)]
        assert state.sessions[0].state == "DECODING"
        assert (await client.models())[0].has_chat_template
        assert await client.is_ready()
