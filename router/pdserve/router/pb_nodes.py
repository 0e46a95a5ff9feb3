"""Where the internal contract's protobuf meets our types: attach messages in both directions."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import Incarnation
from pdserve.core.work import (
    FinishReason,
    GrammarKind,
    LegOutcome,
    SampledToken,
    Sampling,
    TokenScore,
    TopLogprobs,
)
from pdserve.router.events import Adopted, FirstToken, Granted, LegEnded, LegEvent, LegReleased, PromptScored, Tokens
from pdserve.router.instructions import Submit
from pdserve.router.nodes import Hello, KvEndpoint, Status
from pdserve.rpc.process import process_from_pb
from pdserve.v1 import inference_pb2, node_pb2

MAX_IDS_PER_MESSAGE = 128_000
"""Prompt ids per message: with at most 5 bytes each the message stays well under 1 MiB."""
MAX_ID_BYTES = 5
MAX_SUBMIT_BYTES = (1 << 20) - 4096
"""A submit also holds output ids, lists of ids and a grammar: prompt ids fill what they leave of 1 MiB, and the rest follows."""

_GRAMMAR_KINDS = {
    GrammarKind.JSON_SCHEMA: node_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: node_pb2.GRAMMAR_KIND_REGEX,
    GrammarKind.LARK: node_pb2.GRAMMAR_KIND_LARK,
}


@dataclass(frozen=True, slots=True)
class SubmitFacts:
    """What every attempt of a session submits alike. Times are in seconds before and after now."""

    session_id: int
    label: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    deadline_s: float
    age_s: float
    min_tokens: int = 0
    top_logprobs: int = 0


def hello_message(router: Incarnation, stream_number: int, lease_s: float, nonce: bytes) -> node_pb2.AttachRequest:
    """Return the first message of a stream; `nonce` is empty without a cluster secret."""
    return node_pb2.AttachRequest(
        hello=node_pb2.RouterHello(incarnation=router, stream_number=stream_number, lease_s=lease_s, nonce=nonce)
    )


def proof_message(proof: bytes) -> node_pb2.AttachRequest:
    """Return the router's proof of the cluster secret."""
    return node_pb2.AttachRequest(proof=node_pb2.RouterProof(proof=proof))


def beat_message() -> node_pb2.AttachRequest:
    """Return a sign of life."""
    return node_pb2.AttachRequest(beat=node_pb2.Beat())


def peers_message(peers: Iterable[tuple[Hello, bytes]]) -> node_pb2.AttachRequest:
    """Return the complete list of usable nodes of the other role, each with its present admission key."""
    nodes = [
        node_pb2.Peer(
            incarnation=peer.incarnation,
            kv_endpoints=[
                node_pb2.KvEndpoint(address=at.address, head_start=at.head_start, head_end=at.head_end)
                for at in peer.kv_endpoints
            ],
            kv_admission_key=key,
        )
        for peer, key in peers
    ]
    return node_pb2.AttachRequest(peers=node_pb2.Peers(nodes=nodes))


def cancel_message(session_id: int, attempt: int, reason: str, sequences: Iterable[int] = ()) -> node_pb2.AttachRequest:
    """Return the end of an attempt, or of some of its sequences."""
    cancel = node_pb2.Cancel(session_id=session_id, attempt=attempt, reason=reason, sequences=sequences)
    return node_pb2.AttachRequest(cancel=cancel)


def submit_messages(facts: SubmitFacts, submit: Submit) -> list[node_pb2.AttachRequest]:
    """Return the submit, and the parts that hold what does not fit into one message."""
    first = node_pb2.Submit(
        session_id=facts.session_id,
        attempt=submit.attempt,
        transfer_id=submit.transfer_id or b"",
        prefill_incarnation=submit.prefill,
        decode_incarnation=submit.decode or b"",
        request_label=facts.label,
        num_prompt_ids=len(facts.prompt_ids),
        output_ids=submit.output_ids,
        sampling=_sampling_to_pb(facts.sampling),
        max_tokens=facts.max_tokens,
        stop_token_ids=sorted(facts.stop_token_ids),
        ignore_eos=facts.ignore_eos,
        deadline_s=facts.deadline_s,
        age_s=facts.age_s,
        num_sequences=submit.num_sequences,
        first_sequence=submit.first_sequence,
        min_tokens=facts.min_tokens,
        top_logprobs=facts.top_logprobs,
        prompt_logprobs=submit.prompt_logprobs,
    )
    room = max(0, min(MAX_IDS_PER_MESSAGE, (MAX_SUBMIT_BYTES - first.ByteSize()) // MAX_ID_BYTES))
    first.prompt_ids.extend(facts.prompt_ids[:room])
    messages = [node_pb2.AttachRequest(submit=first)]
    for start in range(room, len(facts.prompt_ids), MAX_IDS_PER_MESSAGE):
        part = node_pb2.SubmitPart(
            session_id=facts.session_id,
            attempt=submit.attempt,
            prompt_ids=facts.prompt_ids[start : start + MAX_IDS_PER_MESSAGE],
        )
        messages.append(node_pb2.AttachRequest(submit_part=part))
    return messages


def _sampling_to_pb(sampling: Sampling) -> node_pb2.NodeSampling:
    grammar = sampling.grammar
    return node_pb2.NodeSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sorted(sampling.allowed_token_ids),
        banned_token_ids=sorted(sampling.banned_token_ids),
        banned_sequences=[inference_pb2.TokenIds(ids=ids) for ids in sampling.banned_sequences],
        grammar=None if grammar is None else node_pb2.Grammar(kind=_GRAMMAR_KINDS[grammar.kind], text=grammar.text),
    )


def hello_from_pb(message: node_pb2.NodeHello) -> Hello:
    """Return a node's first message. Raises ValueError if its role or incarnation makes no sense."""
    identity, capabilities = message.identity, message.capabilities
    return Hello(
        process=process_from_pb(message.process),
        identity=Identity(
            weight_digest=identity.weight_digest,
            architecture=identity.architecture,
            kv_fields=dict(identity.kv_fields),
            tokenizer_digest=identity.tokenizer_digest,
            salt_scheme=identity.salt_scheme,
        ),
        capabilities=Capabilities(capabilities.compute_dtype, capabilities.kv_dtype, tuple(capabilities.wire_dtypes)),
        kv_endpoints=tuple(KvEndpoint(at.address, at.head_start, at.head_end) for at in message.kv_endpoints),
        num_blocks=message.num_blocks,
        max_model_len=message.max_model_len,
        lease_s=message.lease_s,
        eos_token_ids=frozenset(message.eos_token_ids),
    )


def status_from_pb(message: node_pb2.NodeStatus) -> Status:
    """Return a node's load."""
    return Status(
        num_waiting=message.num_waiting,
        num_running=message.num_running,
        num_waiting_tokens=message.num_waiting_tokens,
        num_blocks=message.num_blocks,
        num_free_blocks=message.num_free_blocks,
        is_draining=message.draining,
        connected_peers=frozenset(Incarnation(peer) for peer in message.connected_peers),
        gauges=dict(message.gauges),
        kv_admission_key=message.kv_admission_key,
    )


def events_from_pb(node: Incarnation, message: node_pb2.StepOutput) -> Iterator[tuple[int, LegEvent]]:
    """Yield (session number, event) in the order in which they are to be read: tokens first."""
    for tokens in message.tokens:
        yield tokens.session_id, Tokens(node, tokens.attempt, _consecutive(tokens))
    for event in message.events:
        typed = _event_from_pb(node, event)
        if typed is not None:
            yield event.session_id, typed


def _event_from_pb(node: Incarnation, message: node_pb2.LegEvent) -> LegEvent | None:
    attempt = message.attempt
    match message.WhichOneof("event"):
        case "granted":
            return Granted(node, attempt)
        case "first_token":
            first = message.first_token
            return FirstToken(
                node, attempt, _first_tokens(first.tokens), first.num_cached_tokens, dict(first.durations_s)
            )
        case "prompt_logprobs":
            return PromptScored(node, attempt, message.prompt_logprobs.start, _scores(message.prompt_logprobs))
        case "adopted":
            return Adopted(node, attempt, _first_tokens(message.adopted.tokens), dict(message.adopted.durations_s))
        case "ended":
            ended = message.ended
            return LegEnded(node, attempt, _outcome(ended.outcome), ended.reason, ended.detail)
        case "released":
            released = message.released
            return LegReleased(node, attempt, dict(released.durations_s), released.kv_bytes, released.kv_frames)
        case _:
            return None


def _consecutive(message: node_pb2.SequenceTokens) -> tuple[SampledToken, ...]:
    ids, logprobs = list(message.token_ids), list(message.logprobs)
    logprobs += [math.nan] * (len(ids) - len(logprobs))
    tops = [_top(top) for top in message.top_logprobs]
    tops += [()] * (len(ids) - len(tops))
    last = len(ids) - 1
    finish = _finish(message.finish_reason)
    return tuple(
        SampledToken(
            message.first_index + offset,
            token_id,
            logprobs[offset],
            finish if offset == last else None,
            message.sequence,
            tops[offset],
        )
        for offset, token_id in enumerate(ids)
    )


def _first_tokens(tokens: Sequence[node_pb2.FirstToken]) -> tuple[SampledToken, ...]:
    return tuple(
        SampledToken(
            token.index,
            token.token_id,
            token.logprob,
            _finish(token.finish_reason),
            token.sequence,
            _top(token.top_logprobs),
        )
        for token in tokens
    )


def _scores(message: node_pb2.LegPromptLogprobs) -> tuple[TokenScore, ...]:
    tops = [_top(top) for top in message.top_logprobs]
    tops += [()] * (len(message.logprobs) - len(tops))
    return tuple(map(TokenScore, message.logprobs, tops))


def _top(message: inference_pb2.TopLogprobs) -> TopLogprobs:
    return tuple(zip(message.token_ids, message.logprobs, strict=False))


def _finish(value: int) -> FinishReason | None:
    return FinishReason(value) if value in (FinishReason.STOP, FinishReason.LENGTH) else None


def _outcome(value: int) -> LegOutcome:
    """Return the outcome; one that this version does not know counts as a failure."""
    return LegOutcome(value) if value in set(LegOutcome) else LegOutcome.FAILED
