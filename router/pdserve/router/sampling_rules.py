"""The checks of what a request asks of sampling: ranges by field, and combinations that leave nothing to choose from."""

import math
import secrets
from collections.abc import Callable
from typing import NoReturn

from pdserve.core.errors import InvalidRequest
from pdserve.core.work import Sampling
from pdserve.router.request import GenerateCall
from pdserve.router.structured import checked_grammar

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_COUNT_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_IDS = 1024
MAX_LISTED_IDS = 4096
MAX_BANNED_WORDS = 256
MAX_WORD_CHARS = 256
MAX_WORD_TOKENS = 1024
MAX_BANNED_TOKENS = 16_384
"""Tokens of all banned words together, each in every way in which it is encoded."""
DRAWN_SEED_BITS = 53
"""A drawn seed survives JSON, whose numbers are exact below 2**53; a client may send any 64 bits."""

WordEncoder = Callable[[str], frozenset[tuple[int, ...]]]
"""Returns the token ids of a text at the start of a word and within one."""


def checked_sampling(call: GenerateCall, vocab_size: int, encode_word: WordEncoder) -> Sampling:
    """Return the resolved parameters. NaN and infinities lie in no range, so the ranges refuse them too.

    The seed is drawn here when it is not set. Raises InvalidRequest naming the field.
    """
    temperature = 0.0 if call.temperature is None else call.temperature
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        refuse("sampling.temperature", f"temperature is {temperature:g}", "0 (greedy) to 100")
    top_p = 1.0 if call.top_p is None else call.top_p
    if not 0.0 < top_p <= 1.0:
        refuse("sampling.top_p", f"top_p is {top_p:g}", "above 0, at most 1")
    min_p = 0.0 if call.min_p is None else call.min_p
    if not 0.0 <= min_p < 1.0:
        refuse("sampling.min_p", f"min_p is {min_p:g}", "at least 0, below 1")
    repetition = 1.0 if call.repetition_penalty is None else call.repetition_penalty
    if not 0.0 < repetition <= MAX_REPETITION_PENALTY:
        refuse("sampling.repetition_penalty", f"repetition_penalty is {repetition:g}", "above 0, at most 100")
    sampling = Sampling(
        temperature=temperature,
        top_k=call.top_k or 0,
        top_p=top_p,
        min_p=min_p,
        seed=secrets.randbits(DRAWN_SEED_BITS) if call.seed is None else call.seed,
        repetition_penalty=repetition,
        presence_penalty=_count_penalty("presence_penalty", call.presence_penalty),
        frequency_penalty=_count_penalty("frequency_penalty", call.frequency_penalty),
        logit_bias=_checked_bias(call.logit_bias, vocab_size),
        allowed_token_ids=_checked_list("sampling.allowed_token_ids", call.allowed_token_ids, vocab_size),
        banned_token_ids=_checked_list("sampling.banned_token_ids", call.banned_token_ids, vocab_size),
        banned_sequences=_checked_words(call.banned_words, encode_word),
        grammar=checked_grammar(call),
    )
    _check_choice(sampling, vocab_size)
    return sampling


def check_min_tokens(sampling: Sampling, min_tokens: int, end_ids: frozenset[int], vocab_size: int) -> None:
    """Refuse a request that could choose nothing but ends before `min_tokens`. Raises InvalidRequest."""
    if min_tokens and not _choices_but(sampling, vocab_size, end_ids):
        refuse(
            "stop.min_tokens",
            "before min_tokens no end may be chosen, and every token that may be chosen is an end",
            "allow a token that is neither end-of-sequence nor a stop id, or leave min_tokens unset",
        )


def check_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    """Refuse ids that are not in the vocabulary. Raises InvalidRequest."""
    highest = max(ids, default=0)
    if highest >= vocab_size or min(ids, default=0) < 0:
        index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        refuse(field, f"id {ids[index]} at index {index} is not in the vocabulary", f"0 to {vocab_size - 1}")


def refuse(field: str, message: str, hint: str) -> NoReturn:
    """Raise the InvalidRequest that names a field, what is wrong with it, and what would be right."""
    raise InvalidRequest(message, hint=hint, field=field)


def _count_penalty(name: str, given: float | None) -> float:
    value = 0.0 if given is None else given
    if not -MAX_COUNT_PENALTY <= value <= MAX_COUNT_PENALTY:
        refuse(f"sampling.{name}", f"{name} is {value:g}", "-2 to 2")
    return value


def _checked_bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    if len(bias) > MAX_BIASED_IDS:
        refuse(field, f"{len(bias)} biased ids", f"at most {MAX_BIASED_IDS}")
    check_ids(field, tuple(token_id for token_id, _ in bias), vocab_size)
    for token_id, value in bias:
        if math.isnan(value) or abs(value) > MAX_BIAS:
            refuse(field, f"the bias of id {token_id} is {value:g}", "-100 to 100; banned_token_ids bans for good")
    return bias


def _checked_list(field: str, ids: tuple[int, ...], vocab_size: int) -> frozenset[int]:
    if len(ids) > MAX_LISTED_IDS:
        refuse(field, f"{len(ids)} ids", f"at most {MAX_LISTED_IDS}")
    check_ids(field, ids, vocab_size)
    return frozenset(ids)


def _checked_words(words: tuple[str, ...], encode_word: WordEncoder) -> tuple[tuple[int, ...], ...]:
    """Return the id sequences of banned words, each once, in an order that depends on the words alone."""
    field = "sampling.banned_words"
    if len(words) > MAX_BANNED_WORDS:
        refuse(field, f"{len(words)} words", f"at most {MAX_BANNED_WORDS}")
    for index, word in enumerate(words):  # all of them before any is encoded: encoding costs
        if not 1 <= len(word) <= MAX_WORD_CHARS:
            refuse(f"{field}[{index}]", f"the word has {len(word)} characters", f"1 to {MAX_WORD_CHARS}")
    sequences: set[tuple[int, ...]] = set()
    for index, word in enumerate(words):
        ways = encode_word(word) - {()}
        if not ways:
            refuse(f"{field}[{index}]", "this model's tokenizer makes no token of the word", "leave it out")
        if max(map(len, ways)) > MAX_WORD_TOKENS:
            refuse(f"{field}[{index}]", f"the word has {max(map(len, ways))} tokens", f"at most {MAX_WORD_TOKENS}")
        sequences |= ways
        if (num_tokens := sum(map(len, sequences))) > MAX_BANNED_TOKENS:
            refuse(
                field, f"the words have {num_tokens} tokens in all ways of writing them", f"at most {MAX_BANNED_TOKENS}"
            )
    return tuple(sorted(sequences))


def _check_choice(sampling: Sampling, vocab_size: int) -> None:
    if _choices_but(sampling, vocab_size, frozenset()):
        return
    field = "allowed_token_ids" if sampling.allowed_token_ids else "banned_token_ids"
    refuse(f"sampling.{field}", "every token that is allowed is also banned", "allow more, or ban less")


def _choices_but(sampling: Sampling, vocab_size: int, others: frozenset[int]) -> int:
    """Return how many ids may be chosen when `others` may not either. Banned words of one token are banned ids."""
    words = {ids[0] for ids in sampling.banned_sequences if len(ids) == 1}
    banned = sampling.banned_token_ids | words | others
    if sampling.allowed_token_ids:
        return len(sampling.allowed_token_ids - banned)
    return vocab_size - len(banned)
