"""Requests of several sequences, logprobs and usage over real streams between a router and scripted nodes (classes 11, 20)."""

from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pdserve.core.errors import AttemptsExhausted
from pdserve.core.work import FinishReason, Sampling
from pdserve.router import pb
from pdserve.router.instructions import Finish
from pdserve.router.mailbox import Parcel
from pdserve.router.output import Gain, PromptToken, Shown
from pdserve.router.request import TokenInput, ValidRequest
from pdserve.rpc.errors import error_from_rpc
from pdserve.v1 import inference_pb2, node_pb2
from tests.router.client_calls import IDS, Call, ask, submits
from tests.router.scripted_node import ScriptedNode, Stage, leg, start_stage, until

PROMPT = inference_pb2.TokenIds(ids=IDS[:3])


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with start_stage(tmp_path) as running:
        await running.until("ready", 2)
        yield running
        await running.leak_oracle()


class Received:
    """All messages of an answer, by what they hold."""

    def __init__(self, messages: list[inference_pb2.GenerateResponse]) -> None:
        self.messages = messages
        self.deltas = [delta for message in messages for delta in message.deltas]
        self.finished = [end for message in messages for end in message.finished]
        self.prompt = [token for message in messages for token in message.prompt]
        assert [message.HasField("summary") for message in messages] == [False] * (len(messages) - 1) + [True]
        self.summary = messages[-1].summary

    def ids(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for delta in self.deltas:
            found[delta.sequence] += delta.token_ids
        return dict(found)


async def received(call: Call) -> Received:
    return Received([message async for message in call])


def release(stage: Stage, *submits: node_pb2.Submit) -> None:
    for submit in submits:
        stage.prefill[0].released(submit)
        stage.decode[0].released(submit)


@pytest.mark.asyncio
async def test_the_walk_of_three_sequences(stage: Stage) -> None:
    call = ask(stage, 3, n=3, top_logprobs=1)
    submit, same = await submits(stage)
    assert submit == same
    assert (submit.num_sequences, submit.first_sequence, submit.top_logprobs) == (3, 0, 1)
    stage.prefill[0].first_tokens(submit, IDS[:3])
    stage.decode[0].adopted(submit)
    for sequence in (2, 0, 1):
        stage.decode[0].tokens(submit, 1, [IDS[sequence], IDS[7]], is_last=True, sequence=sequence)
    release(stage, submit)
    answer = await received(call)
    assert answer.ids() == {i: [IDS[i], IDS[i], IDS[7]] for i in range(3)}
    assert sorted(end.sequence for end in answer.finished) == [0, 1, 2]
    assert answer.summary.usage.completion_tokens == 9
    for delta in answer.deltas:
        assert [list(top.token_ids) for top in delta.top_logprobs] == [[token_id] for token_id in delta.token_ids]


@pytest.mark.asyncio
async def test_a_stop_text_cancels_one_sequence_on_both_nodes(stage: Stage) -> None:
    request: dict[str, Any] = {"n": 2, "stop": inference_pb2.StopConditions(stop=["b"], max_tokens=3)}
    call = ask(stage, 3, **request)
    submit, _ = await submits(stage)
    stage.prefill[0].first_tokens(submit, [IDS[0], IDS[1]])
    for node in (stage.prefill[0], stage.decode[0]):
        cancel = await node.next_of("cancel")
        assert (cancel.session_id, list(cancel.sequences)) == (submit.session_id, [1])
    stage.decode[0].adopted(submit)
    stage.decode[0].tokens(submit, 1, [IDS[2], IDS[3]], is_last=True)
    for node in (stage.prefill[0], stage.decode[0]):
        assert not (await node.next_of("cancel")).sequences, "what is left of the legs goes as a whole"
    release(stage, submit)
    answer = await received(call)
    assert answer.ids() == {0: [IDS[0], IDS[2], IDS[3]]}
    ends = {end.sequence: (end.reason, end.stop) for end in answer.finished}
    assert ends == {
        0: (inference_pb2.FINISH_REASON_LENGTH, ""),
        1: (inference_pb2.FINISH_REASON_STOP_SEQUENCE, "b"),
    }


@pytest.mark.asyncio
async def test_a_lost_node_parts_the_sequences_and_the_client_sees_one_answer(tmp_path: Path) -> None:
    async with start_stage(tmp_path) as stage:
        await stage.until("ready", 2)
        call = ask(stage, 3, n=2)
        first, _ = await submits(stage)
        stage.prefill[0].first_tokens(first, IDS[:2], num_cached_tokens=1)
        stage.decode[0].adopted(first)
        stage.decode[0].tokens(first, 1, [IDS[4]], sequence=1)
        await until(lambda: stage.router.sessions.rows(1)[0].num_output_tokens == 3)
        stage.decode[0].hang_up()
        resumed = [await stage.prefill[0].next_of("submit") for _ in range(2)]
        parts = sorted(resumed, key=lambda submit: int(submit.first_sequence))
        assert await stage.decode[0].next_of("submit") == parts[0]
        assert [(part.first_sequence, part.num_sequences, part.attempt) for part in parts] == [(0, 1, 2), (1, 1, 2)]
        assert [list(part.output_ids) for part in parts] == [[IDS[0]], [IDS[1], IDS[4]]]
        assert parts[0].session_id == first.session_id != parts[1].session_id
        assert parts[1].transfer_id == b"", "one token is left: nothing is handed over"
        assert (stage.gauges()["admitted"], stage.gauges()["sessions"]) == (2, 2), "two answers, now two sessions"
        stage.prefill[0].first_tokens(parts[1], [IDS[5]], num_cached_tokens=99)
        stage.prefill[0].first_tokens(parts[0], [IDS[6]], num_cached_tokens=99)
        stage.decode[0].adopted(parts[0])
        stage.decode[0].tokens(parts[0], 2, [IDS[7]], is_last=True)
        stage.prefill[0].released(first)
        stage.prefill[0].released(parts[1])
        release(stage, parts[0])
        answer = await received(call)
        assert answer.ids() == {0: [IDS[0], IDS[6], IDS[7]], 1: [IDS[1], IDS[4], IDS[5]]}
        assert sorted(end.sequence for end in answer.finished) == [0, 1]
        usage = answer.summary.usage
        assert (usage.cached_prompt_tokens, usage.completion_tokens) == (1, 6)
        assert answer.summary.timeline.attempts == 2
        assert [int(process.role) for process in answer.summary.processes][:2] == [1, 2]
        await stage.leak_oracle()
        assert stage.gauges()["served_total"] == 1


@pytest.mark.asyncio
async def test_a_part_that_fails_ends_the_request_with_one_error(tmp_path: Path) -> None:
    async with start_stage(tmp_path, max_attempts=2) as stage:
        await stage.until("ready", 2)
        call = ask(stage, 3, n=2)
        first, _ = await submits(stage)
        stage.prefill[0].first_tokens(first, IDS[:2])
        stage.decode[0].adopted(first)
        await until(lambda: stage.gauges()["sessions.decoding"] == 1)
        stage.decode[0].hang_up()
        parts = [(await submits(stage))[0] for _ in range(2)]
        stage.decode[0].released(parts[1], node_pb2.LEG_OUTCOME_FAILED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await received(call)
        error = error_from_rpc(caught.value)
        assert isinstance(error, AttemptsExhausted)
        assert error.metadata["num_tokens_sent"] == "2"
        other = await stage.decode[0].next_of("cancel")
        assert other.session_id == parts[0].session_id, "the other part is cancelled"
        release(stage, *parts)
        stage.prefill[0].released(first)
        await stage.leak_oracle()
        assert (stage.gauges()["failed_total"], stage.gauges()["served_total"]) == (1, 0)


@pytest.mark.asyncio
async def test_a_client_that_leaves_parts_leaves_nothing(tmp_path: Path) -> None:
    async with start_stage(tmp_path) as stage:
        await stage.until("ready", 2)
        call = ask(stage, 3, n=2)
        first, _ = await submits(stage)
        stage.prefill[0].first_tokens(first, IDS[:2])
        await until(lambda: stage.gauges()["sessions.handing_over"] == 1)
        stage.decode[0].hang_up()
        parts = [(await submits(stage))[0] for _ in range(2)]
        call.cancel()
        numbers = {(await stage.decode[0].next_of("cancel")).session_id for _ in range(2)}
        assert numbers == {part.session_id for part in parts}
        release(stage, *parts)
        stage.prefill[0].released(first)
        await stage.leak_oracle()
        assert stage.gauges()["cancelled_total"] == 1


@pytest.mark.asyncio
async def test_prompt_scores_come_before_the_first_delta(stage: Stage) -> None:
    call = ask(stage, 1, text=None, token_ids=PROMPT, prompt_logprobs=True, top_logprobs=1)
    submit = await stage.prefill[0].next_of("submit")
    assert submit.prompt_logprobs
    for start in (1, 2):
        top = [inference_pb2.TopLogprobs(token_ids=[9], logprobs=[-0.25])]
        scores = node_pb2.LegPromptLogprobs(start=start, logprobs=[-float(start)], top_logprobs=top)
        stage.prefill[0].step(events=[leg(submit, prompt_logprobs=scores)])
    stage.prefill[0].first_tokens(submit, IDS[:1])
    stage.prefill[0].released(submit)
    answer = await received(call)
    assert [(token.token_id, token.logprob if token.HasField("logprob") else None) for token in answer.prompt] == [
        (IDS[0], None),
        (IDS[1], -1.0),
        (IDS[2], -2.0),
    ]
    assert [list(token.top.token_ids) for token in answer.prompt] == [[], [9], [9]]
    kinds = [kind for message in answer.messages for kind in ("prompt", "deltas") if getattr(message, kind)]
    assert kinds[0] == "prompt"
    assert kinds.count("prompt") == 1


@pytest.mark.parametrize("length", [1, 4096, 4097, 10_000])
def test_scores_of_a_long_prompt_are_cut_into_messages_of_a_mebibyte(length: int) -> None:
    top = tuple((2**20 + index, -float(index)) for index in range(20))
    prompt = tuple(PromptToken(2**20 + index, -1.0, top) for index in range(length))
    gain, finish = Gain(0, Shown("x")), Finish(0, FinishReason.LENGTH)
    pieces = list(pb.prompt_pieces(Parcel(prompt, (gain,), (finish,))))
    assert [token for piece in pieces for token in piece.prompt] == list(prompt)
    assert all(piece.prompt for piece in pieces)
    assert [bool(piece.gains or piece.finished) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    closing = pb.Closing(ValidRequest("", "m", TokenInput((1,)), Sampling(), 1, top_logprobs=20), ())
    assert max(pb.response(piece, closing).ByteSize() for piece in pieces) < 1 << 20


# ---- usage, from what the nodes said


def usage_of_log(nodes: list[ScriptedNode], sessions: list[int], num_prompt: int) -> tuple[int, int]:
    """Return (cached, completion) tokens of a request from the nodes' own words.

    Every output position counts once, whoever said it and however often; what was cached is the first report, within the prompt.
    """
    positions: set[tuple[int, int]] = set()
    reports: list[tuple[int, int]] = []
    for event in (event for node in nodes for output in node.spoken for event in output.events):
        if event.session_id in sessions and event.WhichOneof("event") in ("first_token", "adopted"):
            body = event.first_token if event.HasField("first_token") else event.adopted
            positions |= {(token.sequence, token.index) for token in body.tokens}
            if event.HasField("first_token"):
                reports.append((event.attempt, event.first_token.num_cached_tokens))
    for tokens in (tokens for node in nodes for output in node.spoken for tokens in output.tokens):
        if tokens.session_id in sessions:
            positions |= {(tokens.sequence, tokens.first_index + offset) for offset in range(len(tokens.token_ids))}
    return min(min(reports)[1], num_prompt), len(positions)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("loss", ["never", "before the first token", "handing over", "decoding"])
@pytest.mark.asyncio
async def test_usage_is_what_the_event_log_says(tmp_path: Path, loss: str, n: int) -> None:
    """Failure class 20: cached tokens are the prefill node's, of the first attempt, and never more than the prompt has."""
    async with start_stage(tmp_path) as stage:
        await stage.until("ready", 2)
        prefill, decode = stage.prefill[0], stage.decode[0]
        call = ask(stage, 4, text=None, token_ids=PROMPT, n=n)
        open_submits = [(await submits(stage))[0]]
        sessions = [open_submits[0].session_id]
        num_cached = 2
        if loss != "never":
            first = open_submits.pop()
            if loss != "before the first token":
                prefill.first_tokens(first, IDS[:n], num_cached)
                num_cached = 99  # the output so far is cached as well
            if loss == "decoding":
                decode.adopted(first)
                for sequence in range(n):
                    decode.tokens(first, 1, [IDS[7]], sequence=sequence)
            said = {"before the first token": 0, "handing over": n, "decoding": 2 * n}[loss]
            await until(lambda: stage.router.sessions.rows(1)[0].num_output_tokens == said)
            decode.hang_up()
            num_parts = n if said else 1
            open_submits = [(await submits(stage))[0] for _ in range(num_parts)]
            prefill.released(first)
            num_cached = 99
        for submit in open_submits:
            sessions.append(submit.session_id)
            base = len(submit.output_ids)
            prefill.first_tokens(submit, IDS[: submit.num_sequences], num_cached)
            decode.adopted(submit)
            for sequence in range(submit.first_sequence, submit.first_sequence + submit.num_sequences):
                rest = IDS[base + 1 : 4]
                decode.tokens(submit, base + 1, rest, is_last=True, sequence=sequence)
            release(stage, submit)
        answer = await received(call)
        usage = answer.summary.usage
        cached, completion = usage_of_log([prefill, decode], sessions, 3)
        assert (usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens) == (3, cached, completion)
        assert completion == 4 * n == sum(map(len, answer.ids().values()))
        assert cached == (3 if loss == "before the first token" else 2)
        await stage.leak_oracle()
