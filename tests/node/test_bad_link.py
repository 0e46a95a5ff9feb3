"""A transfer that fails at any frame: both nodes give everything back, and the resumed leg has the same tokens (class 13)."""

from dataclasses import replace

import pytest

from pdserve.core.work import Sampling
from tests.engine.small import prompt_of
from tests.node.pair import Pair, pair
from tests.node.works import leg, transfer, work

pytestmark = pytest.mark.asyncio

SAMPLING = Sampling(temperature=1.0, seed=5, repetition_penalty=1.3)
NUM_TOKENS = 8
FIRST_FRAME, LAST_FRAME = 2, 8
"""Frames that the prefill node sends after its HELLO: OPEN, DATA of two chunks, COMMIT, and beats."""


async def run(nodes: Pair, session: int, output: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Run one leg to its end, and return all tokens that it and those before it made."""

    def as_the_router_does() -> None:
        """The failure of one leg ends the attempt on both nodes."""
        if "FAILED" in (nodes.prefill.of(session).outcome, nodes.decode.of(session).outcome):
            nodes.cancel(leg(session))

    nodes.on_progress = as_the_router_does
    made = replace(work(session, max_tokens=NUM_TOKENS, sampling=SAMPLING), prompt_ids=prompt_of(13), output_ids=output)
    tokens = (await nodes.outputs(replace(made, leg=leg(session), transfer_id=transfer(session))))[session]
    return output + tuple(tokens.get(0, ()))


async def test_a_break_at_every_frame_costs_nothing() -> None:
    """The transfer is opened again: one attempt, the same tokens, everything given back."""
    async with pair() as nodes:
        expected = await run(nodes, 1)
    num_reopened = 0.0
    for frame in range(FIRST_FRAME, LAST_FRAME + 1):
        async with pair(faults=f"disconnect@{frame}") as nodes:
            assert await run(nodes, 1) == expected
            assert [node.of(1).outcome for node in (nodes.prefill, nodes.decode)] == ["FINISHED", "FINISHED"]
            assert nodes.prefill.desk.gauges()["kv_failed_total"] == 0
            num_reopened += nodes.prefill.desk.gauges()["kv_reopened_total"]
    assert num_reopened >= 2, "the breaks met no transfer"


@pytest.mark.parametrize("kind", ["corrupt", "truncate", "duplicate"])
async def test_every_frame_of_a_transfer(kind: str) -> None:
    async with pair() as nodes:
        expected = await run(nodes, 1)
        assert len(expected) == NUM_TOKENS
    num_failed = 0
    for frame in range(FIRST_FRAME, LAST_FRAME + 1):
        async with pair(faults=f"{kind}@{frame}") as nodes:
            tokens = await run(nodes, 1)
            if len(tokens) < NUM_TOKENS:
                num_failed += 1
                failed = [node.of(1) for node in (nodes.prefill, nodes.decode) if node.of(1).outcome == "FAILED"]
                assert all(told.reason for told in failed), "a failure has a name"
                assert failed
                assert tokens == expected[: len(tokens)], "what was told before the failure stays"
                for attempt in range(2, 5):  # a link that is just being lost may fail the next attempt too
                    if len(tokens) < NUM_TOKENS:
                        tokens = await run(nodes, attempt, tokens)
            assert tokens == expected
    assert num_failed >= 2, "the faults met no transfer"
