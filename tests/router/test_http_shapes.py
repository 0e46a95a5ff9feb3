"""The forms of answers that scripted nodes do not easily make: tool calls, reasoning, endless logarithms, echoes of ids."""

from typing import Any, cast

import pytest

from pdserve.core.work import FinishReason, SampledToken, Sampling
from pdserve.router.chat.gains import ToolCallGain
from pdserve.router.http.chat_shape import ChatShape
from pdserve.router.http.completion_shape import CompletionShape
from pdserve.router.http.fields import Wishes
from pdserve.router.http.shape import LEAST_LOGPROB, PromptView, TokenFormat, finish_of
from pdserve.router.http.token_texts import TokenTexts
from pdserve.router.instructions import Finish
from pdserve.router.output import PromptToken, Shown
from pdserve.router.request import TokenInput, ValidRequest
from tests.router.models import byte_level_tokenizer, sentencepiece_tokenizer, vocabulary_of

TEXTS = TokenTexts(vocabulary_of(byte_level_tokenizer()))
REQUEST = ValidRequest("l", "m", TokenInput((5,)), Sampling(), None)
STOP = Finish(0, FinishReason.STOP, stop_token_id=2)
CALLS = (
    Shown(text="let me see "),
    Shown(reasoning="hm"),
    Shown(tool_calls=(ToolCallGain(0, "id0", "f", '{"a"'),)),
    Shown(tool_calls=(ToolCallGain(0, arguments=": 1}"), ToolCallGain(1, "id1", "g", "{}"))),
)
Json = dict[str, Any]


def chat(wishes: Wishes | None = None) -> ChatShape:
    return ChatShape(TokenFormat(TEXTS, wishes or Wishes()))


def delta(choice: object) -> Json:
    return cast("Json", cast("Json", choice)["delta"])


def test_streamed_calls_are_openais_deltas() -> None:
    shape = chat()
    deltas = [delta(shape.gained(0, shown)) for shown in CALLS]
    assert deltas == [
        {"content": "let me see "},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "id": "id0", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": ": 1}"}},
                {"index": 1, "id": "id1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ]
        },
    ]
    assert shape.ended(0, STOP, REQUEST)["finish_reason"] == "tool_calls"
    assert shape.ended(1, STOP, REQUEST)["finish_reason"] == "stop", "another choice called nothing"


def test_a_whole_answer_has_whole_calls() -> None:
    calls = tuple(call for shown in CALLS for call in shown.tool_calls)
    choice = chat().whole(0, Shown("let me see ", reasoning="hm", tool_calls=calls), STOP, PromptView(REQUEST, ()))
    assert choice["message"] == {
        "role": "assistant",
        "content": "let me see ",
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "id0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "id1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"
    alone = chat().whole(0, Shown(tool_calls=calls), STOP, PromptView(REQUEST, ()))
    assert cast("Json", alone["message"])["content"] is None


def test_an_answer_that_was_cut_short_in_a_call_says_so() -> None:
    shape = chat()
    shape.gained(0, CALLS[2])
    assert shape.ended(0, Finish(0, FinishReason.LENGTH), REQUEST)["finish_reason"] == "length"


def test_minus_infinity_becomes_a_number_that_json_has() -> None:
    token = SampledToken(0, 5, float("-inf"), top=((6, float("-inf")),))
    shown = Shown("x", (token,))
    scores = cast("Json", chat(Wishes(num_top=1)).gained(0, shown)["logprobs"])
    assert scores["content"][0]["logprob"] == LEAST_LOGPROB
    assert scores["content"][0]["top_logprobs"][0]["logprob"] == LEAST_LOGPROB
    shape = CompletionShape(TokenFormat(TEXTS, Wishes(num_top=1)))
    assert cast("Json", shape.gained(0, shown)["logprobs"])["token_logprobs"] == [LEAST_LOGPROB]


def test_ids_are_echoed_as_their_text() -> None:
    ids = tuple(byte_level_tokenizer().encode("日本 é").ids)
    shape = CompletionShape(TokenFormat(TEXTS, Wishes(echo=True)))
    choice = shape.opening(0, PromptView(REQUEST, ids))
    assert choice is not None
    assert choice["text"] == "日本 é", "characters that several tokens make are whole"


def test_prompt_scores_name_ranks() -> None:
    tokens = TokenFormat(TEXTS, Wishes(num_prompt_top=2))
    scores = [PromptToken(5, None), PromptToken(6, -1.0, ((7, -0.5), (6, -1.0))), PromptToken(8, -3.0, ((7, -0.5),))]
    first, second, third = tokens.prompt_logprobs(scores)
    assert first is None
    assert [(key, cast("Json", value)["rank"]) for key, value in (second or {}).items()] == [("7", 1), ("6", 2)]
    assert [(key, cast("Json", value)["rank"]) for key, value in (third or {}).items()] == [("7", 1), ("8", None)]


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (Finish(0, FinishReason.LENGTH), ("length", None)),
        (Finish(0, FinishReason.STOP_SEQUENCE, stop="x"), ("stop", "x")),
        (Finish(0, FinishReason.STOP, stop_token_id=2), ("stop", None)),
        (Finish(0, FinishReason.STOP, stop_token_id=9), ("stop", 9)),
    ],
)
def test_every_end_has_its_reason(finish: Finish, reason: tuple[str, object]) -> None:
    request = ValidRequest("l", "m", TokenInput((5,)), Sampling(), None, stop_token_ids=frozenset({9}))
    assert finish_of(finish, request) == reason


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("▁the", [b" the"]), ("日", ["日".encode()]), ("<0x41>", [b"A"]), ("</s>", [b"</s>"])],
)
def test_pieces_of_other_vocabularies(text: str, pieces: list[bytes]) -> None:
    tokenizer = sentencepiece_tokenizer()
    texts = TokenTexts(vocabulary_of(tokenizer))
    token_id = tokenizer.token_to_id(text)
    assert token_id is not None
    assert [texts.bytes_of(token_id)] == pieces
