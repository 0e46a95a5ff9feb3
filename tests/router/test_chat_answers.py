"""Answers to chats on the way of all tokens: Sequence, OutputText, detokenizer, reader; markers may be special tokens."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pdserve.core.work import SampledToken, Sampling
from pdserve.router.chat.door import checked_chat
from pdserve.router.chat.formats import AnswerFormats, choose_formats
from pdserve.router.chat.gains import AnswerGain
from pdserve.router.detokenizer import Vocabulary
from pdserve.router.output import Shown
from pdserve.router.request import ChatInput, ChatTurn, TextInput, ToolMode, ValidChat, ValidRequest
from pdserve.router.sequence import EndRules, Sequence
from pdserve.router.tokenizer import ChatSettings, TextModel, load_text_model
from tests.router.answers import Heard, heard
from tests.router.chat_templates import CHATML, HERMES, LLAMA3, MISTRAL, THINKING
from tests.router.models import byte_level_tokenizer, sentencepiece_tokenizer, vocabulary_of, write_model_folder

MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
TOOLS = tuple(json.dumps({"type": "function", "function": {"name": name}}) for name in ("get_weather", "add"))
USER = ChatTurn("user", "hi")
CHAT = ChatInput((USER,), tools=TOOLS)
CALL = '{"name": "add", "arguments": {"a": "é😀"}}'
CALLS = (("add", '{"a": "é😀"}'),)
EOS = 2


def model(folder: Path, template: str, special: tuple[str, ...] = (), chat: ChatSettings | None = None) -> TextModel:
    """A model whose vocabulary has `special` as special tokens."""
    write_model_folder(folder, template=template)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return load_text_model(str(folder), chat)


def answered(served: TextModel, chat: ChatInput, text: str, stops: tuple[str, ...] = (), size: int = 1) -> Heard:
    """What a client hears if the model answers `text` and its end token, `size` tokens at a time."""
    valid = checked_chat(chat, served.formats.tools)
    prompt_ids = served.encode(valid)
    request = ValidRequest("", "m", valid, Sampling(), None, stop=stops)
    sequence = Sequence(EndRules(10_000, frozenset(), ignore_eos=False), served.output(request, prompt_ids))
    ids = [*served.tokenizer.encode(text, add_special_tokens=False).ids, EOS]
    tokens = [SampledToken(index, token_id, 0.0) for index, token_id in enumerate(ids)]
    shown = [sequence.accept(tokens[i : i + size], frozenset({EOS})) for i in range(0, len(tokens), size)]
    assert sequence.end is not None
    if not stops:
        assert [token.token_id for step in shown for token in step.tokens] == ids, "every token is shown, each once"
    return heard(AnswerGain(step.text, step.reasoning, step.tool_calls) for step in shown)


def without_ids(whole: Heard) -> Heard:
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in whole.ids)
    assert len(set(whole.ids)) == len(whole.ids)
    return Heard(whole.content, whole.reasoning, whole.calls)


FORMS = {
    "hermes": (HERMES, f"Sure.\n<tool_call>\n{CALL}\n</tool_call>", "Sure.\n"),
    "llama3": (LLAMA3, '{"name": "add", "parameters": {"a": "é😀"}}', ""),
    "llama3 tagged": (LLAMA3, f"<|python_tag|>{CALL}", ""),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{CALL}]", ""),
    "mistral args": (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": "é😀"}', ""),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("special", [(), MARKERS], ids=["markers are text", "markers are special tokens"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_come_through_whatever_tokens_spell_them(
    tmp_path: Path, form: str, special: tuple[str, ...], size: int
) -> None:
    template, text, content = FORMS[form]
    chat = ChatSettings(tools=form.split(maxsplit=1)[0])
    served = model(tmp_path / "m", template, special, chat)
    assert without_ids(answered(served, CHAT, text, size=size)) == Heard(content, "", CALLS)


def test_without_tools_or_with_hidden_ones_nothing_is_parsed(tmp_path: Path) -> None:
    served = model(tmp_path / "m", HERMES)
    text = f"<tool_call>{CALL}</tool_call>"
    for chat in (
        ChatInput((USER,)),
        ChatInput((USER,), tools=TOOLS, tool_mode=ToolMode.NONE),
        ChatInput((USER,), tools=TOOLS, parse_output=False),
    ):
        assert answered(served, chat, text) == Heard(text)


def test_raw_output_shows_the_markers_too(tmp_path: Path) -> None:
    served = model(tmp_path / "m", MISTRAL, MARKERS)
    text = f"[TOOL_CALLS] [{CALL}]"
    assert answered(served, ChatInput((USER,), tools=TOOLS, parse_output=False), text) == Heard(text)


def test_without_tools_markers_of_calls_stay_hidden(tmp_path: Path) -> None:
    served = model(tmp_path / "m", MISTRAL, MARKERS)
    assert answered(served, ChatInput((USER,)), "a[TOOL_CALLS]b").content == "ab"


def test_other_special_tokens_stay_hidden(tmp_path: Path) -> None:
    served = model(tmp_path / "m", MISTRAL, MARKERS)
    assert answered(served, CHAT, f"a<|im_start|>b<|python_tag|>[TOOL_CALLS] [{CALL}]").content == "ab"


@pytest.mark.parametrize("special", [(), MARKERS])
def test_reasoning_that_the_template_opens_or_the_model(tmp_path: Path, special: tuple[str, ...]) -> None:
    opened = model(tmp_path / "opened", THINKING, special)
    assert answered(opened, ChatInput((USER,)), "why\n</think>\n\nso") == Heard("so", "why")
    unopened = model(tmp_path / "unopened", CHATML + "{# <think> </think> #}", special)
    assert answered(unopened, ChatInput((USER,)), "<think>\nwhy\n</think>\n\nso") == Heard("so", "why")
    assert answered(unopened, ChatInput((ChatTurn("user", "<think>"),)), "so") == Heard("so")


def test_a_template_that_closes_the_reasoning_leaves_none(tmp_path: Path) -> None:
    served = model(tmp_path / "m", HERMES)
    chat = ChatInput((USER,), tools=TOOLS, template_arguments='{"enable_thinking": false}')
    assert answered(served, chat, "so") == Heard("so")


def test_a_continued_message_may_have_opened_the_reasoning(tmp_path: Path) -> None:
    served = model(tmp_path / "m", THINKING)
    inside = ChatInput((USER, ChatTurn("assistant", "<think>\nbec")), continue_final_message=True)
    assert answered(served, inside, "ause</think>so") == Heard("so", "ause")
    behind = ChatInput((USER, ChatTurn("assistant", "<think>\na</think>b")), continue_final_message=True)
    assert answered(served, behind, "c") == Heard("c")


def test_stop_texts_are_looked_for_in_all_of_the_text(tmp_path: Path) -> None:
    served = model(tmp_path / "m", HERMES)
    whole = answered(served, CHAT, f"a <tool_call>{CALL}</tool_call> STOP b", stops=("STOP",))
    assert (whole.content, whole.calls) == ("a ", CALLS)
    cut = answered(served, CHAT, f"a <tool_call>{CALL}</tool_call>", stops=('"arg',))
    assert (cut.content, cut.calls) == ('a <tool_call>{"name": "add", ', ())


@pytest.mark.parametrize(
    ("template", "tokens", "formats"),
    [
        (CHATML, (), AnswerFormats()),
        (HERMES, (), AnswerFormats("hermes", thinks=True)),
        (LLAMA3, ("<|python_tag|>",), AnswerFormats("llama3")),
        (LLAMA3, (), AnswerFormats()),
        (MISTRAL, (), AnswerFormats("mistral")),
        (THINKING, (), AnswerFormats(None, thinks=True)),
        (CHATML, ("</think>", "[TOOL_CALLS]"), AnswerFormats(None, thinks=True)),
        ("{{ tools }}<tool_call><function=", (), AnswerFormats()),
    ],
)
def test_formats_are_chosen_by_template_and_vocabulary(
    template: str, tokens: tuple[str, ...], formats: AnswerFormats
) -> None:
    assert choose_formats("auto", "auto", template, tokens) == formats
    assert choose_formats("none", "none", template, tokens) == AnswerFormats()
    assert choose_formats("mistral", "think", template, tokens) == AnswerFormats("mistral", thinks=True)


def test_the_choice_is_told_in_words(tmp_path: Path) -> None:
    assert model(tmp_path / "a", CHATML).chat_choice == "tool calls are not read, reasoning is not read"
    assert model(tmp_path / "b", HERMES).chat_choice == "tool calls as hermes, reasoning as <think>"
    bare = load_text_model(str(write_model_folder(tmp_path / "c", template=None)))
    assert bare.chat_choice == "not served, the model has no chat template"


def test_text_prompts_are_never_parsed(tmp_path: Path) -> None:
    served = model(tmp_path / "m", THINKING)
    request = ValidRequest("", "m", TextInput("<think>"), Sampling(), None)
    output = served.output(request, served.encode(TextInput("<think>")))
    ids = served.tokenizer.encode("a</think>b").ids
    assert "".join(output.push(SampledToken(i, token, 0.0)).text for i, token in enumerate(ids)) == "a</think>b"


def marked(tokenizer: Tokenizer) -> tuple[Tokenizer, Vocabulary, frozenset[int]]:
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    vocabulary = vocabulary_of(tokenizer)
    return tokenizer, vocabulary, vocabulary.special_ids_of(["[TOOL_CALLS]", "[ARGS]", "no token"])


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_shown_markers_stand_where_one_shot_decoding_has_them(
    make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokenizer, vocabulary, shown = marked(make())
    top = tokenizer.get_vocab_size(with_added_tokens=True)
    ids = data.draw(st.lists(st.one_of(st.integers(0, top - 1), st.sampled_from(sorted(shown))), max_size=16))
    detokenizer = vocabulary.detokenizer(shown)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.finish()
    kept = [token_id for token_id in ids if token_id in shown or token_id not in vocabulary.special_ids]
    assert text == tokenizer.decode(kept, skip_special_tokens=False)
    assert len(shown) == 2


def test_shown_is_truthy_for_reasoning_and_calls_alone() -> None:
    assert Shown(reasoning="r")
    assert not Shown()
    assert ValidChat((USER,)).shown_tools == ()
