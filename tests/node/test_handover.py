"""Several sequences across the hand-over, with real engines: the right tokens, and nothing left (classes 10, 11, 13 and 19).

Every test closes both oracles: `pair` looks for leaks and poisons freed blocks, and tokens are compared with single runs, or
with transformers' own.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from pdserve.core.work import Sampling, Work
from pdserve.decode_node.desk import DecodeDesk
from pdserve.decode_node.leg import LegStage
from pdserve.engine.attention import ATTENTION_NAME
from pdserve.engine.batch import Chosen, SequenceChunk
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import RowState, SampledRow
from tests.engine.small import model_of, prompt_of, small_engine
from tests.node.pair import Pair, pair
from tests.node.works import leg, transfer, work

pytestmark = pytest.mark.asyncio

NUM_TOKENS = 12
PLAIN = Sampling(temperature=1.0, seed=5)
EVERYTHING = Sampling(
    temperature=1.1,
    top_k=60,
    top_p=0.97,
    seed=11,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((7, 2.0), (20, -3.0)),
    banned_token_ids=frozenset({3, 9}),
    banned_sequences=((12, 13), (40,)),
)


def a_leg(session: int, prompt: tuple[int, ...], sampling: Sampling, **changes: object) -> Work:
    made = replace(work(session, max_tokens=NUM_TOKENS, sampling=sampling), prompt_ids=prompt)
    return replace(made, **changes)  # type: ignore[arg-type] # test rows of many types


async def single_runs(nodes: Pair, made: Work) -> dict[int, list[int]]:
    """Return the tokens of each sequence of a leg when it runs as a leg of its own, one after another."""
    outputs: dict[int, list[int]] = {}
    for sequence in made.sequences:
        session = 100 + 10 * made.leg.session.session_id + sequence
        own = {"leg": leg(session), "transfer_id": transfer(session), "num_sequences": 1, "first_sequence": sequence}
        outputs |= (await nodes.outputs(replace(made, **own)))[session]  # type: ignore[arg-type] # as above
    return outputs


@cache
def lone_engine() -> Engine:
    return small_engine(block_size=16, num_blocks=4)


def straight(made: Work, sequence: int) -> list[int]:
    """Return the tokens of a sequence from one engine, without nodes: the whole context at once, then token by token."""
    engine, output = lone_engine(), list[int]()
    state = RowState(made.sampling, made.prompt_ids, (), made.stop_token_ids, made.min_tokens)
    tokens, start = made.prompt_ids, 0
    while len(output) < NUM_TOKENS:
        row = SampledRow(made.sampling, sequence, len(output), 0, state)
        [choice] = engine.step([SequenceChunk(tokens, start, range(4), (row,))]).chunks[0].choices
        assert isinstance(choice, Chosen)
        output.append(choice.token_id)
        state.accept(choice.token_id)
        start += len(tokens)
        tokens = (choice.token_id,)
    return output


@pytest.mark.parametrize("sampling", [PLAIN, EVERYTHING], ids=["plain", "everything"])
async def test_four_sequences_give_the_tokens_of_four_single_runs(sampling: Sampling) -> None:
    async with pair() as nodes:
        for session, length in enumerate((13, 15, 3)):  # the decode node's blocks have 5 positions
            together = a_leg(session, prompt_of(length), sampling, num_sequences=4, min_tokens=5)
            singles = await single_runs(nodes, together)
            assert singles == {sequence: straight(together, sequence) for sequence in range(4)}
            assert len({tuple(tokens) for tokens in singles.values()}) == 4, "seeds tell"
            before = [nodes.prefill.desk.gauges()["forwards"], nodes.decode.desk.gauges()["decode.copied_total"]]
            assert (await nodes.outputs(together))[session] == singles
            after = [nodes.prefill.desk.gauges()["forwards"], nodes.decode.desk.gauges()["decode.copied_total"]]
            assert after[0] - before[0] == -(-length // 7), "one prefill, in chunks of 7"
            assert after[1] - before[1] == (3 if length % 5 else 0), "the last block, for each sequence but one"
            assert nodes.prefill.of(session).events == ["first_token", "ended", "released"]
            assert nodes.decode.of(session).events == ["granted", "adopted", "ended", "released"]
            assert nodes.decode.of(session).outcome == "FINISHED"


async def test_greedy_tokens_logprobs_and_prompt_scores_are_those_of_transformers() -> None:
    prompt, num_top = prompt_of(13), 4
    async with pair() as nodes:
        made = a_leg(1, prompt, Sampling(), num_sequences=2, top_logprobs=num_top, prompt_logprobs=True)
        output = (await nodes.outputs(made))[1]
        module: Any = model_of("qwen3").module
        module.set_attn_implementation("eager")
        try:
            ids = torch.tensor([prompt])
            expected = module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
            )
            with torch.inference_mode():
                logprobs = torch.log_softmax(module(expected, use_cache=False).logits[0].float(), dim=-1)
        finally:
            module.set_attn_implementation(ATTENTION_NAME)
        tokens = expected[0].tolist()
        assert output == {0: tokens[13:], 1: tokens[13:]}
        for sequence in range(2):
            for token in nodes.decode.of(1).tokens[sequence]:
                check_scores(logprobs[12 + token.index], token.token_id, token.logprob, dict(token.top), num_top)
        scores = nodes.prefill.of(1).scores
        assert len(scores) == 12
        for position, (logprob, top) in enumerate(scores, start=1):
            check_scores(logprobs[position - 1], prompt[position], logprob, top, num_top)
        assert nodes.prefill.of(1).events[-3:] == ["first_token", "ended", "released"]


def check_scores(row: torch.Tensor, token_id: int, logprob: float, top: dict[int, float], num_top: int) -> None:
    """Compare what was told of one position with log-probabilities [vocabulary]."""
    assert logprob == pytest.approx(float(row[token_id]), abs=1e-4)
    best = torch.topk(row, num_top)
    assert list(top) == best.indices.tolist()
    assert list(top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_each_sequence_ends_by_its_own_stop_id() -> None:
    async with pair() as nodes:
        free = a_leg(1, prompt_of(13), PLAIN, num_sequences=4)
        tokens = (await nodes.outputs(free))[1]
        # One stops at its first token, one in the middle; what the others say does not hold these ids.
        stops = frozenset({tokens[1][0], tokens[3][6]})
        expected = {sequence: cut(output, stops) for sequence, output in tokens.items()}
        assert len({len(output) for output in expected.values()}) > 2
        stopping = a_leg(2, prompt_of(13), PLAIN, num_sequences=4, stop_token_ids=stops)
        assert (await nodes.outputs(stopping))[2] == expected


async def test_no_stop_id_is_chosen_before_min_tokens_on_either_node() -> None:
    """Failure class 10: the first token comes from the prefill node, the others from the decode node."""
    async with pair() as nodes:
        free = a_leg(1, prompt_of(13), PLAIN, num_sequences=4)
        tokens = (await nodes.outputs(free))[1]
        stops = frozenset(token_id for output in tokens.values() for token_id in output[:4])
        for session, min_tokens in ((2, 1), (3, 6), (4, NUM_TOKENS)):
            made = a_leg(session, prompt_of(13), PLAIN, num_sequences=4, stop_token_ids=stops, min_tokens=min_tokens)
            for output in (await nodes.outputs(made))[session].values():
                assert len(output) > min_tokens or len(output) == NUM_TOKENS
                assert not stops & set(output[:min_tokens])
                assert not stops & set(output[:-1])


def cut(output: list[int], stops: frozenset[int]) -> list[int]:
    """Return the output up to and including the first stop id."""
    ends = [index for index, token_id in enumerate(output) if token_id in stops]
    return output[: ends[0] + 1] if ends else output


async def test_what_ends_at_its_first_tokens_is_never_adopted() -> None:
    """Failure class 10."""
    async with pair() as nodes:
        firsts = {
            tokens[0] for tokens in (await nodes.outputs(a_leg(1, prompt_of(13), PLAIN, num_sequences=3)))[1].values()
        }
        steps = nodes.decode.desk.gauges()["steps"]
        stopping = a_leg(2, prompt_of(13), PLAIN, num_sequences=3, stop_token_ids=frozenset(firsts))
        single = a_leg(3, prompt_of(13), PLAIN, num_sequences=3, max_tokens=1, transfer_id=None)
        outputs = await nodes.outputs(stopping, single)
        assert [len(tokens) for output in outputs.values() for tokens in output.values()] == [1] * 6
        assert "adopted" not in nodes.decode.of(2).events
        assert nodes.decode.of(2).outcome == "FINISHED"
        assert nodes.decode.of(3).events == [], "nothing is handed over for a single token"
        assert nodes.decode.desk.gauges()["steps"] == steps


async def test_sequences_are_cancelled_at_any_token_and_the_others_do_not_notice() -> None:
    async with pair() as nodes:
        expected = await single_runs(nodes, a_leg(0, prompt_of(13), EVERYTHING, num_sequences=4))
        for session, (sequence, after) in enumerate([(0, 0), (0, 1), (2, 2), (3, 7), (1, 11)], start=1):
            made = a_leg(session, prompt_of(13), EVERYTHING, num_sequences=4)
            nodes.on_progress = Canceller(nodes, session, sequence, after)
            output = (await nodes.outputs(made))[session]
            assert (
                output.pop(sequence, []) == expected[sequence][: len(nodes.decode.of(session).tokens.get(sequence, []))]
            )
            assert output == {other: tokens for other, tokens in expected.items() if other != sequence}
            assert nodes.decode.of(session).outcome == "FINISHED"


class Canceller:
    """Ends a sequence as soon as a number of its tokens were seen; with 0 at once."""

    def __init__(self, nodes: Pair, session: int, sequence: int, after: int) -> None:
        self._nodes, self._session, self._sequence, self._after = nodes, session, sequence, after

    def __call__(self) -> None:
        seen = self._nodes.decode.of(self._session).tokens.get(self._sequence, [])
        if len(seen) >= self._after:
            self._nodes.cancel(leg(self._session), self._sequence)


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_whole_leg_is_cancelled_and_its_blocks_come_home(after: int) -> None:
    async with pair() as nodes:
        made = a_leg(1, prompt_of(13), PLAIN, num_sequences=4, max_tokens=40)

        def cancel() -> None:
            if len(nodes.decode.of(1).tokens.get(3, [])) >= after and nodes.decode.legs.is_open(leg(1)):
                nodes.cancel(leg(1))

        nodes.on_progress = cancel
        nodes.submit(made)
        await nodes.finish()
        assert nodes.decode.of(1).outcome == "CANCELLED"


async def test_an_evicted_leg_resumes_as_a_leg_for_each_sequence_with_the_same_tokens() -> None:
    """Failure classes 9 and 13: state is rebuilt from token ids alone, here as the router would resume it."""
    async with pair() as nodes:
        expected = await single_runs(nodes, a_leg(0, prompt_of(13), EVERYTHING, num_sequences=3, max_tokens=20))
    async with pair(blocks=19) as nodes:
        older = a_leg(1, prompt_of(14, 1), PLAIN, num_sequences=2, max_tokens=24)
        younger = a_leg(2, prompt_of(13), EVERYTHING, num_sequences=3, max_tokens=20)
        nodes.on_progress = StartTogether(nodes, older, younger)
        await nodes.outputs(older, younger)
        assert (nodes.decode.of(1).outcome, nodes.decode.of(2).outcome) == ("FINISHED", "EVICTED")
        assert nodes.decode.desk.gauges()["decode.evicted_total"] == 1
        for sequence, tokens in nodes.output(2).items():
            assert tokens == expected[sequence][: len(tokens)]
            session = 10 + sequence
            changes = {"first_sequence": sequence, "output_ids": tuple(tokens), "max_tokens": 20}
            resumed = a_leg(session, prompt_of(13), EVERYTHING, **changes)
            rest = (await nodes.outputs(resumed))[session][sequence]
            assert tokens + rest == expected[sequence]


@pytest.mark.parametrize("after", [1, 2, 6])
async def test_a_leg_is_handed_back_twice_and_each_sequence_goes_on_exactly(after: int) -> None:
    """Failure class 9: right after adoption (the first token is all there is), after one more, and in the middle."""
    async with pair() as nodes:
        made = a_leg(1, prompt_of(13), EVERYTHING, num_sequences=2, min_tokens=8)
        expected = await single_runs(nodes, made)
        nodes.on_progress = HandBack(nodes, 1, after)
        done = (await nodes.outputs(made))[1]
        assert nodes.decode.of(1).outcome == "DRAINED"
        for sequence, first_part in done.items():
            tokens = first_part
            for session in (20 + sequence, 30 + sequence):
                assert after <= len(tokens) < NUM_TOKENS
                assert tokens == expected[sequence][: len(tokens)]
                changes = {"first_sequence": sequence, "output_ids": tuple(tokens), "min_tokens": 8}
                nodes.on_progress = HandBack(nodes, session, 2) if session < 30 else lambda: None
                resumed = a_leg(session, prompt_of(13), EVERYTHING, **changes)
                tokens = tokens + (await nodes.outputs(resumed))[session][sequence]
            assert tokens == expected[sequence]


class HandBack:
    """Drains a leg from the decode node once each of its sequences has so many tokens there."""

    def __init__(self, nodes: Pair, session: int, after: int) -> None:
        self._nodes, self._session, self._after = nodes, session, after

    def __call__(self) -> None:
        seen = self._nodes.decode.of(self._session).tokens.values()
        if seen and min(map(len, seen)) >= self._after and self._nodes.decode.legs.is_open(leg(self._session)):
            self._nodes.decode.desk.drain(leg(self._session))


class StartTogether:
    """Lets no sequence run before all legs are adopted, so that what follows depends on no speed."""

    def __init__(self, nodes: Pair, *works: Work) -> None:
        desk = nodes.decode.desk
        assert isinstance(desk, DecodeDesk)
        self._nodes, self._desk, self._works, self._waits = nodes, desk, works, True

    def __call__(self) -> None:
        scheduler = self._desk._scheduler
        for made in self._works if self._waits else ():
            if made.leg in scheduler._legs:
                scheduler._legs[made.leg].awaits_constraint = True
        if self._waits and scheduler.count_legs(LegStage.ADOPTED) == len(self._works):
            self._waits = False
            for made in self._works:
                self._desk._do(scheduler.constraint_ready(made.leg))


async def test_token_ids_that_the_model_does_not_have_are_refused_on_both_nodes() -> None:
    async with pair() as nodes:
        for session, sampling in enumerate(
            [
                Sampling(logit_bias=((199, 1.0),)),
                Sampling(allowed_token_ids=frozenset({199})),
                Sampling(banned_token_ids=frozenset({5, 4000})),
                Sampling(banned_sequences=((1, 2), (3, 199))),
            ]
        ):
            nodes.submit(a_leg(session, prompt_of(5), sampling))
            await nodes.finish()
            for node in (nodes.prefill, nodes.decode):
                assert (node.of(session).outcome, node.of(session).reason) == ("REFUSED", "bad_token_id")
