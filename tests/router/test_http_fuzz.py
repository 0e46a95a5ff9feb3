"""Whatever JSON comes, a body is a request or is refused by name: no other exception, and nothing that validation trips over."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import InvalidRequest, NotServed, PdserveError
from pdserve.router.http.chat_request import ChatFields, parse_chat
from pdserve.router.http.completion_request import CompletionFields, parse_completion
from pdserve.router.http.errors import answer_of
from pdserve.router.http.fields import HARMLESS, NEUTRAL, PARAMS, Asked
from pdserve.router.http.text_requests import parse_detokenize, parse_tokenize
from pdserve.router.validation import ServedModel, validate

MODEL = ServedModel("m", 1000, True, lambda word: frozenset({(1,)}))
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([0, 1, -1, 2**32])
)
LEAVES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["user", "text", "function"])
)
KEYS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["role", "content", "type", "text", "function", "name", "arguments", "schema", "json", "regex", "5"]
    ),
)
JSON: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
NAMES = st.sampled_from(sorted({*CompletionFields.model_fields, *ChatFields.model_fields, *NEUTRAL, *HARMLESS, "zzz"}))
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("parse", [parse_completion, parse_chat], ids=["completion", "chat"])
@given(fields=st.dictionaries(NAMES, JSON, max_size=5), is_usual=st.booleans())
@settings(max_examples=300, deadline=None)
def test_generating_bodies(
    parse: Callable[[dict[str, Any], str], Asked], fields: dict[str, Any], is_usual: bool
) -> None:
    usual: dict[str, Any] = {"prompt": "p"} if parse is parse_completion else {"messages": [USER]}
    try:
        asked = parse((usual if is_usual else {}) | fields, "label")
    except (InvalidRequest, NotServed) as error:
        assert error.field
        assert answer_of(error, PARAMS).status == 400
        return
    for call in asked.calls:
        try:
            validate(call, MODEL)
        except PdserveError as error:
            assert answer_of(error, asked.names).status in (400, 404)


@pytest.mark.parametrize("parse", [parse_tokenize, parse_detokenize], ids=["tokenize", "detokenize"])
@given(
    fields=st.dictionaries(st.sampled_from(["prompt", "messages", "tokens", "model", "tools", "zzz"]), JSON, max_size=4)
)
@settings(max_examples=150, deadline=None)
def test_text_bodies(parse: Callable[[dict[str, Any]], object], fields: dict[str, Any]) -> None:
    try:
        parse(fields)
    except (InvalidRequest, NotServed) as error:
        assert error.field
