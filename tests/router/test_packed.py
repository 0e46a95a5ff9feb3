"""Tokens in flat memory: they come out as they went in, and take what is counted."""

import gc
import math
import tracemalloc
from collections.abc import Callable

import pytest

from pdserve.core.work import SampledToken, TokenScore
from pdserve.router.chat.gains import ToolCallGain
from pdserve.router.instructions import Finish
from pdserve.router.mailbox import Mailbox
from pdserve.router.output import Gain, PromptToken, Shown
from pdserve.router.packed import (
    SCORE_BYTES,
    TOKEN_BYTES,
    TOP_BYTES,
    PackedPrompt,
    PackedTokens,
    num_entries,
    packed_bytes,
    packed_score,
)
from pdserve.router.prompt_scores import PromptScores

TOP = ((2**32 - 1, -0.25), (0, -math.inf))
TOKENS = (
    SampledToken(5, 7, -0.5, sequence=3, top=TOP),
    SampledToken(6, 2**31, -1.5, sequence=3),
    SampledToken(7, 0, 0.0, sequence=3, top=TOP[:1]),
)
MOST = 1.15
"""What arrays and dictionaries keep in advance, and what allocators round up."""


def test_tokens_come_out_as_they_went_in() -> None:
    packed = PackedTokens(3)
    packed.add(TOKENS[:1])
    assert packed_bytes(packed) == packed_bytes(TOKENS[:1]) == TOKEN_BYTES + 2 * TOP_BYTES
    packed.add(TOKENS[1:])
    assert packed_bytes(packed) == 3 * TOKEN_BYTES + 3 * TOP_BYTES
    assert tuple(packed) == TOKENS
    assert (packed[0], packed[-1], len(packed)) == (TOKENS[0], TOKENS[-1], 3)
    assert tuple(packed[1:]) == TOKENS[1:]
    assert packed == TOKENS
    assert packed != TOKENS[:2]
    assert num_entries(packed) == num_entries(TOKENS) == 6
    with pytest.raises(IndexError):
        packed[3]


def test_a_missing_log_probability_stays_missing() -> None:
    assert math.isnan(PackedTokens(0, [SampledToken(0, 1, math.nan)])[0].logprob)


def test_scores_come_out_as_they_went_in() -> None:
    scores = (TokenScore(-0.5, TOP), TokenScore(-1.5))
    packed = PackedPrompt((1, 2, 3), [None, *map(packed_score, scores)])
    expected = (PromptToken(1, None), PromptToken(2, -0.5, TOP), PromptToken(3, -1.5))
    assert tuple(packed) == expected
    assert (packed[1], len(packed), bool(PackedPrompt())) == (expected[1], 3, False)
    assert tuple(packed[1:]) == expected[1:]
    assert num_entries(packed) == num_entries(expected) == 5
    assert packed.num_bytes == 3 * SCORE_BYTES + 2 * TOP_BYTES


def memory_of(make: Callable[[], object]) -> tuple[object, int]:
    """Return what `make` makes, and how much memory it takes."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = make()
        gc.collect()  # freed tuples and numbers wait in free lists
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return made, after - before


@pytest.mark.parametrize("num_sequences", [1, 16])
@pytest.mark.parametrize("text", ["", "hé "])
@pytest.mark.parametrize("num_top", [0, 20])
def test_a_mailbox_takes_what_it_counts(num_top: int, text: str, num_sequences: int) -> None:
    """It counted 8 bytes for a token of 176, and a client that read nothing cost fourteen times the setting."""

    def filled() -> Mailbox:
        mailbox, index = Mailbox(1 << 18), 0
        while all(mailbox.put(gain_of(sequence, index, text, num_top)) for sequence in range(num_sequences)):
            index += 1
        return mailbox

    mailbox, taken = memory_of(filled)
    assert isinstance(mailbox, Mailbox)
    assert mailbox.num_bytes > 1 << 18
    assert taken <= MOST * mailbox.num_bytes + 2048 * num_sequences


def gain_of(sequence: int, index: int, text: str, num_top: int) -> Gain:
    top = tuple((100_000 + index + rank, -1.0 - rank - index / 7) for rank in range(num_top))
    return Gain(
        sequence, Shown(text, (SampledToken(index, 100_000 + index, -0.1 * index, sequence=sequence, top=top),))
    )


def test_pieces_of_tool_calls_take_what_is_counted() -> None:
    def filled() -> Mailbox:
        mailbox, number = Mailbox(1 << 18), 0
        while mailbox.put(Gain(0, Shown("", (), tool_calls=(ToolCallGain(0, arguments=f"{number:012}"),)))):
            number += 1
        mailbox.finish(Finish(0, 3))  # type: ignore[arg-type]  # any reason does
        return mailbox

    mailbox, taken = memory_of(filled)
    assert isinstance(mailbox, Mailbox)
    assert taken <= MOST * mailbox.num_bytes


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_scores_of_a_prompt_take_what_is_counted(num_top: int) -> None:
    ids = tuple(range(100_000, 104_000))

    def filled() -> PackedPrompt:
        scores = PromptScores(ids)
        for start in range(1, len(ids)):
            top = tuple((start + rank + 1000, -1.0 - rank - start / 7) for rank in range(num_top))
            assert scores.take(start, (TokenScore(-0.1 * start, top),))
        return scores.give()

    prompt, taken = memory_of(filled)
    assert isinstance(prompt, PackedPrompt)
    assert prompt.num_bytes / MOST <= taken <= MOST * prompt.num_bytes
