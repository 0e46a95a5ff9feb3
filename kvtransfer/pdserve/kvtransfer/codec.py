"""One codec: message to header frame and back. DATA is a header frame and a payload frame, all else one frame.

Strict both ways: what does not fit is refused on encoding, and every malformed input is a `FrameError` on decoding.
"""

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import TypeVar

from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import ID_BYTES, Incarnation, TransferId
from pdserve.core.layout import DTYPE_BYTES, KvLayout, LayerLayout
from pdserve.core.work import FinishReason, SampledToken
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
from pdserve.kvtransfer.wire import FrameError, FrameReader, FrameWriter

Buffer = bytes | memoryview
NONCE_BYTES = 16
PROOF_BYTES = 32
DIGEST_BYTES = 32
MAX_FRAME_BYTES = 1 << 20
"""Largest payload of a DATA frame."""
MAX_DETAIL = 1000
"""Characters of a reason or detail that travel; the rest is cut."""
MAX_BEAT_IDS = 1024
"""Most transfer ids in one BEAT."""

_ATTEMPT_AND_COUNT = struct.Struct("<II")
_HEADS = struct.Struct("<HH")
_BYTES_AND_DIGEST = struct.Struct("<IQ")
_TOKEN = struct.Struct("<HII")

N = TypeVar("N", bound=IntEnum)


class Kind(IntEnum):
    """First byte after the magic."""

    HELLO = 1
    CHALLENGE = 2
    WELCOME = 3
    REFUSE = 4
    OPEN = 5
    GRANT = 6
    DATA = 7
    COMMIT = 8
    ACK = 9
    NACK = 10
    ABORT = 11
    GONE = 12
    BEAT = 13


def encode(message: Message) -> bytes:
    """Return the header frame of `message`; raise FrameError if a field does not fit."""
    kind, write = _ENCODERS[type(message)]
    writer = FrameWriter(kind)
    write(writer, message)
    return writer.seal()


def decode(frames: Sequence[Buffer]) -> tuple[Message, memoryview]:
    """Return the message of `frames` and DATA's payload (else empty); raise FrameError for anything malformed.

    The payload's length is checked here, its checksum is not: only the transfer that it belongs to may suffer for it.
    """
    if not frames:
        raise FrameError("count: no frame at all")
    reader = FrameReader(frames[0])
    try:
        kind = Kind(reader.kind)
    except ValueError as error:
        raise FrameError(f"kind: {reader.kind} is unknown") from error
    expected = 2 if kind is Kind.DATA else 1
    if len(frames) != expected:
        raise FrameError(f"count: {kind.name} has {len(frames)} frames, must be {expected}")
    message = _DECODERS[kind](reader)
    reader.end()
    if not isinstance(message, Data):
        return message, memoryview(b"")
    payload = memoryview(frames[1])
    if len(payload) != message.num_bytes:
        raise FrameError(f"payload: {len(payload)} bytes, the header says {message.num_bytes}")
    return message, payload


def _transfer_id(reader: FrameReader) -> TransferId:
    return TransferId(reader.raw(ID_BYTES))


def _member(reader: FrameReader, kind: type[N]) -> N:
    value = reader.integer("B")
    try:
        return kind(value)
    except ValueError as error:
        raise FrameError(f"{kind.__name__}: {value} is unknown") from error


def _one_of(reader: FrameReader, lengths: tuple[int, ...], name: str) -> bytes:
    length = reader.integer("B")
    if length not in lengths:
        raise FrameError(f"{name}: {length} bytes, must be one of {lengths}")
    return reader.raw(length)


def _count(writer: FrameWriter, num: int) -> None:
    writer.number("H", num)


# --- HELLO -----------------------------------------------------------------------------------------------------------------


def _write_hello(w: FrameWriter, m: Hello) -> None:
    # Version and incarnations stay where they are in every version; what follows may change.
    w.number("H", m.protocol_version)
    w.raw(m.incarnation, ID_BYTES)
    w.raw(m.expected, ID_BYTES)
    w.raw(m.nonce, NONCE_BYTES)
    w.number("B", len(m.proof))
    w.raw(m.proof, len(m.proof))
    if m.offer is not None:
        _write_identity(w, m.offer.identity)
        _write_capabilities(w, m.offer.capabilities)
        _write_layout(w, m.offer.layout)


def _read_hello(r: FrameReader) -> Hello:
    version = r.integer("H")
    incarnation, expected = Incarnation(r.raw(ID_BYTES)), Incarnation(r.raw(ID_BYTES))
    nonce = r.raw(NONCE_BYTES)
    proof = _one_of(r, (0, PROOF_BYTES), "proof")
    if version != PROTOCOL_VERSION:
        r.skip_rest()
        return Hello(incarnation, expected, nonce, None, proof, version)
    offer = Offer(_read_identity(r), _read_capabilities(r), _read_layout(r))
    return Hello(incarnation, expected, nonce, offer, proof, version)


def _write_identity(w: FrameWriter, identity: Identity) -> None:
    for value in (identity.weight_digest, identity.architecture, identity.tokenizer_digest, identity.salt_scheme):
        w.text(value)
    _count(w, len(identity.kv_fields))
    for name, value in sorted(identity.kv_fields.items()):
        w.text(name)
        w.text(value)
    w.text(identity.digest())


def _read_identity(r: FrameReader) -> Identity:
    weight_digest, architecture, tokenizer_digest, salt_scheme = (r.text() for _ in range(4))
    kv_fields = dict(r.many(lambda: (r.text(), r.text())))
    identity = Identity(weight_digest, architecture, kv_fields, tokenizer_digest, salt_scheme)
    if r.text() != identity.digest():
        raise FrameError("identity: its digest is not that of its fields")
    return identity


def _write_capabilities(w: FrameWriter, capabilities: Capabilities) -> None:
    w.text(capabilities.compute_dtype)
    w.text(capabilities.kv_dtype)
    _count(w, len(capabilities.wire_dtypes))
    for dtype in capabilities.wire_dtypes:
        w.text(dtype)


def _read_capabilities(r: FrameReader) -> Capabilities:
    return Capabilities(r.text(), r.text(), r.many(r.text))


def _write_layout(w: FrameWriter, layout: KvLayout) -> None:
    w.text(layout.dtype)
    _count(w, layout.num_layers)
    for layer in layout.layers:
        for value in (layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.window or 0):
            w.number("I", value)


def _read_layout(r: FrameReader) -> KvLayout:
    dtype = r.text()
    if dtype not in DTYPE_BYTES:
        raise FrameError(f"layout: data type {dtype!r} is unknown")
    return KvLayout(r.many(partial(_read_layer, r)), dtype)


def _read_layer(r: FrameReader) -> LayerLayout:
    heads, key_dim, value_dim, window = (r.integer("I") for _ in range(4))
    return LayerLayout(heads, key_dim, value_dim, window or None)


# --- the rest of the handshake ---------------------------------------------------------------------------------------------


def _write_challenge(w: FrameWriter, m: Challenge) -> None:
    w.raw(m.challenge, NONCE_BYTES)


def _write_welcome(w: FrameWriter, m: Welcome) -> None:
    w.raw(m.incarnation, ID_BYTES)
    w.number("Q", m.window_limit)
    w.text(m.reserve_policy)
    w.number("B", len(m.proof))
    w.raw(m.proof, len(m.proof))
    _count(w, len(m.endpoints))
    for heads in m.endpoints:
        w.number("I", heads.start)
        w.number("I", heads.stop)
        w.text(heads.address)


def _read_welcome(r: FrameReader) -> Welcome:
    incarnation, window_limit = Incarnation(r.raw(ID_BYTES)), r.integer("Q")
    reserve_policy = r.text()
    proof = _one_of(r, (0, PROOF_BYTES), "proof")
    endpoints = r.many(lambda: HeadRange(r.integer("I"), r.integer("I"), r.text()))
    return Welcome(incarnation, endpoints, reserve_policy, window_limit, proof)


def _write_refuse(w: FrameWriter, m: Refuse) -> None:
    w.flag(m.can_retry)
    w.text(m.detail[:MAX_DETAIL])
    _count(w, len(m.fields))
    for name in m.fields:
        w.text(name)


def _read_refuse(r: FrameReader) -> Refuse:
    can_retry, detail = r.flag(), r.text()
    return Refuse(r.many(r.text), detail, can_retry)


# --- transfers -------------------------------------------------------------------------------------------------------------


def _write_open(w: FrameWriter, m: Open) -> None:
    w.raw(m.transfer_id, ID_BYTES)
    w.number("I", m.attempt)
    w.raw(m.prompt_digest, DIGEST_BYTES)
    w.number("I", m.num_tokens)
    w.number("H", m.rank)


def _read_open(r: FrameReader) -> Open:
    return Open(_transfer_id(r), r.integer("I"), r.raw(DIGEST_BYTES), r.integer("I"), r.integer("H"))


def _write_grant(w: FrameWriter, m: Grant) -> None:
    w.raw(m.transfer_id, ID_BYTES)
    w.number("I", m.skip_tokens)


def _write_data(w: FrameWriter, m: Data) -> None:
    w.raw(m.transfer_id, ID_BYTES)
    w.numbers(_ATTEMPT_AND_COUNT, m.attempt, m.sequence)
    w.span(m.layers)
    w.span(m.tokens)
    w.numbers(_HEADS, *m.heads)
    w.text(m.dtype)
    w.numbers(_BYTES_AND_DIGEST, m.num_bytes, m.checksum)


def _read_data(r: FrameReader) -> Data:
    transfer_id, (attempt, sequence) = _transfer_id(r), r.integers(_ATTEMPT_AND_COUNT)
    layers, tokens = r.span(), r.span()
    first_head, end_head = r.integers(_HEADS)
    dtype, (num_bytes, digest) = r.text(), r.integers(_BYTES_AND_DIGEST)
    if not 0 < num_bytes <= MAX_FRAME_BYTES:
        raise FrameError(f"payload: {num_bytes} bytes, must be 1 to {MAX_FRAME_BYTES}")
    return Data(transfer_id, attempt, sequence, layers, tokens, dtype, num_bytes, digest, (first_head, end_head))


def _write_commit(w: FrameWriter, m: Commit) -> None:
    w.raw(m.transfer_id, ID_BYTES)
    w.numbers(_ATTEMPT_AND_COUNT, m.attempt, m.num_frames)
    _count(w, len(m.tokens))
    for token in m.tokens:
        _write_token(w, token)
    _count(w, len(m.durations_s))
    for name, seconds in m.durations_s.items():
        w.text(name)
        w.number("d", seconds)


def _read_commit(r: FrameReader) -> Commit:
    transfer_id, (attempt, num_frames) = _transfer_id(r), r.integers(_ATTEMPT_AND_COUNT)
    tokens = r.many(partial(_read_token, r))
    return Commit(transfer_id, attempt, num_frames, tokens, dict(r.many(lambda: (r.text(), r.real()))))


def _write_token(w: FrameWriter, token: SampledToken) -> None:
    w.numbers(_TOKEN, token.sequence, token.index, token.token_id)
    w.number("d", token.logprob)
    w.number("B", token.finish_reason or 0)
    _count(w, len(token.top))
    for token_id, logprob in token.top:
        w.number("I", token_id)
        w.number("d", logprob)


def _read_token(r: FrameReader) -> SampledToken:
    (sequence, index, token_id), logprob = r.integers(_TOKEN), r.real()
    reason = r.integer("B")
    if reason and reason not in FinishReason.__members__.values():
        raise FrameError(f"finish reason: {reason} is unknown")
    top = r.many(lambda: (r.integer("I"), r.real()))
    return SampledToken(index, token_id, logprob, FinishReason(reason) if reason else None, sequence, top)


def _write_ack(w: FrameWriter, m: Ack) -> None:
    w.raw(m.transfer_id, ID_BYTES)


def _write_nack(w: FrameWriter, m: Nack) -> None:
    w.raw(m.transfer_id, ID_BYTES)
    w.number("B", m.reason)
    w.text(m.detail[:MAX_DETAIL])


def _write_abort(w: FrameWriter, m: Abort) -> None:
    w.raw(m.transfer_id, ID_BYTES)
    if m.finished and m.busy:
        raise FrameError("ABORT: both finished and busy")
    w.flag(m.finished)
    w.flag(m.busy)
    w.text(m.reason[:MAX_DETAIL])


def _read_abort(r: FrameReader) -> Abort:
    transfer_id, finished, busy = _transfer_id(r), r.flag(), r.flag()
    if finished and busy:
        raise FrameError("ABORT: both finished and busy")
    return Abort(transfer_id, finished, r.text(), busy)


def _write_gone(w: FrameWriter, m: Gone) -> None:
    w.raw(m.transfer_id, ID_BYTES)
    w.number("B", m.kind)


def _write_beat(w: FrameWriter, m: Beat) -> None:
    w.number("Q", m.window_limit)
    _count(w, len(m.transfer_ids))
    for transfer_id in m.transfer_ids:
        w.raw(transfer_id, ID_BYTES)


def _read_beat(r: FrameReader) -> Beat:
    return Beat(r.integer("Q"), r.many(partial(_transfer_id, r)))


# mypy cannot tie a class to a function of that class in one mapping, hence the loose callable.
_ENCODERS: dict[type[Message], tuple[Kind, Callable[..., None]]] = {
    Hello: (Kind.HELLO, _write_hello),
    Challenge: (Kind.CHALLENGE, _write_challenge),
    Welcome: (Kind.WELCOME, _write_welcome),
    Refuse: (Kind.REFUSE, _write_refuse),
    Open: (Kind.OPEN, _write_open),
    Grant: (Kind.GRANT, _write_grant),
    Data: (Kind.DATA, _write_data),
    Commit: (Kind.COMMIT, _write_commit),
    Ack: (Kind.ACK, _write_ack),
    Nack: (Kind.NACK, _write_nack),
    Abort: (Kind.ABORT, _write_abort),
    Gone: (Kind.GONE, _write_gone),
    Beat: (Kind.BEAT, _write_beat),
}

_DECODERS: dict[Kind, Callable[[FrameReader], Message]] = {
    Kind.HELLO: _read_hello,
    Kind.CHALLENGE: lambda r: Challenge(r.raw(NONCE_BYTES)),
    Kind.WELCOME: _read_welcome,
    Kind.REFUSE: _read_refuse,
    Kind.OPEN: _read_open,
    Kind.GRANT: lambda r: Grant(_transfer_id(r), r.integer("I")),
    Kind.DATA: _read_data,
    Kind.COMMIT: _read_commit,
    Kind.ACK: lambda r: Ack(_transfer_id(r)),
    Kind.NACK: lambda r: Nack(_transfer_id(r), _member(r, NackReason), r.text()),
    Kind.ABORT: _read_abort,
    Kind.GONE: lambda r: Gone(_transfer_id(r), _member(r, GoneKind)),
    Kind.BEAT: _read_beat,
}
