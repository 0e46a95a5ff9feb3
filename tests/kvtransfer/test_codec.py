"""Frames: what is written is read back, and no damaged or made-up frame is taken for a message."""

import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.work import FinishReason, SampledToken
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES, Kind, decode, encode
from pdserve.kvtransfer.messages import (
    PROTOCOL_VERSION,
    Abort,
    Ack,
    Beat,
    Challenge,
    Commit,
    Data,
    Gone,
    GoneKind,
    Grant,
    HeadRange,
    Hello,
    Message,
    Nack,
    NackReason,
    Offer,
    Open,
    Refuse,
    Welcome,
)
from pdserve.kvtransfer.wire import MAX_HEADER_BYTES, FrameError, checksum
from tests.kvtransfer.nodes import CAPABILITIES, IDENTITY, LAYOUT

ID = TransferId(bytes(range(16)))
PAYLOAD = bytes(range(96))
INCARNATION, OTHER = Incarnation(b"a" * 16), Incarnation(b"b" * 16)

SAMPLES: dict[Kind, Message] = {
    Kind.HELLO: Hello(INCARNATION, OTHER, b"n" * 16, Offer(IDENTITY, CAPABILITIES, LAYOUT), b"p" * 32),
    Kind.CHALLENGE: Challenge(b"c" * 16),
    Kind.WELCOME: Welcome(OTHER, (HeadRange(0, 4, "tcp://h:1"), HeadRange(4, 8)), "on_open", 1 << 40, b"p" * 32),
    Kind.REFUSE: Refuse(("weight_digest", "kv.head_dim"), "differs", can_retry=True),
    Kind.OPEN: Open(ID, 3, b"d" * 32, 3000, 1),
    Kind.GRANT: Grant(ID, 16),
    Kind.DATA: Data(ID, 3, 7, range(2, 5), range(16, 32), "float32", len(PAYLOAD), checksum(PAYLOAD), (0, 0)),
    Kind.COMMIT: Commit(
        ID,
        3,
        8,
        (
            SampledToken(0, 7, -0.5, None, 2, ((7, -0.5), (9, -1.0))),
            SampledToken(0, 9, -1e-3, FinishReason.LENGTH, 63),
        ),
        {"prefill.queue": 0.25},
    ),
    Kind.ACK: Ack(ID),
    Kind.NACK: Nack(ID, NackReason.CHECKSUM, "frame 7"),
    Kind.ABORT: Abort(ID, finished=True, reason="stop"),
    Kind.GONE: Gone(ID, GoneKind.OVER),
    Kind.BEAT: Beat(1 << 33, (ID, TransferId(bytes(16)))),
}


def frames_of(message: Message) -> list[bytes]:
    return [encode(message), PAYLOAD] if isinstance(message, Data) else [encode(message)]


def reseal(header: bytes) -> bytes:
    body = header[:-8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_there_is_a_sample_of_every_kind() -> None:
    assert set(SAMPLES) == set(Kind)


@pytest.mark.parametrize("kind", Kind)
def test_round_trip(kind: Kind) -> None:
    message, payload = decode(frames_of(SAMPLES[kind]))
    assert message == SAMPLES[kind]
    assert bytes(payload) == (PAYLOAD if kind is Kind.DATA else b"")


def test_the_bytes_of_what_every_transfer_sends_stay_as_they_are() -> None:
    """Another version of this code at the other end reads them: whoever changes them raises PROTOCOL_VERSION."""
    assert PROTOCOL_VERSION == 2
    head = "50444b56"
    data = "07 000102030405060708090a0b0c0d0e0f 03000000 07000000 0200000005000000 1000000020000000 0000 0000"
    data += "0700 666c6f61743332 60000000 fb6d04ea123e8a27 4bc0cac1b403ceff"
    assert encode(SAMPLES[Kind.DATA]).hex() == head + data.replace(" ", "")
    commit = "08 000102030405060708090a0b0c0d0e0f 03000000 08000000 0200"
    commit += "0200 00000000 07000000 000000000000e0bf 00 0200 07000000 000000000000e0bf 09000000 000000000000f0bf"
    commit += "3f00 00000000 09000000 fca9f1d24d6250bf 03 0000"
    commit += "0100 0d00 70726566696c6c2e7175657565 000000000000d03f b6d3f68e90ee9c7f"
    assert encode(SAMPLES[Kind.COMMIT]).hex() == head + commit.replace(" ", "")


@pytest.mark.parametrize("kind", Kind)
def test_every_flipped_bit_of_a_header_is_refused(kind: Kind) -> None:
    header, *rest = frames_of(SAMPLES[kind])
    for bit in range(8 * len(header)):
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            decode([bytes(damaged), *rest])


def test_every_flipped_bit_of_a_payload_changes_its_checksum() -> None:
    for bit in range(8 * len(PAYLOAD)):
        damaged = bytearray(PAYLOAD)
        damaged[bit // 8] ^= 1 << bit % 8
        message, payload = decode([encode(SAMPLES[Kind.DATA]), bytes(damaged)])
        assert isinstance(message, Data)
        assert checksum(payload) != message.checksum


@pytest.mark.parametrize("kind", Kind)
def test_every_truncation_and_every_extra_byte_is_refused(kind: Kind) -> None:
    header, *rest = frames_of(SAMPLES[kind])
    for length in range(len(header)):
        with pytest.raises(FrameError):
            decode([header[:length], *rest])
    with pytest.raises(FrameError, match="trailing"):
        decode([reseal(header[:-8] + b"\0" + header[-8:]), *rest])


@pytest.mark.parametrize("kind", Kind)
def test_every_shorter_body_with_a_good_seal_is_refused(kind: Kind) -> None:
    header, *rest = frames_of(SAMPLES[kind])
    for length in range(5, len(header) - 8):
        with pytest.raises(FrameError):
            decode([reseal(header[:length] + bytes(8)), *rest])


def test_the_number_of_frames_must_fit_the_kind() -> None:
    for message in SAMPLES.values():
        frames = frames_of(message)
        with pytest.raises(FrameError, match="count"):
            decode([*frames, b"more"])
    with pytest.raises(FrameError, match="count"):
        decode([encode(SAMPLES[Kind.DATA])])
    with pytest.raises(FrameError, match="count"):
        decode([])


def test_named_faults() -> None:
    good = encode(SAMPLES[Kind.ACK])
    with pytest.raises(FrameError, match="magic"):
        decode([b"HTTP" + good[4:]])
    with pytest.raises(FrameError, match="kind: 99"):
        decode([reseal(good[:4] + b"\x63" + good[5:])])
    with pytest.raises(FrameError, match="length"):
        decode([b"PDKV" + bytes(MAX_HEADER_BYTES)])
    with pytest.raises(FrameError, match="payload: 95 bytes, the header says 96"):
        decode([encode(SAMPLES[Kind.DATA]), PAYLOAD[:-1]])
    nack = bytearray(encode(Nack(ID, NackReason.GAP)))
    nack[5 + 16] = 200
    with pytest.raises(FrameError, match="NackReason: 200"):
        decode([reseal(bytes(nack))])


def test_an_abort_is_not_both_finished_and_busy() -> None:
    for abort in (Abort(ID, finished=True), Abort(ID, busy=True, reason="evicted")):
        assert decode([encode(abort)])[0] == abort
    with pytest.raises(FrameError, match="both finished and busy"):
        encode(Abort(ID, finished=True, busy=True))
    frame = bytearray(encode(Abort(ID, finished=True)))
    frame[5 + 16 + 1] = 1
    with pytest.raises(FrameError, match="both finished and busy"):
        decode([reseal(bytes(frame))])


def test_a_payload_longer_than_a_frame_is_refused_by_its_header() -> None:
    huge = Data(ID, 1, 0, range(1), range(1), "float32", MAX_FRAME_BYTES + 1, 0)
    with pytest.raises(FrameError, match="payload"):
        decode([encode(huge), bytes(MAX_FRAME_BYTES + 1)])


def test_an_empty_range_is_refused() -> None:
    empty = Data(ID, 1, 0, range(2, 2), range(1), "float32", 4, 0)
    with pytest.raises(FrameError, match="range"):
        decode([encode(empty), bytes(4)])


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(FrameError, match="finite"):
        decode([encode(Commit(ID, 1, 0, (SampledToken(0, 1, float("nan")),)))])


def test_another_version_is_still_recognised() -> None:
    message, _ = decode(
        [encode(Hello(INCARNATION, OTHER, b"n" * 16, None, b"", protocol_version=PROTOCOL_VERSION + 1))]
    )
    assert message == Hello(INCARNATION, OTHER, b"n" * 16, None, b"", protocol_version=PROTOCOL_VERSION + 1)


def test_what_does_not_fit_is_refused_on_encoding() -> None:
    for message in (
        Open(ID, -1, b"d" * 32, 1),
        Open(ID, 1, b"short", 1),
        Grant(ID, 1 << 32),
        Ack(TransferId(b"short")),
    ):
        with pytest.raises(FrameError):
            encode(message)
    with pytest.raises(FrameError, match="too long"):
        encode(Refuse(tuple("x" * 1000 for _ in range(100))))


def test_long_details_are_cut_not_refused() -> None:
    message, _ = decode([encode(Nack(ID, NackReason.PLACE, "é" * 5000))])
    assert isinstance(message, Nack)
    assert message.detail == "é" * 1000


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_made_up_bytes_are_frame_errors(frames: list[bytes]) -> None:
    with pytest.raises(FrameError):
        decode(frames)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(list(Kind)), st.data())
def test_a_made_up_body_with_a_good_seal_raises_nothing_but_frame_errors(kind: Kind, data: st.DataObject) -> None:
    header, *rest = frames_of(SAMPLES[kind])
    body = bytearray(header[:-8])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(4, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        message, _ = decode([reseal(bytes(body) + bytes(8)), *rest])
    except FrameError:
        return
    assert type(message) in {type(sample) for sample in SAMPLES.values()}


def test_a_commit_of_64_sequences_with_20_alternatives_each_fits_a_frame() -> None:
    top = tuple((rank, -1.5) for rank in range(20))
    tokens = tuple(SampledToken(0, 2**32 - 1, -0.5, None, sequence, top) for sequence in range(64))
    message, _ = decode([encode(Commit(ID, 1, 8, tokens, {"prefill.queue": 0.25}))])
    assert isinstance(message, Commit)
    assert message.tokens == tokens
