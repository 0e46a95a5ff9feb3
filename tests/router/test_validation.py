"""Requests at the door: served, or refused by name; no field is ignored (failure classes 8 and 30)."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from pdserve.core.errors import InvalidRequest, NotServed, PdserveError, UnknownModel
from pdserve.router import pb
from pdserve.router.pool_size import PoolSize
from pdserve.router.request import ValidRequest
from pdserve.router.validation import LengthLimits, ServedModel, resolve_lengths, resolve_max_tokens, validate
from pdserve.v1 import inference_pb2


def encode_word(word: str) -> frozenset[tuple[int, ...]]:
    """A tokenizer with one token per letter, of which some stand for a letter after a space; it knows no digits."""
    ids = tuple(ord(char) % 50 for char in word if not char.isdigit())
    return frozenset({ids, (50 + ids[0], *ids[1:])} if ids else {()})


MODEL = ServedModel("tiny", 100, True, encode_word)
BARE = ServedModel("bare", 100, False, encode_word)
MAX_BYTES = 1 << 20

Request = inference_pb2.GenerateRequest
Change = Callable[[inference_pb2.GenerateRequest], object]


def text_request() -> inference_pb2.GenerateRequest:
    request = Request(text="hello")
    request.sampling.seed = 7
    return request


def checked(request: inference_pb2.GenerateRequest, model: ServedModel = MODEL) -> ValidRequest:
    return validate(pb.parse_generate(request.SerializeToString(), MAX_BYTES), model)


def refusal(change: Change, model: ServedModel = MODEL) -> PdserveError:
    request = text_request()
    change(request)
    with pytest.raises(PdserveError) as caught:
        checked(request, model)
    assert caught.value.hint, "a refusal says what to do"
    return caught.value


def set_sampling(name: str, value: float, request: inference_pb2.GenerateRequest) -> None:
    setattr(request.sampling, name, value)


def allow(request: inference_pb2.GenerateRequest, allowed: set[int], banned: set[int], *words: str) -> None:
    request.sampling.allowed_token_ids.extend(allowed)
    request.sampling.banned_token_ids.extend(banned)
    request.sampling.banned_words.extend(words)


TOOLS = inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage(role="user", content="")], tools=["{}"])

LONG_WORDS = ["a" * length for length in range(100, 200)]
TOO_FEW = inference_pb2.StopConditions(max_tokens=3, min_tokens=4)

BAD: list[tuple[str, type[PdserveError], Change]] = [
    ("input", InvalidRequest, lambda r: r.ClearField("text")),
    ("text", InvalidRequest, lambda r: setattr(r, "text", "")),
    ("token_ids.ids", InvalidRequest, lambda r: r.token_ids.SetInParent()),
    ("token_ids.ids", InvalidRequest, lambda r: r.token_ids.ids.append(100)),
    ("token_ids.ids", InvalidRequest, lambda r: r.token_ids.ids.extend([1, 2**32 - 1])),
    ("chat.messages", InvalidRequest, lambda r: r.chat.SetInParent()),
    (
        "chat.messages[1].role",
        InvalidRequest,
        lambda r: (r.chat.messages.add(role="user", content=""), r.chat.messages.add()),
    ),
    ("request_id", InvalidRequest, lambda r: setattr(r, "request_id", "x" * 129)),
    ("request_id", InvalidRequest, lambda r: setattr(r, "request_id", "two\nlines")),
    ("model", UnknownModel, lambda r: setattr(r, "model", "other")),
    ("sampling.temperature", InvalidRequest, lambda r: setattr(r.sampling, "temperature", math.nan)),
    ("sampling.temperature", InvalidRequest, lambda r: setattr(r.sampling, "temperature", math.inf)),
    ("sampling.temperature", InvalidRequest, lambda r: setattr(r.sampling, "temperature", -0.5)),
    ("sampling.temperature", InvalidRequest, lambda r: setattr(r.sampling, "temperature", 101)),
    ("sampling.top_p", InvalidRequest, lambda r: setattr(r.sampling, "top_p", 0.0)),
    ("sampling.top_p", InvalidRequest, lambda r: setattr(r.sampling, "top_p", 1.5)),
    ("sampling.top_p", InvalidRequest, lambda r: setattr(r.sampling, "top_p", math.nan)),
    ("sampling.min_p", InvalidRequest, lambda r: setattr(r.sampling, "min_p", 1.0)),
    ("sampling.min_p", InvalidRequest, lambda r: setattr(r.sampling, "min_p", -0.1)),
    ("sampling.min_p", InvalidRequest, lambda r: setattr(r.sampling, "min_p", math.nan)),
    ("stop.max_tokens", InvalidRequest, lambda r: setattr(r.stop, "max_tokens", 0)),
    ("stop.stop", InvalidRequest, lambda r: r.stop.stop.extend(["a"] * 17)),
    ("stop.stop[0]", InvalidRequest, lambda r: r.stop.stop.append("")),
    ("stop.stop[0]", InvalidRequest, lambda r: r.stop.stop.append("a" * 257)),
    ("stop.stop_token_ids", InvalidRequest, lambda r: r.stop.stop_token_ids.append(100)),
    ("stop.stop_token_ids", InvalidRequest, lambda r: r.stop.stop_token_ids.extend([1] * 65)),
    ("n", InvalidRequest, lambda r: setattr(r, "n", 0)),
    ("priority", NotServed, lambda r: setattr(r, "priority", -1)),
    ("objectives", NotServed, lambda r: r.objectives.SetInParent()),
    ("cache_salt", NotServed, lambda r: setattr(r, "cache_salt", "")),
    ("chat.tools[0]", InvalidRequest, lambda r: r.chat.MergeFrom(TOOLS)),
    ("n", InvalidRequest, lambda r: setattr(r, "n", 65)),
    ("top_logprobs", InvalidRequest, lambda r: setattr(r, "top_logprobs", 21)),
    *(
        (f"sampling.{name}", InvalidRequest, partial(set_sampling, name, value))
        for name, values in {
            "repetition_penalty": (0.0, -1.0, 100.5, math.nan, math.inf),
            "presence_penalty": (-2.1, 2.1, math.nan),
            "frequency_penalty": (-2.1, 2.1, math.nan),
        }.items()
        for value in values
    ),
    ("sampling.logit_bias", InvalidRequest, lambda r: r.sampling.logit_bias.update({100: 1.0})),
    ("sampling.logit_bias", InvalidRequest, lambda r: r.sampling.logit_bias.update({1: 100.5})),
    ("sampling.logit_bias", InvalidRequest, lambda r: r.sampling.logit_bias.update({1: math.nan})),
    ("sampling.logit_bias", InvalidRequest, lambda r: r.sampling.logit_bias.update(dict.fromkeys(range(1025), 1.0))),
    ("sampling.allowed_token_ids", InvalidRequest, lambda r: r.sampling.allowed_token_ids.append(100)),
    ("sampling.allowed_token_ids", InvalidRequest, lambda r: r.sampling.allowed_token_ids.extend([1] * 4097)),
    ("sampling.banned_token_ids", InvalidRequest, lambda r: r.sampling.banned_token_ids.append(100)),
    ("sampling.banned_token_ids", InvalidRequest, lambda r: r.sampling.banned_token_ids.extend([1] * 4097)),
    ("sampling.banned_token_ids", InvalidRequest, lambda r: r.sampling.banned_token_ids.extend(range(100))),
    ("sampling.allowed_token_ids", InvalidRequest, lambda r: allow(r, {1, 2}, {1, 2, 3})),
    ("sampling.allowed_token_ids", InvalidRequest, lambda r: allow(r, {2, 47, 97}, {2}, "a")),
    ("sampling.banned_words", InvalidRequest, lambda r: r.sampling.banned_words.extend(["a"] * 257)),
    ("sampling.banned_words[1]", InvalidRequest, lambda r: r.sampling.banned_words.extend(["a", ""])),
    ("sampling.banned_words[0]", InvalidRequest, lambda r: r.sampling.banned_words.append("a" * 257)),
    ("sampling.banned_words[1]", InvalidRequest, lambda r: r.sampling.banned_words.extend(["a", "77"])),
    ("sampling.banned_words", InvalidRequest, lambda r: r.sampling.banned_words.extend(LONG_WORDS)),
    ("stop.min_tokens", InvalidRequest, lambda r: r.stop.MergeFrom(TOO_FEW)),
]


@pytest.mark.parametrize(("field", "kind", "change"), BAD)
def test_what_cannot_be_served_is_refused_by_name(field: str, kind: type[PdserveError], change: Change) -> None:
    error = refusal(change)
    assert (type(error), error.field) == (kind, field)


def test_a_word_of_too_many_tokens_is_refused() -> None:
    verbose = ServedModel("verbose", 100, True, lambda word: frozenset({(1,) * (5 * len(word))}))
    error = refusal(lambda r: r.sampling.banned_words.extend(["short", "a" * 205]), verbose)
    assert (type(error), error.field) == (InvalidRequest, "sampling.banned_words[1]")


def test_chat_without_a_template_is_refused() -> None:
    error = refusal(lambda r: r.chat.messages.add(role="user", content="hi"), BARE)
    assert (type(error), error.field) == (InvalidRequest, "chat")


NEUTRAL: list[Change] = [
    lambda r: setattr(r, "n", 1),
    lambda r: setattr(r, "priority", 0),
    lambda r: setattr(r, "top_logprobs", 0),
    lambda r: setattr(r, "prompt_logprobs", False),
    lambda r: setattr(r.sampling, "repetition_penalty", 1.0),
    lambda r: setattr(r.sampling, "presence_penalty", 0.0),
    lambda r: setattr(r.sampling, "frequency_penalty", 0.0),
    lambda r: setattr(r.stop, "min_tokens", 0),
    lambda r: setattr(r.stop, "include_stop", False),
    lambda r: setattr(r, "stream", True),
    lambda r: setattr(r, "model", "tiny"),
]


@pytest.mark.parametrize("change", NEUTRAL)
def test_neutral_values_of_unserved_fields_are_accepted(change: Change) -> None:
    request = text_request()
    change(request)
    assert checked(request) == checked(text_request())


def leaves(descriptor: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            yield from leaves(inner, (*path, field.name))
        else:
            yield (*path, field.name)


VALUES: dict[str, object] = {"temperature": 0.5, "top_p": 0.5, "min_p": 0.5, "model": "other", "stream": False}


def set_leaf(message: Message, path: tuple[str, ...]) -> None:
    """Give the field a value that differs from its default and from its neutral value."""
    *parents, name = path
    for parent in parents:
        child = getattr(message, parent)
        message = child.add() if hasattr(child, "add") else child
    field = message.DESCRIPTOR.fields_by_name[name]
    value: object = VALUES.get(name)
    if value is None:
        texts = {FieldDescriptor.TYPE_STRING: "x", FieldDescriptor.TYPE_BOOL: name != "add_generation_prompt"}
        value = texts.get(field.type, 3)
    current = getattr(message, name)
    if hasattr(current, "append"):
        current.append(value)
    elif hasattr(current, "update"):
        current.update({3: 0.5})
    else:
        setattr(message, name, value)


@pytest.mark.parametrize("path", list(leaves(Request.DESCRIPTOR)), ids=".".join)
def test_no_field_is_ignored(path: tuple[str, ...]) -> None:
    """Every field of the contract either changes what is done, or is refused by name."""
    base = text_request()
    if path[0] == "chat":
        base.chat.messages.add(role="user", content="hi")
    request = Request.FromString(base.SerializeToString())
    set_leaf(request, path)
    try:
        result = checked(request)
    except (NotServed, InvalidRequest, UnknownModel) as error:
        assert error.field, "the refusal names the field"
        named = ".".join(path)
        assert named.startswith(error.field.split("[")[0])
    else:
        assert result != checked(base), "the field was ignored"


def test_fields_of_a_newer_contract_are_refused_at_any_depth() -> None:
    raw = text_request().SerializeToString() + b"\xfa\x3f\x01x"  # field 1023, length-delimited
    with pytest.raises(NotServed, match="#1023"):
        validate(pb.parse_generate(raw, MAX_BYTES), MODEL)
    inner = inference_pb2.SamplingParameters.FromString(b"\xfa\x3f\x01x")
    request = text_request()
    request.sampling.MergeFrom(inner)
    with pytest.raises(NotServed, match=r"sampling\.#1023"):
        checked(request)


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x1a\x02\xed\xa0"])
def test_bytes_that_do_not_parse_are_named(raw: bytes) -> None:
    """The second is a text field with half a surrogate: no UTF-8."""
    with pytest.raises(InvalidRequest, match="no GenerateRequest") as caught:
        pb.parse_generate(raw, MAX_BYTES)
    assert (caught.value.field, bool(caught.value.hint)) == ("GenerateRequest", True)


def test_an_oversize_request_is_named() -> None:
    with pytest.raises(InvalidRequest, match="11 bytes"):
        pb.parse_generate(b"x" * 11, 10)


def test_an_unset_seed_is_drawn_and_a_given_one_kept() -> None:
    request = text_request()
    assert checked(request).sampling.seed == 7
    request.sampling.ClearField("seed")
    drawn = {checked(request).sampling.seed for _ in range(100)}
    assert len(drawn) == 100
    assert max(drawn) < 1 << 53, "JSON numbers are exact up to there"


def test_sampling_arrives_as_it_was_asked_for() -> None:
    request = text_request()
    request.sampling.repetition_penalty = 1.5
    request.sampling.presence_penalty = -2
    request.sampling.frequency_penalty = 2
    request.sampling.logit_bias.update({9: -100.0, 3: 100.0})
    request.sampling.allowed_token_ids.extend([3, 9, 3])
    request.sampling.banned_token_ids.append(9)
    request.sampling.banned_words.extend(["ab", "ab"])
    request.n, request.top_logprobs, request.prompt_logprobs = 64, 20, True
    request.stop.max_tokens = request.stop.min_tokens = 5
    request.stop.include_stop = True
    valid = checked(request)
    sampling = valid.sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -2.0, 2.0)
    assert sampling.logit_bias == ((3, 100.0), (9, -100.0))
    assert (sampling.allowed_token_ids, sampling.banned_token_ids) == (frozenset({3, 9}), frozenset({9}))
    assert sampling.banned_sequences == ((47, 48), (97, 48)), "within a word and at its start, each once"
    assert (valid.n, valid.top_logprobs, valid.prompt_logprobs) == (64, 20, True)
    assert (valid.min_tokens, valid.include_stop) == (5, True)


def test_what_may_be_chosen_before_min_tokens_is_not_only_ends() -> None:
    """End-of-sequence ids are the nodes' knowledge, so this is checked with the lengths."""
    limits = LengthLimits(64, 100)
    eos = frozenset({2})

    def lengths(allowed: set[int], min_tokens: int = 0, stop_ids: tuple[int, ...] = ()) -> int:
        request = text_request()
        request.sampling.allowed_token_ids.extend(allowed)
        request.stop.min_tokens = min_tokens
        request.stop.stop_token_ids.extend(stop_ids)
        return resolve_lengths(10, checked(request), limits, eos, 100)

    assert lengths({2, 5}, min_tokens=1) == 54
    assert lengths({2}) == 54
    for allowed, stops in (({2}, ()), ({2, 5}, (5,))):
        with pytest.raises(InvalidRequest) as caught:
            lengths(allowed, min_tokens=1, stop_ids=stops)
        assert caught.value.field == "stop.min_tokens"
    with pytest.raises(InvalidRequest, match="can have 54") as caught:
        lengths(set(), min_tokens=55)
    assert caught.value.field == "stop.min_tokens"


LIMITS = LengthLimits(common=64, longest=100)


@pytest.mark.parametrize(
    ("num_prompt_ids", "max_tokens", "resolved"),
    [(1, None, 63), (63, None, 1), (64, None, 36), (99, None, 1), (99, 1, 1), (10, 90, 90), (10, 5, 5)],
)
def test_lengths_that_fit(num_prompt_ids: int, max_tokens: int | None, resolved: int) -> None:
    assert resolve_max_tokens(num_prompt_ids, max_tokens, LIMITS, "text") == resolved


@pytest.mark.parametrize(
    ("num_prompt_ids", "max_tokens", "field"),
    [(0, None, "text"), (100, None, "text"), (100, 1, "text"), (99, 2, "stop.max_tokens"), (10, 91, "stop.max_tokens")],
)
def test_lengths_that_never_fit_are_refused(num_prompt_ids: int, max_tokens: int | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_max_tokens(num_prompt_ids, max_tokens, LIMITS, "text")
    assert caught.value.field == field


POOL = LengthLimits(common=64, longest=100, pools=(PoolSize(num_blocks=12, block_size=8), PoolSize(4, 8)))


@pytest.mark.parametrize(
    ("num_prompt_ids", "max_tokens", "n", "resolved"),
    [
        (10, None, 1, 54),  # one answer is bound by its length alone
        (10, None, 2, 38),  # 12 blocks: 1 shared, 5 for each answer: 48 tokens
        (8, None, 11, 8),  # 1 shared, 1 for each answer
        (16, 32, 2, 32),
        (15, 1, 11, 1),
    ],
)
def test_answers_that_share_a_prompt_fit_a_pool_together(
    num_prompt_ids: int, max_tokens: int | None, n: int, resolved: int
) -> None:
    assert resolve_max_tokens(num_prompt_ids, max_tokens, POOL, "text", n) == resolved


@pytest.mark.parametrize(("num_prompt_ids", "max_tokens", "n"), [(10, 39, 2), (8, None, 12), (95, None, 2)])
def test_answers_that_never_fit_together_are_refused(num_prompt_ids: int, max_tokens: int | None, n: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_max_tokens(num_prompt_ids, max_tokens, POOL, "text", n)
    assert caught.value.field == "n"
