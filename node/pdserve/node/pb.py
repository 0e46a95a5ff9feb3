"""Where protobuf meets our types on a node: events out, and what is said of peers. Submits: `pb_work`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import ID_BYTES, Incarnation, LegKey, SessionKey
from pdserve.core.work import FinishReason, LegOutcome, SampledToken, TokenScore, TopLogprobs
from pdserve.v1 import inference_pb2, node_pb2


@dataclass(frozen=True, slots=True)
class Peer:
    """A node of the other role. `kv_address` and `kv_admission_key` are empty for prefill nodes."""

    incarnation: Incarnation
    kv_address: str
    kv_admission_key: bytes = b""


def leg_of(router: Incarnation, message: node_pb2.Submit | node_pb2.SubmitPart | node_pb2.Cancel) -> LegKey:
    """Return the leg that a router's message is about."""
    return LegKey(SessionKey(router, message.session_id), message.attempt)


def peers_from_pb(message: node_pb2.Peers) -> tuple[Peer, ...]:
    """Return the peers that a router names; those with a malformed incarnation are left out."""
    return tuple(
        Peer(
            Incarnation(node.incarnation),
            node.kv_endpoints[0].address if node.kv_endpoints else "",
            node.kv_admission_key,
        )
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
    """Return one message per first token."""
    return [
        node_pb2.FirstToken(
            sequence=token.sequence,
            index=token.index,
            token_id=token.token_id,
            logprob=token.logprob,
            finish_reason=finish_to_pb(token.finish_reason),
            top_logprobs=top_to_pb(token.top) if token.top else None,
        )
        for token in tokens
    ]


def top_to_pb(top: TopLogprobs) -> inference_pb2.TopLogprobs:
    """Return the most likely tokens of one position."""
    return inference_pb2.TopLogprobs(
        token_ids=[token_id for token_id, _ in top], logprobs=[logprob for _, logprob in top]
    )


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


def prompt_scores_event(leg: LegKey, start: int, scores: Sequence[TokenScore]) -> node_pb2.LegEvent:
    """Return the event "scores of consecutive prompt tokens", the first of them at position `start`."""
    body = node_pb2.LegPromptLogprobs(
        start=start,
        logprobs=[score.logprob for score in scores],
        top_logprobs=[top_to_pb(score.top) for score in scores if score.top],
    )
    return _event(leg, prompt_logprobs=body)


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
    prompt_logprobs: node_pb2.LegPromptLogprobs | None = None,
) -> node_pb2.LegEvent:
    return node_pb2.LegEvent(
        session_id=leg.session.session_id,
        attempt=leg.attempt,
        granted=granted,
        first_token=first_token,
        adopted=adopted,
        ended=ended,
        released=released,
        prompt_logprobs=prompt_logprobs,
    )
