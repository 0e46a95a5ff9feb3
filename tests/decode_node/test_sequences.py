"""Several sequences on one context (failure class 11): one transfer, shared blocks, a copy before the first write, ends apart."""

from dataclasses import replace

import pytest

from pdserve.core.work import FinishReason, Grammar, GrammarKind, LegOutcome, SampledToken, Sampling
from pdserve.decode_node.instructions import (
    BlockCopy,
    CancelTransfer,
    GrantTransfer,
    Instruction,
    ReportAdopted,
    ReportToken,
    StepPlan,
)
from pdserve.decode_node.leg import LegStage
from pdserve.decode_node.limits import DecodeLimits
from pdserve.decode_node.scheduler import DecodeScheduler
from pdserve.decode_node.sequence import SequenceState
from pdserve.engine.batch import Chosen, ChunkResult
from pdserve.engine.blocks import BlockPool
from pdserve.node.reports import ReportEnd, ReportRelease
from tests.node.works import leg, transfer, work

EOS = 2


def scheduler(blocks: int = 32, *, batch: int = 8, growth: int = 0) -> DecodeScheduler:
    limits = DecodeLimits(max_batch=batch, max_model_len=64, block_size=4, growth_blocks=growth)
    return DecodeScheduler(limits, BlockPool(blocks), frozenset({EOS}))


def first(sequence: int, token_id: int = 50, *, index: int = 0, reason: FinishReason | None = None) -> SampledToken:
    return SampledToken(index, token_id, -0.5, reason, sequence)


def adopt(
    target: DecodeScheduler, number: int, tokens: tuple[SampledToken, ...] | None = None, **of_work: int
) -> list[Instruction]:
    """Bring a leg into ADOPTED, its transfer closed; every instruction on the way."""
    submitted = work(number, **of_work)  # type: ignore[arg-type] # all are numbers here
    told = target.submit(submitted, 0.0) + target.opened(transfer(number), 0.0)
    if tokens is None:
        tokens = tuple(first(sequence) for sequence in submitted.sequences)
    told += target.received(transfer(number), tokens, 0.0, 0.01, 0.5)
    return told + target.transfer_closed(transfer(number), 0.5)


def plan(target: DecodeScheduler) -> StepPlan:
    made, _ = target.plan(1.0)
    assert made is not None
    return made


def done(target: DecodeScheduler, made: StepPlan, *token_ids: int) -> list[Instruction]:
    """Finish a step; `token_ids` in the order of its sequences, 7 for all if none are given."""
    ids = token_ids or (7,) * len(made.sequences)
    results = [ChunkResult((Chosen(token_id, -0.1, ((token_id, -0.1),)),)) for token_id in ids]
    told = target.step_done(made, results, 0.1, 1.1)
    target.check_invariants()
    return told


def ran(made: StepPlan) -> list[int]:
    return [sequence.index for sequence in made.sequences]


def kinds(instructions: list[Instruction]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def test_full_blocks_are_shared_and_the_partial_one_is_copied_once_per_further_sequence() -> None:
    target = scheduler()
    told = adopt(target, 1, prompt=10, max_tokens=4, sequences=4)
    [grant] = [item for item in told if isinstance(item, GrantTransfer)]
    assert [type(item) for item in told].count(ReportAdopted) == 1
    pool = target._pool
    assert (pool.num_used, pool.num_shared) == (2 + 4, 3), "two full blocks, and the partial one until it is copied"
    made = plan(target)
    assert ran(made) == [0, 1, 2, 3]
    tables = [list(sequence.lease.block_ids) for sequence in made.sequences]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 4
    own = [table[2] for table in tables]
    assert len(set(own)) == 4
    assert made.copies == tuple(BlockCopy(own[0], block, 2) for block in own[1:])
    assert grant.lease.block_ids == [], "the transfer's hold is over, the sequences have theirs"
    done(target, made)
    assert (pool.num_used, pool.num_shared, target.num_copied) == (6, 2, 3)
    assert plan(target).copies == ()


def test_a_leg_that_ended_keeps_no_room_to_grow() -> None:
    """Its blocks come back with the corridor's last word; what it might have taken besides is free at once."""
    target = scheduler(16, growth=4)
    target.submit(work(1, prompt=4, sequences=3), 0.0)
    target.opened(transfer(1), 0.0)
    target.submit(work(2, prompt=4), 0.1)
    assert target.opened(transfer(2), 0.1) == [], "3 x 4 blocks are kept for the first, which has 4 of 16"
    target.cancel(leg(1), LegOutcome.CANCELLED, "client", 0.2)
    assert kinds(target.grant_waiting(0.3)) == [GrantTransfer]


def test_a_context_of_full_blocks_needs_no_copy() -> None:
    target = scheduler()
    adopt(target, 1, prompt=8, sequences=3)
    made = plan(target)
    assert made.copies == ()
    assert len({sequence.lease.block_ids[2] for sequence in made.sequences}) == 3
    assert target._pool.num_used == 2 + 3


def test_each_sequence_ends_on_its_own_and_the_leg_with_the_last() -> None:
    target = scheduler()
    adopt(target, 1, prompt=10, max_tokens=4, sequences=3)
    told = done(target, plan(target), 7, EOS, 8)
    assert told == [
        ReportToken(leg(1), SampledToken(1, 7, -0.1, None, 0, ((7, -0.1),))),
        ReportToken(leg(1), SampledToken(1, EOS, -0.1, FinishReason.STOP, 1, ((EOS, -0.1),))),
        ReportToken(leg(1), SampledToken(1, 8, -0.1, None, 2, ((8, -0.1),))),
    ]
    made = plan(target)
    assert ran(made) == [0, 2]
    told = done(target, made, EOS, 7)
    assert kinds(told) == [ReportToken, ReportToken]
    told = done(target, plan(target))
    assert isinstance(told[0], ReportToken)
    assert (told[0].token.sequence, told[0].token.finish_reason) == (2, FinishReason.LENGTH)
    assert told[1] == ReportEnd(leg(1), LegOutcome.FINISHED, "finished")
    assert kinds(told[2:]) == [ReportRelease]
    assert target._pool.num_free == 32


def test_what_ended_at_its_first_token_never_runs() -> None:
    target = scheduler()
    tokens = (first(0, EOS, reason=FinishReason.STOP), first(1), first(2, EOS, reason=FinishReason.STOP), first(3))
    told = adopt(target, 1, tokens, prompt=10, sequences=4)
    [adopted] = [item for item in told if isinstance(item, ReportAdopted)]
    assert adopted.tokens == tokens
    made = plan(target)
    assert ran(made) == [1, 3]
    assert len(made.copies) == 1
    assert target._pool.num_used == 2 + 2


def test_a_commit_of_nothing_but_ends_finishes_the_leg() -> None:
    target = scheduler()
    told = adopt(target, 1, (first(0, EOS), first(1, EOS)), prompt=10, sequences=2)
    assert ReportEnd(leg(1), LegOutcome.FINISHED, "finished") in told
    assert kinds(told)[-1] is ReportRelease
    assert target.plan(1.0)[0] is None
    assert target._pool.num_free == 32


@pytest.mark.parametrize(
    "tokens",
    [(), (first(0), first(0)), (first(3),), (first(0, index=1),)],
    ids=["none", "twice", "stranger", "index"],
)
def test_first_tokens_that_make_no_sense_fail_the_leg(tokens: tuple[SampledToken, ...]) -> None:
    target = scheduler()
    told = adopt(target, 1, tokens, prompt=10, sequences=3)
    [end] = [item for item in told if isinstance(item, ReportEnd)]
    assert (end.outcome, end.reason) == (LegOutcome.FAILED, "bad_first_tokens")
    target.check_invariants()
    assert target._pool.num_free == 32


@pytest.mark.parametrize("stage", ["expected", "waiting", "receiving"])
def test_sequences_that_are_cancelled_before_adoption_never_start(stage: str) -> None:
    target = scheduler(blocks=12 if stage == "waiting" else 32)
    if stage == "waiting":
        adopt(target, 0, prompt=30)
    target.submit(work(1, prompt=10, sequences=4), 0.0)
    if stage != "expected":
        target.opened(transfer(1), 0.0)
    assert target.cancel_sequences(leg(1), frozenset({0, 2}), "stop", 0.1) == []
    target.cancel(leg(0), LegOutcome.CANCELLED, "client", 0.1)
    target.opened(transfer(1), 0.2)
    target.received(transfer(1), tuple(first(sequence) for sequence in range(4)), 0.0, 0.0, 0.5)
    target.transfer_closed(transfer(1), 0.5)
    made = plan(target)
    assert ran(made) == [1, 3]
    assert len(made.copies) == 1
    assert target._pool.num_used == 2 + 2
    target.check_invariants()


def test_when_all_are_cancelled_before_adoption_the_leg_is() -> None:
    target = scheduler()
    target.submit(work(1, prompt=10, sequences=2), 0.0)
    target.opened(transfer(1), 0.0)
    assert target.cancel_sequences(leg(1), frozenset({1, 9}), "stop", 0.1) == []
    told = target.cancel_sequences(leg(1), frozenset({0}), "stop", 0.1)
    assert told == [ReportEnd(leg(1), LegOutcome.CANCELLED, "stop"), CancelTransfer(transfer(1), "stop")]
    assert kinds(target.transfer_closed(transfer(1), 0.2)) == [ReportRelease]
    assert target._pool.num_free == 32


def test_sequences_are_cancelled_one_by_one_also_in_a_step() -> None:
    target = scheduler()
    adopt(target, 1, prompt=10, max_tokens=8, sequences=3)
    made = plan(target)
    assert target.cancel_sequences(leg(1), frozenset({0}), "stop", 1.0) == []
    told = done(target, made, 7, 8, 9)
    assert [item.token.sequence for item in told if isinstance(item, ReportToken)] == [1, 2]
    assert target._pool.num_used == 2 + 2
    made = plan(target)
    told = target.cancel_sequences(leg(1), frozenset({1, 2}), "stop", 1.0)
    assert told == [ReportEnd(leg(1), LegOutcome.CANCELLED, "stop")]
    assert target._pool.num_free < 32, "the step still writes"
    assert kinds(done(target, made)) == [ReportRelease]
    assert target._pool.num_free == 32


def test_a_leg_of_which_one_finished_and_the_rest_was_cancelled_did_its_part() -> None:
    target = scheduler()
    adopt(target, 1, prompt=10, max_tokens=8, sequences=2)
    done(target, plan(target), EOS, 7)
    told = target.cancel_sequences(leg(1), frozenset({0, 1}), "stop", 1.0)
    assert told[0] == ReportEnd(leg(1), LegOutcome.FINISHED, "finished")
    assert target.cancel_sequences(leg(1), frozenset({1}), "late", 1.0) == []


def test_the_block_to_be_copied_outlives_the_sequence_that_owns_it() -> None:
    """Without a hold of its own, a sequence that starts late would copy from a block that is free, or another's."""
    target = scheduler(batch=1)
    adopt(target, 1, prompt=10, max_tokens=8, sequences=3)
    made = plan(target)
    assert ran(made) == [0]
    source = made.sequences[0].lease.block_ids[2]
    done(target, made, EOS)
    assert target._pool.num_holders(source) == 2
    made = plan(target)
    assert (ran(made), [copy.source for copy in made.copies]) == ([1], [source])
    target.cancel_sequences(leg(1), frozenset({2}), "stop", 1.0)
    assert target._pool.num_holders(source) == 1, "the step copies from it"
    done(target, made)
    assert target._pool.num_holders(source) == 0


def test_what_can_never_fit_counts_every_sequence() -> None:
    big = work(1, prompt=10, max_tokens=9, sequences=4)  # two full blocks, and three of its own per sequence
    end, _ = scheduler(blocks=13).submit(big, 0.0)
    assert isinstance(end, ReportEnd)
    assert (end.outcome, end.reason) == (LegOutcome.REFUSED, "never_fits")
    target = scheduler(blocks=14)
    adopt(target, 1, prompt=10, max_tokens=9, sequences=4)
    steps = [len(done(target, plan(target))) for _ in range(8)]
    assert steps == [4] * 7 + [4 + 2], "alone it gets to its end without a pause"
    assert target.num_evicted == 0


def test_growth_is_kept_free_for_every_sequence() -> None:
    target = scheduler(blocks=13, growth=2)
    adopt(target, 1, prompt=10, sequences=3)
    target.submit(work(2, prompt=10), 0.0)
    assert target.opened(transfer(2), 0.0) == [], "3 blocks, and 2 for each of 3 sequences: 8 are free"
    target.cancel_sequences(leg(1), frozenset({0}), "stop", 0.5)
    assert kinds(target.grant_waiting(0.5)) == [GrantTransfer]


def test_load_is_told_in_requests_not_in_sequences() -> None:
    target = scheduler(batch=2)
    target.submit(work(3, prompt=10, sequences=3), 0.0)
    for number in (1, 2):
        adopt(target, number, prompt=10, sequences=3)
    assert (target.num_waiting, target.num_running) == (3, 0)
    made = plan(target)
    assert (target.num_waiting, target.num_running) == (2, 1)
    target.cancel(leg(1), LegOutcome.CANCELLED, "client", 1.0)
    assert (target.num_waiting, target.num_running) == (2, 0)
    done(target, made)


def test_a_leg_is_evicted_as_a_whole() -> None:
    target = scheduler(blocks=12)
    adopt(target, 1, prompt=10, max_tokens=9, sequences=2)
    adopt(target, 2, prompt=10, max_tokens=9, sequences=2)
    told: list[Instruction] = []
    while not any(isinstance(item, ReportEnd) for item in told):
        made, told = target.plan(1.0)
        assert made is not None
        told += done(target, made)
    [end] = [item for item in told if isinstance(item, ReportEnd)]
    assert (end.leg, end.outcome) == (leg(2), LegOutcome.EVICTED)
    assert target.count(SequenceState.RUNNING) == 2
    assert target._legs[leg(1)].stage is LegStage.ADOPTED


def test_a_failed_step_ends_a_leg_of_which_one_sequence_was_cancelled_meanwhile() -> None:
    target = scheduler()
    adopt(target, 1, prompt=10, sequences=3)
    made = plan(target)
    target.cancel_sequences(leg(1), frozenset({1}), "stop", 1.0)
    told = target.step_failed(made, "boom", 1.1)
    assert kinds(told) == [ReportEnd, ReportRelease]
    target.check_invariants()
    assert target._pool.num_free == 32


def test_a_constrained_leg_waits_for_its_constraint_and_holds_nobody_up() -> None:
    target = scheduler(batch=2)
    constrained = replace(work(1, prompt=10, sequences=2), sampling=Sampling(grammar=Grammar(GrammarKind.REGEX, "a+")))
    for number, submitted in ((1, constrained), (2, work(2, prompt=10)), (3, constrained)):
        submitted = replace(submitted, leg=leg(number), transfer_id=transfer(number))
        target.submit(submitted, 0.0)
        target.opened(transfer(number), 0.0)
        tokens = tuple(first(sequence) for sequence in submitted.sequences)
        target.received(transfer(number), tokens, 0.0, 0.0, 0.5)
        target.transfer_closed(transfer(number), 0.5)
    made = plan(target)
    assert [sequence.work.leg for sequence in made.sequences] == [leg(2)]
    assert target.constraint_ready(leg(1)) == []
    done(target, made, EOS)
    assert [sequence.work.leg for sequence in plan(target).sequences] == [leg(1), leg(1)]
    told = target.constraint_failed(leg(3), "bad_grammar", "no such thing", 1.0)
    assert told[0] == ReportEnd(leg(3), LegOutcome.REFUSED, "bad_grammar", "no such thing")
