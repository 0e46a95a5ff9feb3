"""What can never be sent, refused by name before anything is: numbers out of range, text that is no UTF-8, a useless address."""

import math
from collections.abc import Iterator

from pdserve.client.language import Grammar, JsonSchema, OneOf, Regex
from pdserve.client.request import Chat, Options, Prompt
from pdserve.core.errors import InvalidRequest

MAX_UINT32 = 2**32 - 1
LONGEST_TIMEOUT_S = 86_400.0
RANGES = {
    "n": ("n", 1, MAX_UINT32),
    "max_tokens": ("stop.max_tokens", 1, MAX_UINT32),
    "min_tokens": ("stop.min_tokens", 0, MAX_UINT32),
    "top_logprobs": ("top_logprobs", 0, MAX_UINT32),
    "priority": ("priority", -(2**31), 2**31 - 1),
    "top_k": ("sampling.top_k", 0, MAX_UINT32),
    "seed": ("sampling.seed", 0, 2**64 - 1),
}
"""Per option: the contract's field, the lowest and the highest value."""


def check_request(prompt: Prompt, options: Options) -> None:
    """Raise InvalidRequest for what the contract cannot carry; all else is the router's to check."""
    for name, (field, low, high) in RANGES.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"{name} must be a whole number from {low} to {high:,}, not {value:,}", field=field)
    timeout_s = options.timeout_s
    if timeout_s is not None and not (math.isfinite(timeout_s) and 0 < timeout_s <= LONGEST_TIMEOUT_S):
        message = f"timeout_s must be above 0, at most {LONGEST_TIMEOUT_S:,.0f} seconds, not {timeout_s:g}"
        raise InvalidRequest(message, field="timeout_s")
    for field, what, text in texts_of(prompt, options):
        check_text(field, what, text)
    if not isinstance(prompt, str | Chat):
        check_ids("token_ids.ids", prompt)
    check_ids("stop.stop_token_ids", options.stop_token_ids)
    check_ids("sampling.allowed_token_ids", options.allowed_token_ids)
    check_ids("sampling.banned_token_ids", options.banned_token_ids)
    check_ids("sampling.logit_bias", tuple(options.logit_bias))


def texts_of(prompt: Prompt, options: Options) -> Iterator[tuple[str, str, str]]:
    """Yield every text of a request: the contract's field, what it is, and the text."""
    yield ("model", "the model's name", options.model)
    yield ("request_id", "the label", options.request_id)
    yield ("cache_salt", "the cache salt", options.cache_salt or "")
    yield from ((f"stop.stop[{i}]", "the stop text", text) for i, text in enumerate(options.stop))
    yield from ((f"sampling.banned_words[{i}]", "the banned word", text) for i, text in enumerate(options.banned_words))
    match options.structured_output:
        case JsonSchema(str(text)):
            yield ("structured_output.json_schema", "the schema", text)
        case Regex(text):
            yield ("structured_output.regex", "the expression", text)
        case OneOf(texts):
            yield from ((f"structured_output.choice.texts[{i}]", "the choice", text) for i, text in enumerate(texts))
        case Grammar(text):
            yield ("structured_output.grammar", "the grammar", text)
    if isinstance(prompt, str):
        yield ("text", "the prompt", prompt)
    elif isinstance(prompt, Chat):
        for i, turn in enumerate(prompt.turns):
            yield (f"chat.messages[{i}].role", "the role", turn.role)
            yield (f"chat.messages[{i}].content", "the prompt", turn.content or "")


def check_text(field: str, what: str, text: str) -> None:
    """Raise InvalidRequest for text that cannot be encoded, as an argument of bytes that were no UTF-8 becomes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} is not valid UTF-8", field=field) from None


def check_ids(field: str, ids: tuple[int, ...]) -> None:
    """Raise InvalidRequest for an id that is none in any vocabulary."""
    for index, token_id in enumerate(ids):
        if not 0 <= token_id <= MAX_UINT32:
            raise InvalidRequest(f"{field}: id {token_id} at index {index} is no token id", field=field)


def check_address(address: str) -> None:
    """Raise InvalidRequest unless `address` is HOST:PORT, saying what is wrong with it."""
    fault = address_fault(address)
    if fault:
        hint = "give HOST:PORT, for example 127.0.0.1:50051 or [::1]:50051"
        raise InvalidRequest(f"server {address!r} {fault}", field="server", hint=hint)


def address_fault(address: str) -> str:
    """Return what is wrong with an address, or nothing."""
    if "://" in address:
        return f"has a scheme ({address.partition('://')[0]}://)"
    host, colon, port = address.rpartition(":")
    if any(character.isspace() or not character.isprintable() for character in address):
        return "has characters that no address has"
    if not colon or address.endswith("]"):
        return "has no port" if address else "is empty"
    if not host:
        return "has no host"
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65_535):
        return f"has no port from 1 to 65,535 after its last colon, but {port!r}"
    is_bracketed = host.startswith("[") and host.endswith("]")
    return "" if is_bracketed or ":" not in host else "has several colons; an IPv6 address stands in brackets"
