"""The mailbox between a session and a client that may not read."""

import asyncio

import pytest

from pdserve.core.errors import SlowReader
from pdserve.core.work import FinishReason, SampledToken, TokenScore
from pdserve.router.instructions import Fail, Finish
from pdserve.router.mailbox import PARCEL_BYTES, Mailbox, Parcel
from pdserve.router.output import Gain, PromptToken, Shown
from pdserve.router.packed import TOKEN_BYTES, TOP_BYTES, PackedPrompt, packed_score

pytestmark = pytest.mark.asyncio


def gain(text: str, *ids: int, sequence: int = 0) -> Gain:
    tokens = tuple(SampledToken(index, token_id, -0.5, sequence=sequence) for index, token_id in enumerate(ids))
    return Gain(sequence, Shown(text, tokens))


async def test_what_waits_is_merged_in_order() -> None:
    mailbox = Mailbox(1000)
    assert mailbox.put(gain("a", 1))
    assert mailbox.put(gain("bc", 2, 3))
    mailbox.finish(Finish(0, FinishReason.STOP))
    parcel = await mailbox.take()
    assert [token.token_id for token in parcel.gains[0].shown.tokens] == [1, 2, 3]
    assert parcel.gains[0].shown.text == "abc"
    assert parcel.finished == (Finish(0, FinishReason.STOP),)
    assert parcel.end is None
    assert mailbox.num_bytes == 0


async def test_sequences_are_merged_each_for_itself_and_everything_is_given_once() -> None:
    mailbox = Mailbox(1000)
    mailbox.put_prompt(PackedPrompt((7, 8), (None, packed_score(TokenScore(-1.5, ((8, -1.5),))))))
    mailbox.put(gain("x", 1, sequence=1))
    mailbox.put(gain("a", 2))
    mailbox.put(gain("y", 3, sequence=1))
    mailbox.finish(Finish(1, FinishReason.LENGTH))
    mailbox.finish(Finish(0, FinishReason.STOP))
    parcel = await mailbox.take()
    assert tuple(parcel.prompt) == (PromptToken(7, None), PromptToken(8, -1.5, ((8, -1.5),)))
    assert [(gain.sequence, gain.shown.text) for gain in parcel.gains] == [(0, "a"), (1, "xy")]
    assert [finish.sequence for finish in parcel.finished] == [1, 0]
    mailbox.put(gain("b", 4))
    later = await mailbox.take()
    assert (later.finished, later.gains) == ((), (gain("b", 4),))
    assert not later.prompt


async def test_alternatives_count_towards_the_bound() -> None:
    mailbox = Mailbox(TOKEN_BYTES + TOP_BYTES)
    token = SampledToken(0, 1, -0.5, top=((1, -0.5), (2, -0.9)))
    assert not mailbox.put(Gain(0, Shown("", (token,))))


async def test_the_bound_counts_bytes_and_what_passes_it_is_kept() -> None:
    mailbox = Mailbox(2 + TOKEN_BYTES)
    assert mailbox.put(gain("é", 1)), "two bytes, one token: exactly the bound"
    assert not mailbox.put(gain("x"))
    mailbox.close(Fail(SlowReader("slow")))
    parcel = await mailbox.take()
    assert parcel.gains[0].shown.text == "éx"
    assert isinstance(parcel.end, Fail)


async def test_taking_waits_and_whole_waits_for_the_end() -> None:
    mailbox = Mailbox(None)
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    assert mailbox.put(gain("a", 1))
    assert (await taking).gains[0].shown.text == "a"
    whole = asyncio.create_task(mailbox.take(whole=True))
    assert mailbox.put(gain("b" * 10_000, *range(100)))
    mailbox.finish(Finish(0, FinishReason.LENGTH))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not whole.done()
    mailbox.close(Fail(SlowReader("end")))
    parcel = await whole
    assert (len(parcel.gains[0].shown.tokens), len(parcel.finished)) == (100, 1)


async def test_what_nobody_will_read_is_dropped() -> None:
    mailbox = Mailbox(1000)
    mailbox.put(gain("a", 1))
    mailbox.discard()
    assert mailbox.num_bytes == 0


async def test_a_stream_is_given_in_parcels_and_its_ends_with_the_last() -> None:
    """One write of all that waited held it a second time, as text ten times as large."""
    mailbox = Mailbox(1 << 20)
    text = "x" * 1000
    for turn in range(100):
        for sequence in (0, 1):
            assert mailbox.put(gain(text, turn, sequence=sequence))
    for sequence in (1, 0):
        mailbox.finish(Finish(sequence, FinishReason.LENGTH))
    mailbox.close(Fail(SlowReader("end")))
    waiting = mailbox.num_bytes
    parcels: list[Parcel] = []
    while not parcels or parcels[-1].end is None:
        parcels.append(await mailbox.take())
        taken = waiting - mailbox.num_bytes
        assert taken <= PARCEL_BYTES + 1000 + TOKEN_BYTES
        waiting = mailbox.num_bytes
    assert (waiting, len(parcels) > 4) == (0, True)
    assert [[gain.sequence for gain in parcel.gains] for parcel in parcels[:4]] == [[0], [1], [0], [1]]
    for sequence in (0, 1):
        shown = [gain.shown for parcel in parcels for gain in parcel.gains if gain.sequence == sequence]
        assert sum(len(part.text) for part in shown) == 100_000
        assert [token.token_id for part in shown for token in part.tokens] == list(range(100))
    assert [parcel.finished for parcel in parcels[:-1]] == [()] * (len(parcels) - 1)
    assert [finish.sequence for finish in parcels[-1].finished] == [1, 0]
