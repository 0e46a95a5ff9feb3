"""Where protobuf meets our types on a node: submits in, events out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdserve.core.errors import InvalidRequest
from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import ID_BYTES, Incarnation, LegKey, SessionKey, TransferId
from pdserve.core.work import FinishReason, LegOutcome, SampledToken, Sampling, Work
from pdserve.v1 import inference_pb2, node_pb2


@dataclass(frozen=True, slots=True)
class Peer:
    """A node of the other role. `kv_address` is empty for prefill nodes."""

    incarnation: Incarnation
    kv_address: str


def work_from_pb(message: node_pb2.Submit, router: Incarnation, prompt_ids: tuple[int, ...], now_s: float) -> Work:
    """Return the typed leg of a complete submit. Raises InvalidRequest naming what cannot be used."""
    leg = leg_of(router, message)
    hands_over = bool(message.transfer_id)
    _require(message.attempt >= 1, "attempt", "must be >= 1")
    _require(len(message.prefill_incarnation) == ID_BYTES, "prefill_incarnation", f"must be {ID_BYTES} bytes")
    if hands_over:
        _require(len(message.transfer_id) == ID_BYTES, "transfer_id", f"must be {ID_BYTES} bytes or empty")
        _require(len(message.decode_incarnation) == ID_BYTES, "decode_incarnation", f"must be {ID_BYTES} bytes")
    _require(len(prompt_ids) > 0, "prompt_ids", "must not be empty")
    _require(len(prompt_ids) == message.num_prompt_ids, "prompt_ids", f"must be {message.num_prompt_ids} as announced")
    _require(message.max_tokens > len(message.output_ids), "max_tokens", "must exceed the number of output_ids")
    sampling = message.sampling
    _require(0 <= sampling.temperature <= 100, "sampling.temperature", "must be in [0, 100]")
    _require(0 < sampling.top_p <= 1, "sampling.top_p", "must be in (0, 1]")
    _require(0 <= sampling.min_p < 1, "sampling.min_p", "must be in [0, 1)")
    return Work(
        leg=leg,
        transfer_id=TransferId(message.transfer_id) if hands_over else None,
        prefill=Incarnation(message.prefill_incarnation),
        decode=Incarnation(message.decode_incarnation) if hands_over else None,
        label=message.request_label,
        prompt_ids=prompt_ids,
        output_ids=tuple(message.output_ids),
        sampling=Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed),
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        arrived_s=now_s - max(0.0, message.age_s),
        deadline_s=now_s + message.deadline_s if message.deadline_s > 0 else None,
    )


def leg_of(router: Incarnation, message: node_pb2.Submit | node_pb2.SubmitPart | node_pb2.Cancel) -> LegKey:
    """Return the leg that a router's message is about."""
    return LegKey(SessionKey(router, message.session_id), message.attempt)


def peers_from_pb(message: node_pb2.Peers) -> tuple[Peer, ...]:
    """Return the peers that a router names; those with a malformed incarnation are left out."""
    return tuple(
        Peer(Incarnation(node.incarnation), node.kv_endpoints[0].address if node.kv_endpoints else "")
        for node in message.nodes
        if len(node.incarnation) == ID_BYTES
    )


def identity_to_pb(identity: Identity) -> node_pb2.Identity:
    """Return the message of `identity`."""
    return node_pb2.Identity(
        weight_digest=identity.weight_digest,
        architecture=identity.architecture,
        kv_fields=dict(identity.kv_fields),
        tokenizer_digest=identity.tokenizer_digest,
        salt_scheme=identity.salt_scheme,
    )


def capabilities_to_pb(capabilities: Capabilities) -> node_pb2.Capabilities:
    """Return the message of `capabilities`."""
    return node_pb2.Capabilities(
        compute_dtype=capabilities.compute_dtype,
        kv_dtype=capabilities.kv_dtype,
        wire_dtypes=list(capabilities.wire_dtypes),
    )


def first_tokens_to_pb(tokens: Iterable[SampledToken]) -> list[node_pb2.FirstToken]:
    """Return one message per first token; the sequence index is its place."""
    return [
        node_pb2.FirstToken(
            sequence=sequence,
            index=token.index,
            token_id=token.token_id,
            logprob=token.logprob,
            finish_reason=finish_to_pb(token.finish_reason),
        )
        for sequence, token in enumerate(tokens)
    ]


def finish_to_pb(reason: FinishReason | None) -> inference_pb2.FinishReason.ValueType:
    """Return the contract's value; UNSPECIFIED for a sequence that goes on."""
    return inference_pb2.FinishReason.ValueType(0 if reason is None else reason)


def granted_event(leg: LegKey, skip_tokens: int) -> node_pb2.LegEvent:
    """Return the event "blocks are promised"."""
    return _event(leg, granted=node_pb2.LegGranted(skip_tokens=skip_tokens))


def first_token_event(
    leg: LegKey, tokens: Iterable[SampledToken], num_cached: int, durations_s: Mapping[str, float]
) -> node_pb2.LegEvent:
    """Return the event "the first token is sampled"."""
    body = node_pb2.LegFirstToken(
        tokens=first_tokens_to_pb(tokens), num_cached_tokens=num_cached, durations_s=dict(durations_s)
    )
    return _event(leg, first_token=body)


def adopted_event(leg: LegKey, tokens: Iterable[SampledToken], durations_s: Mapping[str, float]) -> node_pb2.LegEvent:
    """Return the event "all KV is verified and placed"."""
    return _event(leg, adopted=node_pb2.LegAdopted(tokens=first_tokens_to_pb(tokens), durations_s=dict(durations_s)))


def ended_event(leg: LegKey, outcome: LegOutcome, reason: str, detail: str) -> node_pb2.LegEvent:
    """Return the event "the leg came to its end"."""
    value = node_pb2.LegOutcome.ValueType(outcome)
    return _event(leg, ended=node_pb2.LegEnded(outcome=value, reason=reason, detail=detail))


def released_event(leg: LegKey, durations_s: Mapping[str, float], kv_bytes: int, kv_frames: int) -> node_pb2.LegEvent:
    """Return the event "nothing of the leg is left"."""
    body = node_pb2.LegReleased(durations_s=dict(durations_s), kv_bytes=kv_bytes, kv_frames=kv_frames)
    return _event(leg, released=body)


def _event(
    leg: LegKey,
    *,
    granted: node_pb2.LegGranted | None = None,
    first_token: node_pb2.LegFirstToken | None = None,
    adopted: node_pb2.LegAdopted | None = None,
    ended: node_pb2.LegEnded | None = None,
    released: node_pb2.LegReleased | None = None,
) -> node_pb2.LegEvent:
    return node_pb2.LegEvent(
        session_id=leg.session.session_id,
        attempt=leg.attempt,
        granted=granted,
        first_token=first_token,
        adopted=adopted,
        ended=ended,
        released=released,
    )


def _require(holds: bool, field: str, fault: str) -> None:
    if not holds:
        raise InvalidRequest(f"submit.{field} {fault}", field=f"submit.{field}")
