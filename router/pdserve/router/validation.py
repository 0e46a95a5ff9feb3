"""Every check of a request, once, at the door: what comes out can be served, what cannot is refused by field and hint."""

import secrets
from dataclasses import dataclass
from typing import NoReturn

from pdserve.core.errors import InvalidRequest, NotServed, PdserveError, UnknownModel
from pdserve.core.work import Sampling
from pdserve.router.request import ChatInput, GenerateCall, PromptInput, TextInput, TokenInput, ValidRequest

MAX_LABEL_CHARS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_TEMPERATURE = 100.0
DRAWN_SEED_BITS = 53
"""A drawn seed survives JSON, whose numbers are exact below 2**53; a client may send any 64 bits."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    vocab_size: int
    has_chat_template: bool


def validate(call: GenerateCall, model: ServedModel) -> ValidRequest:
    """Return the valid form of `call`. Raises InvalidRequest, NotServed or UnknownModel, each naming the field.

    The seed is drawn here when it is not set. Lengths are checked later, by `resolve_max_tokens`, once the prompt is tokens.
    """
    _check_served(call)
    _check_label(call.request_id)
    if call.model not in ("", model.name):
        raise UnknownModel(f"model {call.model!r} is not served here", hint=f"served: {model.name}", field="model")
    return ValidRequest(
        label=call.request_id,
        model=model.name,
        input=_checked_input(call.input, model),
        sampling=_checked_sampling(call),
        max_tokens=_checked_max_tokens(call.max_tokens),
        stop=_checked_stops(call.stop),
        stop_token_ids=_checked_stop_ids(call.stop_token_ids, model),
        ignore_eos=bool(call.ignore_eos),
        stream=call.stream is not False,
    )


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """What the ready nodes can hold, tokens of prompt and answer together.

    `common` fits every usable node of at least one identity (an unset `max_tokens` is filled up to it); `longest` fits at
    least one pair of nodes.
    """

    common: int
    longest: int


def resolve_max_tokens(num_prompt_ids: int, max_tokens: int | None, limits: LengthLimits, field: str) -> int:
    """Return the absolute bound on output tokens. Raises InvalidRequest for what can never fit.

    `field` is the input field that a prompt beyond all limits is blamed on.
    """
    if num_prompt_ids == 0:
        _refuse(field, "the prompt is empty", "give at least one token; this model's tokenizer adds none by itself")
    if num_prompt_ids >= limits.longest:
        _refuse(
            field,
            f"the prompt has {num_prompt_ids} tokens; prompt and answer together can have {limits.longest}",
            f"shorten the prompt to at most {limits.longest - 1} tokens",
        )
    if max_tokens is None:
        room = limits.common if num_prompt_ids < limits.common else limits.longest
        return room - num_prompt_ids
    if num_prompt_ids + max_tokens > limits.longest:
        _refuse(
            "stop.max_tokens",
            f"{num_prompt_ids} prompt tokens and max_tokens {max_tokens} exceed the {limits.longest} tokens that fit",
            f"ask for at most {limits.longest - num_prompt_ids}, or leave max_tokens unset",
        )
    return max_tokens


def input_field(given: PromptInput) -> str:
    """Return the contract's name of the input field."""
    match given:
        case TextInput():
            return "text"
        case TokenInput():
            return "token_ids.ids"
        case ChatInput():
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
    if call.n == 0:
        _refuse("n", "n must be >= 1", "leave it unset for one answer")
    unserved: tuple[tuple[str, bool, str], ...] = (
        ("n", call.n not in (None, 1), "only n = 1 is served; send the request several times"),
        ("priority", call.priority not in (None, 0), "leave it unset"),
        ("objectives", call.has_objectives, "leave it unset"),
        ("cache_salt", call.cache_salt is not None, "leave it unset"),
        ("top_logprobs", call.top_logprobs not in (None, 0), "only the chosen token's log-probability is served"),
        ("prompt_logprobs", bool(call.prompt_logprobs), "leave it unset"),
        ("chat.tools", isinstance(call.input, ChatInput) and bool(call.input.tools), "leave it empty"),
        ("structured_output", call.structured_output is not None, "leave it unset"),
        ("sampling.logit_bias", bool(call.logit_bias), "leave it empty"),
        ("sampling.allowed_token_ids", bool(call.allowed_token_ids), "leave it empty"),
        ("sampling.banned_token_ids", bool(call.banned_token_ids), "leave it empty"),
        ("sampling.banned_words", bool(call.banned_words), "leave it empty"),
        ("sampling.repetition_penalty", call.repetition_penalty not in (None, 1.0), "only 1 is served"),
        ("sampling.presence_penalty", call.presence_penalty not in (None, 0.0), "only 0 is served"),
        ("sampling.frequency_penalty", call.frequency_penalty not in (None, 0.0), "only 0 is served"),
        ("stop.min_tokens", call.min_tokens not in (None, 0), "only 0 is served"),
        ("stop.include_stop", bool(call.include_stop), "leave it unset"),
    )
    for name, is_used, hint in unserved:
        if is_used:
            raise NotServed(f"{name} is not served yet", hint=hint, field=name)


def _check_label(label: str) -> None:
    fault = label_fault(label)
    if fault is not None:
        _refuse("request_id", *fault)


def _checked_input(given: PromptInput | None, model: ServedModel) -> PromptInput:
    match given:
        case None:
            _refuse("input", "the request has no input", "set text, token_ids or chat")
        case TextInput(text):
            if not text:
                _refuse("text", "the prompt is empty", "give at least one character")
        case TokenInput(ids):
            if not ids:
                _refuse("token_ids.ids", "the prompt is empty", "give at least one token id")
            _check_ids(ids, model, "token_ids.ids")
        case ChatInput(turns):
            if not model.has_chat_template:
                _refuse("chat", f"model {model.name} has no chat template", "send text or token_ids")
            if not turns:
                _refuse("chat.messages", "the conversation is empty", "give at least one message")
            for index, turn in enumerate(turns):
                if not turn.role:
                    _refuse(f"chat.messages[{index}].role", "the role is empty", "for example: user")
    return given


def _checked_sampling(call: GenerateCall) -> Sampling:
    """Return the resolved parameters. NaN and infinities lie in no range, so the ranges refuse them too."""
    temperature = 0.0 if call.temperature is None else call.temperature
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        _refuse("sampling.temperature", f"temperature is {temperature:g}", "0 (greedy) to 100")
    top_p = 1.0 if call.top_p is None else call.top_p
    if not 0.0 < top_p <= 1.0:
        _refuse("sampling.top_p", f"top_p is {top_p:g}", "above 0, at most 1")
    min_p = 0.0 if call.min_p is None else call.min_p
    if not 0.0 <= min_p < 1.0:
        _refuse("sampling.min_p", f"min_p is {min_p:g}", "at least 0, below 1")
    seed = secrets.randbits(DRAWN_SEED_BITS) if call.seed is None else call.seed
    return Sampling(temperature, call.top_k or 0, top_p, min_p, seed)


def _checked_max_tokens(max_tokens: int | None) -> int | None:
    if max_tokens == 0:
        _refuse("stop.max_tokens", "max_tokens is 0", "at least 1, or unset for as many as fit")
    return max_tokens


def _checked_stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        _refuse("stop.stop", f"{len(stops)} stop texts", f"at most {MAX_STOPS}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            _refuse(f"stop.stop[{index}]", f"the stop text has {len(stop)} characters", f"1 to {MAX_STOP_CHARS}")
    return stops


def _checked_stop_ids(ids: tuple[int, ...], model: ServedModel) -> frozenset[int]:
    if len(ids) > MAX_STOP_IDS:
        _refuse("stop.stop_token_ids", f"{len(ids)} stop token ids", f"at most {MAX_STOP_IDS}")
    _check_ids(ids, model, "stop.stop_token_ids")
    return frozenset(ids)


def _check_ids(ids: tuple[int, ...], model: ServedModel, field: str) -> None:
    highest = max(ids, default=0)
    if highest >= model.vocab_size or min(ids, default=0) < 0:
        index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < model.vocab_size)
        _refuse(field, f"id {ids[index]} at index {index} is not in the vocabulary", f"0 to {model.vocab_size - 1}")


def _refuse(field: str, message: str, hint: str) -> NoReturn:
    error: PdserveError = InvalidRequest(message, hint=hint, field=field)
    raise error
