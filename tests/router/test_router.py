"""The router's process between scripted nodes: real gRPC on both sides, everything else the test's words."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from pdserve.core.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    Draining,
    SlowReader,
)
from pdserve.router import answering, pb
from pdserve.router.mailbox import Parcel
from pdserve.rpc.errors import error_from_rpc
from pdserve.v1 import inference_pb2, node_pb2
from tests.router.client_calls import IDS, ask, collect, failure, submits
from tests.router.models import CHAT_TEMPLATE, byte_level_tokenizer
from tests.router.scripted_node import DEADLINE_S, Stage, start_stage, until

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with start_stage(tmp_path) as running:
        await running.until("ready", 2)
        yield running
        await running.leak_oracle()


async def test_the_walk_of_a_request(stage: Stage) -> None:
    call = ask(stage, request_id="label")
    submit, same = await submits(stage)
    assert submit == same, "the same message goes to both nodes"
    assert (len(submit.transfer_id), submit.attempt, submit.request_label) == (16, 1, "label")
    assert (submit.prefill_incarnation, submit.decode_incarnation) == (
        stage.prefill[0].incarnation,
        stage.decode[0].incarnation,
    )
    assert submit.max_tokens == 4
    assert 0 < submit.deadline_s <= DEADLINE_S + 1, "gRPC rounds timeouts up"
    stage.prefill[0].first_token(submit, IDS[0])
    first = await call.read()
    assert isinstance(first, inference_pb2.GenerateResponse)
    assert first.deltas[0].text == "a", "the first token does not wait for the transfer"
    stage.decode[0].adopted(submit)
    stage.prefill[0].released(submit)
    stage.decode[0].tokens(submit, 1, IDS[1:3])
    stage.decode[0].tokens(submit, 3, IDS[3:4], is_last=True)
    stage.decode[0].released(submit)
    text, ids, summary = await collect(call)
    assert (text, ids) == ("bcd", IDS[1:4])
    assert (summary.request_id, summary.usage.completion_tokens) == ("label", 4)
    assert [int(process.role) for process in summary.processes] == [1, 2, 3]
    names = [entry.name for entry in summary.timeline.stages]
    assert names == ["admission", "placement", "prefill", "handover", "decode", "answer"]
    total = sum(entry.duration_s for entry in summary.timeline.stages)
    assert total == pytest.approx(summary.timeline.e2el_s)


async def test_the_whole_answer_in_one_message(stage: Stage) -> None:
    call = ask(stage, 1, stream=False)
    submit = await stage.prefill[0].next_of("submit")
    assert (submit.transfer_id, submit.decode_incarnation) == (b"", b"")
    stage.prefill[0].first_token(submit, IDS[0])
    stage.prefill[0].released(submit)
    messages = [message async for message in call]
    assert len(messages) == 1
    assert messages[0].deltas[0].text == "a"
    assert messages[0].finished[0].reason == inference_pb2.FINISH_REASON_LENGTH
    assert messages[0].HasField("summary")


async def test_a_large_whole_answer_is_made_beside_the_event_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: 60 answers of 1000 tokens with 20 likely ones each held every stream up for as long as their message took to make."""
    threads: list[threading.Thread] = []

    def watched(parcel: Parcel, closing: pb.Closing) -> Message:
        threads.append(threading.current_thread())
        return made(parcel, closing)

    made = pb.response
    monkeypatch.setattr(pb, "response", watched)
    for most in (1, 0):
        monkeypatch.setattr(answering, "MAX_INLINE_ENTRIES", most)
        call = ask(stage, 1, stream=False)
        submit = await stage.prefill[0].next_of("submit")
        stage.prefill[0].first_token(submit, IDS[0])
        stage.prefill[0].released(submit)
        (message,) = [message async for message in call]
        assert list(message.deltas[0].token_ids) == IDS[:1]
        assert message.HasField("summary")
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_peers_are_told_before_work_and_again_when_they_change(tmp_path: Path) -> None:
    async with start_stage(tmp_path, num_decode=2) as stage:
        await stage.until("ready", 3)
        known: set[bytes] = set()
        wanted = {node.incarnation for node in stage.decode}
        while known != wanted:
            peers = await stage.prefill[0].next_of("peers")
            known = {peer.incarnation for peer in peers.nodes}
            assert all(peer.kv_endpoints for peer in peers.nodes)
        stage.decode[1].hang_up()
        peers = await stage.prefill[0].next_of("peers")
        assert [peer.incarnation for peer in peers.nodes] == [stage.decode[0].incarnation]
        await stage.until("ready", 3)


async def test_a_broken_stream_resumes_on_the_other_node_with_tokens_apart(tmp_path: Path) -> None:
    async with start_stage(tmp_path, num_decode=2) as stage:
        await stage.until("ready", 3)
        call = ask(stage)
        first = await stage.prefill[0].next_of("submit")
        lost = next(node for node in stage.decode if node.incarnation == first.decode_incarnation)
        other = next(node for node in stage.decode if node is not lost)
        stage.prefill[0].first_token(first, IDS[0])
        lost.adopted(first)
        lost.tokens(first, 1, IDS[1:2])
        await until(lambda: stage.router.sessions.rows(1)[0].num_output_tokens == 2)
        await lost.stop()
        second = await other.next_of("submit")
        assert (second.attempt, list(second.output_ids)) == (2, IDS[:2])
        assert (second.prompt_ids, second.max_tokens) == (first.prompt_ids, 4)
        assert second.transfer_id != first.transfer_id
        other.adopted(second)
        other.tokens(second, 2, IDS[2:4], is_last=True)
        other.released(second)
        for submit in (first, second):
            stage.prefill[0].released(submit)
        text, ids, summary = await collect(call)
        assert (text, ids) == ("abcd", IDS[:4])
        assert (summary.timeline.attempts, len(summary.timeline.stalls)) == (2, 1)
        assert summary.timeline.stalls[0].cause.startswith("decode_lost")
        await stage.leak_oracle()


async def test_a_silent_node_is_lost_within_its_lease(tmp_path: Path) -> None:
    """gRPC answers pings for a hung application; only its own beats prove that it lives."""
    async with start_stage(tmp_path, max_attempts=1) as stage:
        await stage.until("ready", 2)
        call = ask(stage)
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, IDS[0])
        stage.decode[0].is_silent = True
        error = await failure(call)
        assert isinstance(error, AttemptsExhausted)
        assert error.metadata["num_tokens_sent"] == "1"
        assert "silent" in error.hint


async def test_the_router_gives_signs_of_life(stage: Stage) -> None:
    await until(lambda: min(stage.prefill[0].num_beats, stage.decode[0].num_beats) >= 3)


async def test_a_busy_node_is_asked_again_after_a_pause(stage: Stage) -> None:
    """Nothing else happens meanwhile: the pause itself must end."""
    call = ask(stage)
    for attempt in (1, 2):
        submit, _ = await submits(stage)
        assert submit.attempt == attempt
        stage.decode[0].released(submit, node_pb2.LEG_OUTCOME_BUSY)
        stage.prefill[0].released(await stage.prefill[0].next_of("cancel"), node_pb2.LEG_OUTCOME_CANCELLED)
    await submits(stage)
    call.cancel()
    for node in (stage.prefill[0], stage.decode[0]):
        node.released(await node.next_of("cancel"), node_pb2.LEG_OUTCOME_CANCELLED)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failed_answer_ends_with_the_error_alone(tmp_path: Path, stream: bool) -> None:
    """What was streamed was streamed; an answer asked for whole comes whole or not at all."""
    async with start_stage(tmp_path, max_attempts=1) as stage:
        await stage.until("ready", 2)
        call = ask(stage, stream=stream)
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, IDS[0])
        if stream:
            assert isinstance(await call.read(), inference_pb2.GenerateResponse)
        await until(lambda: stage.gauges()["sessions.handing_over"] == 1)
        stage.decode[0].released(submit, node_pb2.LEG_OUTCOME_FAILED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert error_from_rpc(caught.value).metadata["num_tokens_sent"] == "1"
        stage.prefill[0].released(submit, node_pb2.LEG_OUTCOME_CANCELLED)
        await stage.leak_oracle()


async def test_a_long_prompt_is_split_and_no_message_is_over_a_mebibyte(tmp_path: Path) -> None:
    async with start_stage(tmp_path) as stage:
        await stage.until("ready", 2)
        for node in (*stage.prefill, *stage.decode):
            node.max_model_len = 1 << 20
            await node.attach_anew()
        await stage.until("ready", 2)
        ids = [3 + index % 200 for index in range(300_000)]
        call = ask(stage, 4, token_ids=inference_pb2.TokenIds(ids=ids), text=None)
        submit = await stage.prefill[0].next_of("submit")
        got = list(submit.prompt_ids)
        assert submit.num_prompt_ids == len(ids)
        while len(got) < len(ids):
            part = await stage.prefill[0].next_of("submit_part")
            assert part.ByteSize() < 1 << 20
            got += part.prompt_ids
        assert (got == ids, submit.ByteSize() < 1 << 20) == (True, True)
        call.cancel()
        for node in (stage.prefill[0], stage.decode[0]):
            node.released(await node.next_of("cancel"))
        await stage.leak_oracle()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("stage_name", ["submitted", "first token", "adopted"])
async def test_a_client_that_leaves_is_cancelled_on_both_nodes(stage: Stage, how: str, stage_name: str) -> None:
    call = ask(stage, timeout=DEADLINE_S if how == "cancel" else 0.5)
    submit, _ = await submits(stage)
    if stage_name != "submitted":
        stage.prefill[0].first_token(submit, IDS[0])
    if stage_name == "adopted":
        stage.decode[0].adopted(submit)
    if how == "cancel":
        call.cancel()
    else:
        assert isinstance(await failure(call), DeadlineExceeded)
    for node in (stage.prefill[0], stage.decode[0]):
        cancel = await node.next_of("cancel")
        assert cancel.session_id == submit.session_id
        node.released(cancel, node_pb2.LEG_OUTCOME_CANCELLED)


async def test_two_live_requests_may_have_one_label(stage: Stage) -> None:
    calls = [ask(stage, 1, request_id="same") for _ in range(2)]
    for _ in calls:
        submit = await stage.prefill[0].next_of("submit")
        stage.prefill[0].first_token(submit, IDS[0])
        stage.prefill[0].released(submit)
    for call in calls:
        text, _, summary = await collect(call)
        assert (text, summary.request_id) == ("a", "same")


async def test_a_slow_reader_is_given_up_and_slows_nobody(tmp_path: Path) -> None:
    async with start_stage(tmp_path, max_unread_bytes=4096) as stage:
        await stage.until("ready", 2)
        for node in (*stage.prefill, *stage.decode):
            node.max_model_len = 1 << 20
            await node.attach_anew()
        await stage.until("ready", 2)
        slow = ask(stage, 900_000)
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, IDS[0])
        stage.decode[0].adopted(submit)
        cancelled = asyncio.create_task(stage.decode[0].next_of("cancel"))
        index = 1
        while not cancelled.done():  # nobody reads `slow`: gRPC's own buffers fill first, then the mailbox
            stage.decode[0].tokens(submit, index, IDS[:1] * 2000)
            index += 2000
            await asyncio.sleep(0.001)
        quick = ask(stage, 1)
        other = await stage.prefill[0].next_of("submit")
        stage.prefill[0].first_token(other, IDS[0])
        stage.prefill[0].released(other)
        assert (await collect(quick))[0] == "a"
        for node in (stage.prefill[0], stage.decode[0]):
            node.released(submit)
        assert isinstance(await failure(slow), SlowReader)
        await stage.leak_oracle()


async def test_drain_refuses_new_work_and_finishes_the_old(tmp_path: Path) -> None:
    async with start_stage(tmp_path) as stage:
        await stage.until("ready", 2)
        call = ask(stage)
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, IDS[0])
        stage.stop.set()
        await until(lambda: stage.router.admission.is_draining)
        assert isinstance(await failure(ask(stage)), Draining)
        stage.decode[0].adopted(submit)
        stage.prefill[0].released(submit)
        stage.decode[0].tokens(submit, 1, IDS[1:4], is_last=True)
        stage.decode[0].released(submit)
        assert (await collect(call))[1] == IDS[:4]


async def test_a_second_signal_ends_open_requests_at_once(tmp_path: Path) -> None:
    async with start_stage(tmp_path) as stage:
        await stage.until("ready", 2)
        call = ask(stage)
        await submits(stage)
        stage.stop.set()
        stage.stop_now.set()
        assert isinstance(await failure(call), Draining)


async def test_words_of_no_use_change_nothing(stage: Stage) -> None:
    """Unknown sessions, empty messages, repeated and late events: counted, and the stream lives on."""
    ghost = node_pb2.Submit(session_id=999, attempt=1)
    stage.decode[0].tokens(ghost, 0, IDS)
    stage.decode[0].released(ghost)
    stage.decode[0].say()
    stage.decode[0].step(events=[node_pb2.LegEvent(session_id=999)])
    call = ask(stage, 1)
    submit = await stage.prefill[0].next_of("submit")
    for _ in range(3):
        stage.prefill[0].first_token(submit, IDS[0])
    stage.prefill[0].released(submit)
    stage.prefill[0].released(submit)
    assert (await collect(call))[1] == IDS[:1]
    await until(lambda: stage.router.sessions.num_stray_events >= 3)
    assert stage.decode[0].num_streams == 1


async def test_models_are_listed_with_what_the_nodes_hold(stage: Stage) -> None:
    answer = await stage.stub.ListModels(inference_pb2.ListModelsRequest())
    assert [(model.name, model.max_model_len, model.has_chat_template) for model in answer.models] == [
        ("model", 1000, True)
    ]


async def test_chat_is_rendered_by_the_models_template(stage: Stage) -> None:
    turns = [inference_pb2.ChatMessage(role="user", content="hé<|im_end|>")]
    call = ask(stage, 1, text=None, chat=inference_pb2.ChatInput(messages=turns))
    submit = await stage.prefill[0].next_of("submit")
    rendered = "<|im_start|>user\nhé<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert list(submit.prompt_ids) == byte_level_tokenizer().encode(rendered, add_special_tokens=False).ids
    assert "assistant" in CHAT_TEMPLATE
    stage.prefill[0].first_token(submit, IDS[0])
    stage.prefill[0].released(submit)
    await collect(call)
