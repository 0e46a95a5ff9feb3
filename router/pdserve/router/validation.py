"""Every check of a request, once, at the door: what comes out can be served, what cannot is refused by field and hint."""

from dataclasses import dataclass, replace

from pdserve.core.errors import NotServed, UnknownModel
from pdserve.router.chat.door import checked_chat
from pdserve.router.pool_size import PoolSize
from pdserve.router.request import (
    ChatInput,
    GenerateCall,
    PromptInput,
    TextInput,
    TokenInput,
    ValidChat,
    ValidInput,
    ValidRequest,
)
from pdserve.router.sampling_rules import WordEncoder, check_ids, check_min_tokens, checked_sampling, refuse
from pdserve.router.structured import checked_tool_grammar

MAX_LABEL_CHARS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_N = 64
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    vocab_size: int
    has_chat_template: bool
    encode_word: WordEncoder
    tool_format: str | None = None


def validate(call: GenerateCall, model: ServedModel) -> ValidRequest:
    """Return the valid form of `call`. Raises InvalidRequest, NotServed or UnknownModel, each naming the field.

    The seed is drawn here when it is not set. Lengths are checked later, by `resolve_max_tokens`, once the prompt is tokens.
    """
    _check_served(call)
    _check_label(call.request_id)
    check_model(call.model, model.name)
    given = _checked_input(call.input, model)
    sampling = checked_sampling(call, model.vocab_size, model.encode_word)
    grammar = checked_tool_grammar(call, given, model.tool_format)
    return ValidRequest(
        label=call.request_id,
        model=model.name,
        input=given,
        sampling=sampling if grammar is None else replace(sampling, grammar=grammar),
        max_tokens=_checked_max_tokens(call.max_tokens),
        stop=_checked_stops(call.stop),
        stop_token_ids=_checked_stop_ids(call.stop_token_ids, model),
        ignore_eos=bool(call.ignore_eos),
        stream=call.stream is not False,
        n=_checked_n(call.n),
        min_tokens=_checked_min_tokens(call.min_tokens, call.max_tokens),
        include_stop=bool(call.include_stop),
        top_logprobs=_checked_top_logprobs(call.top_logprobs),
        prompt_logprobs=bool(call.prompt_logprobs),
    )


def check_model(name: str, served: str) -> None:
    """Raise UnknownModel for a model that is not served here; "" stands for the only one."""
    if name not in ("", served):
        raise UnknownModel(f"model {name[:64]!r} is not served here", hint=f"served: {served}", field="model")


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """What the ready nodes can hold, tokens of prompt and answer together.

    `common` fits every usable node of at least one identity (an unset `max_tokens` is filled up to it); `longest` fits at
    least one pair of nodes. `pools` are the sizes of the decode nodes' pools.
    """

    common: int
    longest: int
    pools: tuple[PoolSize, ...] = ()

    def most_tokens(self, num_prompt_ids: int, num_sequences: int) -> int:
        """Return how long each of several answers to one prompt may get, prompt included; one answer is bound by its length."""
        if num_sequences == 1:
            return self.longest
        return min(
            self.longest, max((pool.most_tokens(num_prompt_ids, num_sequences) for pool in self.pools), default=0)
        )


def resolve_lengths(
    num_prompt_ids: int, request: ValidRequest, limits: LengthLimits, eos_token_ids: frozenset[int], vocab_size: int
) -> int:
    """Return the absolute bound on output tokens of each sequence. Raises InvalidRequest for what can never fit or begin."""
    field = input_field(request.input)
    max_tokens = resolve_max_tokens(num_prompt_ids, request.max_tokens, limits, field, request.n)
    if request.min_tokens > max_tokens:
        refuse(
            "stop.min_tokens", f"min_tokens is {request.min_tokens}; the answer can have {max_tokens}", "ask for fewer"
        )
    check_min_tokens(request.sampling, request.min_tokens, request.stop_token_ids | eos_token_ids, vocab_size)
    return max_tokens


def resolve_max_tokens(
    num_prompt_ids: int, max_tokens: int | None, limits: LengthLimits, field: str, num_sequences: int = 1
) -> int:
    """Return the absolute bound on output tokens of each sequence. Raises InvalidRequest for what can never fit.

    `field` is the input field that a prompt beyond all limits is blamed on.
    """
    if num_prompt_ids == 0:
        refuse(field, "the prompt is empty", "give at least one token; this model's tokenizer adds none by itself")
    if num_prompt_ids >= limits.longest:
        refuse(
            field,
            f"the prompt has {num_prompt_ids} tokens; prompt and answer together can have {limits.longest}",
            f"shorten the prompt to at most {limits.longest - 1} tokens",
        )
    most = limits.most_tokens(num_prompt_ids, num_sequences)
    if num_prompt_ids + (max_tokens or 1) > most < limits.longest:
        refuse(
            "n",
            f"{num_sequences} answers to {num_prompt_ids} prompt tokens can have {max(0, most - num_prompt_ids)} tokens each",
            "ask for fewer answers, or shorter ones",
        )
    if max_tokens is None:
        room = limits.common if num_prompt_ids < limits.common else limits.longest
        return min(room, most) - num_prompt_ids
    if num_prompt_ids + max_tokens > limits.longest:
        refuse(
            "stop.max_tokens",
            f"{num_prompt_ids} prompt tokens and max_tokens {max_tokens} exceed the {limits.longest} tokens that fit",
            f"ask for at most {limits.longest - num_prompt_ids}, or leave max_tokens unset",
        )
    return max_tokens


def input_field(given: ValidInput) -> str:
    """Return the contract's name of the input field."""
    match given:
        case TextInput():
            return "text"
        case TokenInput():
            return "token_ids.ids"
        case ValidChat():
            return "chat.messages"


def label_fault(label: str) -> tuple[str, str] | None:
    """Return what is wrong with a label, and what would be right; None if it may stand in a log."""
    if len(label) > MAX_LABEL_CHARS:
        return f"the label has {len(label)} characters", f"at most {MAX_LABEL_CHARS}"
    if not label.isprintable():
        return "the label has characters that cannot be printed", "it stands in logs, on one line"
    return None


def _check_served(call: GenerateCall) -> None:
    """Refuse every field that this version does not serve; none is ignored."""
    if call.unknown_fields:
        name = call.unknown_fields[0]
        raise NotServed(
            f"this router does not know the field {name}", hint="the client's contract is newer", field=name
        )
    unserved: tuple[tuple[str, bool, str], ...] = (
        ("priority", call.priority not in (None, 0), "leave it unset"),
        ("objectives", call.has_objectives, "leave it unset"),
        ("cache_salt", call.cache_salt is not None, "leave it unset"),
    )
    for name, is_used, hint in unserved:
        if is_used:
            raise NotServed(f"{name} is not served yet", hint=hint, field=name)


def _check_label(label: str) -> None:
    fault = label_fault(label)
    if fault is not None:
        refuse("request_id", *fault)


def _checked_input(given: PromptInput | None, model: ServedModel) -> ValidInput:
    match given:
        case None:
            refuse("input", "the request has no input", "set text, token_ids or chat")
        case TextInput(text):
            if not text:
                refuse("text", "the prompt is empty", "give at least one character")
        case TokenInput(ids):
            if not ids:
                refuse("token_ids.ids", "the prompt is empty", "give at least one token id")
            check_ids("token_ids.ids", ids, model.vocab_size)
        case ChatInput():
            if not model.has_chat_template:
                refuse("chat", f"model {model.name} has no chat template", "send text or token_ids")
            return checked_chat(given, model.tool_format)
    return given


def _checked_n(n: int | None) -> int:
    if n is not None and not 1 <= n <= MAX_N:
        refuse("n", f"n is {n}", f"1 to {MAX_N}; leave it unset for one answer")
    return n or 1


def _checked_top_logprobs(top_logprobs: int | None) -> int:
    if top_logprobs is not None and not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        refuse("top_logprobs", f"top_logprobs is {top_logprobs}", f"0 to {MAX_TOP_LOGPROBS}")
    return top_logprobs or 0


def _checked_min_tokens(min_tokens: int | None, max_tokens: int | None) -> int:
    if min_tokens and max_tokens is not None and min_tokens > max_tokens:
        refuse("stop.min_tokens", f"min_tokens {min_tokens} exceeds max_tokens {max_tokens}", "at most max_tokens")
    return min_tokens or 0


def _checked_max_tokens(max_tokens: int | None) -> int | None:
    if max_tokens == 0:
        refuse("stop.max_tokens", "max_tokens is 0", "at least 1, or unset for as many as fit")
    return max_tokens


def _checked_stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        refuse("stop.stop", f"{len(stops)} stop texts", f"at most {MAX_STOPS}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            refuse(f"stop.stop[{index}]", f"the stop text has {len(stop)} characters", f"1 to {MAX_STOP_CHARS}")
    return stops


def _checked_stop_ids(ids: tuple[int, ...], model: ServedModel) -> frozenset[int]:
    if len(ids) > MAX_STOP_IDS:
        refuse("stop.stop_token_ids", f"{len(ids)} stop token ids", f"at most {MAX_STOP_IDS}")
    check_ids("stop.stop_token_ids", ids, model.vocab_size)
    return frozenset(ids)
