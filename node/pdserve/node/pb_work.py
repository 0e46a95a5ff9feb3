"""Where a router's submit becomes a leg of our own type: every field checked, every fault named.

The router has checked what a client asked; these bounds are those of the contract, and they keep a faulty router from costing
more than its own request.
"""

from collections.abc import Iterable

from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import ID_BYTES, Incarnation, TransferId
from pdserve.core.work import Grammar, GrammarKind, Sampling, Work
from pdserve.node.pb import leg_of
from pdserve.v1 import node_pb2

MAX_SEQUENCES = 64
MAX_TOP_LOGPROBS = 20
MAX_STOP_IDS = 64
MAX_BIASED_IDS = 1024
MAX_LISTED_IDS = 4096
MAX_BANNED_SEQUENCES = 4096
MAX_BANNED_LENGTH = 1024
MAX_GRAMMAR_CHARS = 512 << 10


def work_from_pb(message: node_pb2.Submit, router: Incarnation, prompt_ids: tuple[int, ...], now_s: float) -> Work:
    """Return the typed leg of a complete submit. Raises InvalidRequest naming what cannot be used."""
    hands_over = bool(message.transfer_id)
    _check_parties(message, hands_over)
    _require(len(prompt_ids) > 0, "prompt_ids", "must not be empty")
    _require(len(prompt_ids) == message.num_prompt_ids, "prompt_ids", f"must be {message.num_prompt_ids} as announced")
    _check_limits(message)
    return Work(
        leg=leg_of(router, message),
        transfer_id=TransferId(message.transfer_id) if hands_over else None,
        prefill=Incarnation(message.prefill_incarnation),
        decode=Incarnation(message.decode_incarnation) if hands_over else None,
        label=message.request_label,
        prompt_ids=prompt_ids,
        output_ids=tuple(message.output_ids),
        sampling=_sampling(message.sampling),
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        arrived_s=now_s - max(0.0, message.age_s),
        deadline_s=now_s + message.deadline_s if message.deadline_s > 0 else None,
        num_sequences=message.num_sequences or 1,
        first_sequence=message.first_sequence,
        min_tokens=message.min_tokens,
        top_logprobs=message.top_logprobs,
        prompt_logprobs=message.prompt_logprobs,
    )


def _check_parties(message: node_pb2.Submit, hands_over: bool) -> None:
    _require(message.attempt >= 1, "attempt", "must be >= 1")
    _require(len(message.prefill_incarnation) == ID_BYTES, "prefill_incarnation", f"must be {ID_BYTES} bytes")
    if hands_over:
        _require(len(message.transfer_id) == ID_BYTES, "transfer_id", f"must be {ID_BYTES} bytes or empty")
        _require(len(message.decode_incarnation) == ID_BYTES, "decode_incarnation", f"must be {ID_BYTES} bytes")


def _check_limits(message: node_pb2.Submit) -> None:
    last_sequence = message.first_sequence + (message.num_sequences or 1)
    _require(message.max_tokens > len(message.output_ids), "max_tokens", "must exceed the number of output_ids")
    _require(message.min_tokens <= message.max_tokens, "min_tokens", "must not exceed max_tokens")
    _require(message.num_sequences <= MAX_SEQUENCES, "num_sequences", f"must be at most {MAX_SEQUENCES}")
    _require(last_sequence <= MAX_SEQUENCES, "first_sequence", f"must leave all sequences below {MAX_SEQUENCES}")
    _require(message.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", f"must be at most {MAX_TOP_LOGPROBS}")
    _require(len(message.stop_token_ids) <= MAX_STOP_IDS, "stop_token_ids", f"must be at most {MAX_STOP_IDS}")


def _sampling(message: node_pb2.NodeSampling) -> Sampling:
    repetition = message.repetition_penalty or 1.0
    _require(0 <= message.temperature <= 100, "sampling.temperature", "must be in [0, 100]")
    _require(0 < message.top_p <= 1, "sampling.top_p", "must be in (0, 1]")
    _require(0 <= message.min_p < 1, "sampling.min_p", "must be in [0, 1)")
    _require(0 < repetition <= 100, "sampling.repetition_penalty", "must be in (0, 100]")
    _require(-2 <= message.presence_penalty <= 2, "sampling.presence_penalty", "must be in [-2, 2]")
    _require(-2 <= message.frequency_penalty <= 2, "sampling.frequency_penalty", "must be in [-2, 2]")
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=repetition,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=_logit_bias(message),
        allowed_token_ids=_listed(message.allowed_token_ids, "allowed_token_ids"),
        banned_token_ids=_listed(message.banned_token_ids, "banned_token_ids"),
        banned_sequences=_banned_sequences(message),
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
    )


def _logit_bias(message: node_pb2.NodeSampling) -> tuple[tuple[int, float], ...]:
    bias = tuple(sorted(message.logit_bias.items()))
    _require(len(bias) <= MAX_BIASED_IDS, "sampling.logit_bias", f"must name at most {MAX_BIASED_IDS} ids")
    _require(all(-100 <= addend <= 100 for _, addend in bias), "sampling.logit_bias", "must be in [-100, 100]")
    return bias


def _listed(token_ids: Iterable[int], name: str) -> frozenset[int]:
    listed = frozenset(token_ids)
    _require(len(listed) <= MAX_LISTED_IDS, f"sampling.{name}", f"must be at most {MAX_LISTED_IDS}")
    return listed


def _banned_sequences(message: node_pb2.NodeSampling) -> tuple[tuple[int, ...], ...]:
    banned = tuple(tuple(sequence.ids) for sequence in message.banned_sequences)
    name = "sampling.banned_sequences"
    _require(len(banned) <= MAX_BANNED_SEQUENCES, name, f"must be at most {MAX_BANNED_SEQUENCES}")
    fits = all(0 < len(ids) <= MAX_BANNED_LENGTH for ids in banned)
    _require(fits, name, f"must have 1 to {MAX_BANNED_LENGTH} ids each")
    return banned


def _grammar(message: node_pb2.Grammar) -> Grammar:
    known = [int(kind) for kind in GrammarKind]
    _require(int(message.kind) in known, "sampling.grammar.kind", "must be a known notation")
    fits = 0 < len(message.text) <= MAX_GRAMMAR_CHARS
    _require(fits, "sampling.grammar.text", f"must have 1 to {MAX_GRAMMAR_CHARS} characters")
    return Grammar(GrammarKind(message.kind), message.text)


def _require(holds: bool, field: str, fault: str) -> None:
    if not holds:
        raise InvalidRequest(f"submit.{field} {fault}", field=f"submit.{field}")
