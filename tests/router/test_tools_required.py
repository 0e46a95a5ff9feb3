"""A tool that must be called: the prompt's opening, the grammar of what follows, and how it is read."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jsonschema
import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.work import GrammarKind
from pdserve.grammar.compiling import compile_grammar
from pdserve.grammar.vocabulary import GrammarVocabulary, load_vocabulary
from pdserve.router.chat.door import checked_chat
from pdserve.router.chat.formats import AnswerFormats
from pdserve.router.chat.tool_grammar import tool_grammar
from pdserve.router.pb import parse_generate
from pdserve.router.request import ChatInput, ChatTurn, ToolMode, ValidChat, ValidRequest
from pdserve.router.tokenizer import load_text_model
from pdserve.router.validation import ServedModel, validate
from pdserve.v1 import inference_pb2
from tests.router.answers import Heard, read
from tests.router.chat_templates import HERMES, LLAMA3, MISTRAL, THINKING
from tests.router.models import byte_level_tokenizer, write_model_folder

USER = ChatTurn("user", "hi")
POINT = {
    "type": "object",
    "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
    "required": ["from", "to"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2}},
}
UNIT = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
PARAMETERS = {"move": POINT, "weather": UNIT}
TOOLS = tuple(
    json.dumps({"type": "function", "function": {"name": name, "parameters": parameters}})
    for name, parameters in PARAMETERS.items()
)


def chat(mode: ToolMode, name: str = "", tools: tuple[str, ...] = TOOLS) -> ValidChat:
    return checked_chat(ChatInput((USER,), tools=tools, tool_mode=mode, tool_name=name))


@cache
def vocabulary() -> GrammarVocabulary:
    import tempfile

    folder = write_model_folder(Path(tempfile.mkdtemp()) / "m")
    return load_vocabulary(folder, byte_level_tokenizer().get_vocab_size(with_added_tokens=True), [2])


def walk(given: ValidChat, tool_format: str | None, seed: int) -> str:
    """A random answer that the grammar allows, token by token until it must end."""
    grammar = tool_grammar(given, tool_format)
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    matcher = compile_grammar(grammar, vocabulary()).start.deep_copy()
    tokenizer, chance = byte_level_tokenizer(), random.Random(seed)
    text = b""
    for _ in range(500):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(vocabulary().size) if mask[i // 8] >> (i % 8) & 1]
        assert allowed, matcher.get_error()
        if 2 in allowed:
            return text.decode()
        # White space may go on for long; it is not what is tested.
        solid = [i for i in allowed if tokenizer.decode([i]).strip()] or allowed
        token_id = chance.choice(solid)
        matcher.consume_token(token_id)
        text += tokenizer.decode([token_id]).encode()
    raise AssertionError("the answer does not end")


@pytest.mark.parametrize("tool_format", [None, "hermes", "llama3", "mistral"])
@pytest.mark.parametrize(
    ("mode", "name", "names"),
    [(ToolMode.REQUIRED, "", {"move", "weather"}), (ToolMode.NAMED, "weather", {"weather"}), (ToolMode.NAMED, "move", {"move"})],
)  # fmt: skip
def test_every_allowed_answer_is_one_call_that_fits_its_schema(
    tool_format: str | None, mode: ToolMode, name: str, names: set[str]
) -> None:
    given = chat(mode, name)
    called = set()
    for seed in range(12):
        text = walk(given, tool_format, seed)
        reader = AnswerFormats(tool_format, thinks=True).reader(given, "")
        assert reader is not None
        whole = read(reader, list(text))
        assert (whole.content, whole.reasoning, len(whole.calls)) == ("", "", 1)
        ((tool, arguments),) = whole.calls
        jsonschema.validate(json.loads(arguments), PARAMETERS[tool])
        called.add(tool)
    assert called == names


def test_a_single_required_tool_keeps_its_references() -> None:
    given = chat(ToolMode.REQUIRED, tools=TOOLS[:1])
    call = json.loads(walk(given, "hermes", 1))
    jsonschema.validate(call["arguments"], POINT)


@pytest.mark.parametrize("mode", [ToolMode.AUTO, ToolMode.NONE])
def test_an_answer_that_need_not_call_is_free(mode: ToolMode) -> None:
    assert tool_grammar(chat(mode), "hermes") is None


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (HERMES, "<|im_start|>assistant\n<tool_call>\n"),
        (LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        (MISTRAL, "[INST] hi[/INST][TOOL_CALLS] ["),
        (THINKING + "{{ tools }}", "<|im_start|>assistant\n<think>\n"),
        ("{{ tools }}<think>{# </think> #}", "<think>\n</think>\n\n"),
    ],
)
def test_the_prompt_opens_the_call(tmp_path: Path, template: str, opening: str) -> None:
    served = load_text_model(str(write_model_folder(tmp_path / "m", template=template)))
    prompts = [
        served.tokenizer.decode(list(served.encode(chat(mode))), skip_special_tokens=False)
        for mode in (ToolMode.REQUIRED, ToolMode.AUTO)
    ]
    assert prompts[0].startswith(prompts[1])
    if template.startswith(THINKING):
        assert "</think>" not in prompts[0]
    else:
        assert prompts[0].endswith(opening)


def test_a_call_that_was_cut_short_is_told_as_far_as_it_goes() -> None:
    reader = AnswerFormats("hermes").reader(chat(ToolMode.REQUIRED), "")
    assert reader is not None
    whole = read(reader, ['{"name": "weather", "arguments": {"unit": "'])
    assert Heard(whole.content, "", whole.calls) == Heard("", "", (("weather", '{"unit": "'),))


@pytest.mark.parametrize("depth", [50, 300, 600, 900])
def test_deeply_nested_parameters_are_served_or_refused_by_name(depth: int) -> None:
    nested = '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {nested}}}}}'
    try:
        tool_grammar(chat(ToolMode.REQUIRED, tools=(tool,)), "hermes")
    except InvalidRequest as error:
        assert error.field in ("chat.tools", "chat.tools[0]")
        assert depth > 50


COMBINED: list[tuple[str, Callable[[inference_pb2.GenerateRequest], object]]] = [
    ("chat.tool_choice", lambda r: setattr(r.structured_output, "regex", "a")),
    ("stop.min_tokens", lambda r: setattr(r.stop, "min_tokens", 1)),
    ("stop.ignore_eos", lambda r: setattr(r.stop, "ignore_eos", True)),
    ("sampling.allowed_token_ids", lambda r: r.sampling.allowed_token_ids.append(1)),
    ("chat.tool_choice.mode", lambda r: setattr(r.chat.tool_choice, "mode", 77)),
    ("chat.tool_choice.name", lambda r: setattr(r.chat.tool_choice, "name", "move")),
    ("chat.tools", lambda r: r.chat.tools.append(tool_of("x" * 250_000))),
]


def tool_of(text: str) -> str:
    return json.dumps({"type": "function", "function": {"name": "f", "parameters": {"description": text}}})


def request() -> inference_pb2.GenerateRequest:
    made = inference_pb2.GenerateRequest()
    made.chat.messages.add(role="user", content="hi")
    made.chat.tools.extend(TOOLS)
    made.chat.tool_choice.mode = inference_pb2.ToolChoice.MODE_REQUIRED
    return made


def validated(made: inference_pb2.GenerateRequest) -> ValidRequest:
    model = ServedModel("m", 300, has_chat_template=True, encode_word=lambda _: frozenset(), tool_format="hermes")
    return validate(parse_generate(made.SerializeToString(), 1 << 20), model)


def test_a_call_that_must_be_made_binds_the_answer() -> None:
    made = request()
    assert validated(made).sampling.grammar == tool_grammar(chat(ToolMode.REQUIRED), "hermes")
    made.chat.tool_choice.mode = inference_pb2.ToolChoice.MODE_AUTO
    assert validated(made).sampling.grammar is None


@pytest.mark.parametrize(("field", "change"), COMBINED)
def test_what_cannot_go_with_a_call_that_must_be_made_is_named(
    field: str, change: Callable[[inference_pb2.GenerateRequest], object]
) -> None:
    made = request()
    change(made)
    with pytest.raises(InvalidRequest) as caught:
        validated(made)
    assert caught.value.field == field
