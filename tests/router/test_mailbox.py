"""The mailbox between a session and a client that may not read."""

import asyncio

import pytest

from pdserve.core.errors import SlowReader
from pdserve.core.work import FinishReason, SampledToken
from pdserve.router.instructions import Fail, Finish
from pdserve.router.mailbox import TOKEN_BYTES, Mailbox
from pdserve.router.output import Shown

pytestmark = pytest.mark.asyncio


def shown(text: str, *ids: int) -> Shown:
    return Shown(text, tuple(SampledToken(index, token_id, -0.5) for index, token_id in enumerate(ids)))


async def test_what_waits_is_merged_in_order() -> None:
    mailbox = Mailbox(1000)
    assert mailbox.put(shown("a", 1))
    assert mailbox.put(shown("bc", 2, 3))
    mailbox.finish(Finish(FinishReason.STOP))
    parcel = await mailbox.take()
    assert parcel.shown.text == "abc"
    assert [token.token_id for token in parcel.shown.tokens] == [1, 2, 3]
    assert parcel.finish == Finish(FinishReason.STOP)
    assert parcel.end is None
    assert mailbox.num_bytes == 0


async def test_the_bound_counts_bytes_and_what_passes_it_is_kept() -> None:
    mailbox = Mailbox(2 + TOKEN_BYTES)
    assert mailbox.put(shown("é", 1)), "two bytes, one token: exactly the bound"
    assert not mailbox.put(shown("x"))
    mailbox.close(Fail(SlowReader("slow")))
    parcel = await mailbox.take()
    assert parcel.shown.text == "éx"
    assert isinstance(parcel.end, Fail)


async def test_taking_waits_and_whole_waits_for_the_end() -> None:
    mailbox = Mailbox(None)
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    assert mailbox.put(shown("a", 1))
    assert (await taking).shown.text == "a"
    whole = asyncio.create_task(mailbox.take(whole=True))
    assert mailbox.put(shown("b" * 10_000, *range(100)))
    mailbox.finish(Finish(FinishReason.LENGTH))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not whole.done()
    mailbox.close(Fail(SlowReader("end")))
    parcel = await whole
    assert (len(parcel.shown.tokens), parcel.finish is not None) == (100, True)


async def test_what_nobody_will_read_is_dropped() -> None:
    mailbox = Mailbox(1000)
    mailbox.put(shown("a", 1))
    mailbox.discard()
    assert mailbox.num_bytes == 0
