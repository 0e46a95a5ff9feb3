"""Tool calls and reasoning out of text: the formats as documented, what is malformed, and every way of cutting the text."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.router.chat.call_format import MAX_UNTOLD_CHARS
from pdserve.router.chat.json_scan import JsonScan, Step, escaped
from tests.router.answers import Heard, read, reader_of

WEATHER = ("get_weather", '{"city": "Paris", "days": 2}')
ADD = ("add", '{"a": [1, -2.5e3], "b": {"c": null}}')


def call_text(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def answer(form: str, text: str, *, think: bool | None = None) -> Heard:
    return read(reader_of(form, think=think), [text])


WELL_FORMED = [
    ("hermes", f"<tool_call>\n{call_text(*WEATHER)}\n</tool_call>", "", (WEATHER,)),
    ("hermes", f"<tool_call>{call_text(*WEATHER)}</tool_call>\n<tool_call>{call_text(*ADD)}</tool_call>\n", "", (WEATHER, ADD)),
    ("hermes", f"Let me look.\n<tool_call>\n{call_text(*WEATHER)}\n</tool_call>", "Let me look.\n", (WEATHER,)),
    ("hermes", f"<tool_call>{call_text(*WEATHER)}</tool_call> Done.", " Done.", (WEATHER,)),
    ("hermes", f'<tool_call>{{"arguments": {ADD[1]}, "name": "add"}}</tool_call>', "", (ADD,)),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {ADD[1]}, "note": "text", "n": 1}}</tool_call>', "", (ADD,)),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", (("now", "{}"),)),
    ("hermes", f"<tool_call>{call_text(*ADD)}", "", (ADD,)),
    ("hermes", f"<tool_call>{call_text(*ADD)}\n<tool_call>{call_text(*WEATHER)}", "", (ADD, WEATHER)),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"t": "</tool_call> {\\"}"}}</tool_call>', "",
     (("add", '{"t": "</tool_call> {\\"}"}'),)),
    ("hermes", "2 < 3 and <tool_cal> is no marker", "2 < 3 and <tool_cal> is no marker", ()),
    ("llama3", call_text(*WEATHER, key="parameters"), "", (WEATHER,)),
    ("llama3", f'{{"type": "function", "name": "add", "parameters": {ADD[1]}}}', "", (ADD,)),
    ("llama3", f"<|python_tag|>{call_text(*WEATHER, key='parameters')}", "", (WEATHER,)),
    ("llama3", f"{call_text(*WEATHER)}; {call_text(*ADD)}", "", (WEATHER, ADD)),
    ("llama3", f"{call_text(*WEATHER)}\n{call_text(*ADD)}", "", (WEATHER, ADD)),
    ("llama3", f"I look. <|python_tag|>{call_text('other', '{}')}", "I look. ", (("other", "{}"),)),
    ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', ()),
    ("llama3", f"As JSON: {call_text(*WEATHER)}", f"As JSON: {call_text(*WEATHER)}", ()),
    ("llama3", '<|python_tag|>brave_search.call(query="x")', '<|python_tag|>brave_search.call(query="x")', ()),
    ("mistral", f"[TOOL_CALLS] [{call_text(*WEATHER)}, {call_text(*ADD)}]", "", (WEATHER, ADD)),
    ("mistral", f"[TOOL_CALLS][{call_text(*WEATHER)}] ok", " ok", (WEATHER,)),
    ("mistral", f"[TOOL_CALLS]{WEATHER[0]}{WEATHER[1]}[TOOL_CALLS]{ADD[0]}[ARGS]{ADD[1]}", "", (WEATHER, ADD)),
    ("mistral", f"Well.[TOOL_CALLS]{ADD[0]}[CALL_ID]abcDEF123[ARGS]{ADD[1]}", "Well.", (ADD,)),
    ("mistral", "[1, 2] and [TOOL_CALLS", "[1, 2] and [TOOL_CALLS", ()),
]  # fmt: skip

MALFORMED = [
    ("hermes", "<tool_call>get_weather(Paris)</tool_call>"),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "Paris"}</tool_call>'),
    ("hermes", '<tool_call>{"name": get_weather, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 7}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", '<tool_call>{"name"'),
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "na'),
    ("llama3", "<|python_tag|>"),
    ("llama3", '{"name": "get_weather", "parameters": [1]}'),
    ("llama3", '{"parameters": {"a": 1}, "name": "other"}'),
    ("llama3", "{"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS] [1]"),
    ("mistral", "[TOOL_CALLS] I will call add."),
    ("mistral", "[TOOL_CALLS]add[ARG]{}"),
    ("mistral", "[TOOL_CALLS]add[ARGS]"),
    ("mistral", "[TOOL_CALLS][ARGS]{}"),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), WELL_FORMED)
def test_documented_forms_are_read(form: str, text: str, content: str, calls: tuple[tuple[str, str], ...]) -> None:
    whole = answer(form, text)
    assert (whole.content, whole.calls) == (content, calls)
    assert all(json.loads(arguments) is not None for _, arguments in whole.calls)


@pytest.mark.parametrize(("form", "text"), MALFORMED)
def test_what_is_no_call_is_content_and_nothing_is_lost(form: str, text: str) -> None:
    assert answer(form, text) == Heard(text)


def test_a_call_behind_a_malformed_one_is_found() -> None:
    good = f"<tool_call>{call_text(*ADD)}</tool_call>"
    whole = answer("hermes", f"<tool_call>oops</tool_call><tool_call>\n<tool_call>{good}")
    assert whole.content == "<tool_call>oops</tool_call><tool_call>\n<tool_call>"
    assert whole.calls == (ADD,)


def test_a_told_call_that_goes_wrong_ends_there_and_the_rest_is_content() -> None:
    whole = answer("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1 oops}</tool_call>')
    assert (whole.calls, whole.content) == ((("add", '{"a": 1 '),), "oops}")
    whole = answer("hermes", f"<tool_call>{call_text(*ADD)}}}</tool_call><tool_call>{call_text(*WEATHER)}</tool_call>")
    assert (whole.calls, whole.content) == ((ADD, WEATHER), "}")
    whole = answer("mistral", '[TOOL_CALLS]add[ARGS]{"a": x}')
    assert (whole.calls, whole.content) == ((("add", '{"a": '),), "x}")


def test_an_answer_that_breaks_off_leaves_the_arguments_told_so_far() -> None:
    whole = answer("hermes", '<tool_call>{"name": "add", "arguments": {"a": "b')
    assert whole == Heard("", "", (("add", '{"a": "b'),), ("call00000",))


def test_raw_line_breaks_in_strings_are_told_as_json() -> None:
    whole = answer("hermes", '<tool_call>{"name": "add", "arguments": {"t": "a\nb\x01"}}</tool_call>')
    assert json.loads(whole.calls[0][1]) == {"t": "a\nb\x01"}


def test_mistrals_own_call_id_is_kept() -> None:
    assert answer("mistral", "[TOOL_CALLS]add[CALL_ID]abcDEF123[ARGS]{}").ids == ("abcDEF123",)


REASONED = [
    (False, "<think>\nwhy\n</think>\n\nso", "why", "so"),
    (False, "\n <think>why</think>", "why", ""),
    (True, "why\n\n because </think>\nso", "why\n\n because", "so"),
    (True, "cut off </thi", "cut off </thi", ""),
    (False, "so <think>no</think>", "", "so <think>no</think>"),
    (False, "\n\nso", "", "\n\nso"),
    (False, "<thin", "", "<thin"),
    (True, "</think>so", "", "so"),
    (True, " a < b </think>  so", "a < b", "  so"),
]


@pytest.mark.parametrize(("is_open", "text", "reasoning", "content"), REASONED)
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_reasoning_is_told_apart(is_open: bool, text: str, reasoning: str, content: str, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert read(reader_of(None, think=is_open), pieces) == Heard(content, reasoning)


def test_a_call_in_the_reasoning_is_none() -> None:
    whole = answer(
        "hermes",
        f"<think><tool_call>{call_text(*ADD)}</tool_call></think><tool_call>{call_text(*WEATHER)}",
        think=False,
    )
    assert (whole.calls, whole.content) == ((WEATHER,), "")
    assert whole.reasoning == f"<tool_call>{call_text(*ADD)}</tool_call>"


scraps = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<think>",
            "</think>",
        ),
        *(
            '{"name": "add", ',
            '"name": "get_weather"',
            '"arguments": {',
            '"parameters": {"a": ',
            "}",
            "}}",
            "]",
            "[",
            ";",
            ",",
        ),
        *(
            call_text(*WEATHER),
            call_text(*ADD, key="parameters"),
            "add",
            '"',
            "\\",
            "\n",
            " ",
            "text",
            "<",
            "{",
            "1",
            "é",
        ),
    ]
)
texts = st.lists(scraps, max_size=14).map("".join)


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
@given(text=texts, think=st.sampled_from([None, True, False]), data=st.data())
@settings(max_examples=300, deadline=None)
def test_cutting_the_text_changes_nothing(form: str, text: str, think: bool | None, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(reader_of(form, think=think), [text])
    assert read(reader_of(form, think=think), pieces) == whole
    assert read(reader_of(form, think=think), list(text)) == whole


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
@given(text=st.text("<>[]{}toolcaTOOLCAS_/|pyhng \n", max_size=60))
@settings(max_examples=300, deadline=None)
def test_text_without_calls_comes_through_whole(form: str, text: str) -> None:
    assert read(reader_of(form), list(text)).content == text


@pytest.mark.parametrize(
    ("form", "opener"), [("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("llama3", "<|python_tag|>")]
)
@given(text=st.text("<[tTo|p_ a", max_size=40))
@settings(max_examples=300, deadline=None)
def test_what_waits_is_a_beginning_of_a_marker_or_white_space_at_the_start(form: str, opener: str, text: str) -> None:
    reader, shown = reader_of(form), ""
    for count, char in enumerate(text, 1):
        shown += reader.push(char).content
        held = text[len(shown) : count]
        assert text.startswith(shown)
        assert not held or opener.startswith(held.lstrip() if not shown else held)


@pytest.mark.parametrize(
    ("form", "text", "shown"),
    [
        ("hermes", "a <", "a "),
        ("hermes", "a <b", "a <b"),
        ("hermes", "a\n", "a\n"),
        ("llama3", "a", "a"),
        ("llama3", "a <|python", "a "),
        ("mistral", "a [TOOL", "a "),
        ("mistral", "a [TOAL", "a [TOAL"),
        ("mistral", "[TOOL_CALLS]add me", "[TOOL_CALLS]add me"),
        ("mistral", "[TOOL_CALLS]add[ARX", "[TOOL_CALLS]add[ARX"),
    ],
)
def test_only_what_may_be_a_marker_waits(form: str, text: str, shown: str) -> None:
    assert reader_of(form).push(text).content == shown


def test_a_call_is_told_with_the_first_brace_of_its_arguments_and_then_as_it_comes() -> None:
    reader = reader_of("hermes")
    assert not reader.push('<tool_call>{"name": "add", "arguments": ')
    (told,) = reader.push("{").tool_calls
    assert (told.name, told.arguments) == ("add", "{")
    assert [reader.push(char).tool_calls[0].arguments for char in '"a": 1}'] == list('"a": 1}')
    assert not reader.push("}</tool_call>")


@pytest.mark.parametrize("text", ['<tool_call>{"arguments": {"a": "', "<tool_call>" + " " * 9])
def test_a_call_that_is_never_told_is_not_kept_for_ever(text: str) -> None:
    reader, long = reader_of("hermes"), text + " " * MAX_UNTOLD_CHARS
    shown = "".join(reader.push(long[i : i + 1000]).content for i in range(0, len(long), 1000))
    assert shown == long[: len(shown)]
    assert len(long) - len(shown) < 1000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def scanned(text: str) -> tuple[Step, int]:
    """The last step and how many characters it took; a number is ended by a space."""
    scan = JsonScan()
    for count, char in enumerate(text + " ", 1):
        step = scan.feed(char)
        if step is not Step.MORE:
            return step, count
    return Step.MORE, len(text)


@given(json_values, st.booleans(), st.sampled_from([None, 1]))
@settings(max_examples=400, deadline=None)
def test_json_ends_where_json_ends(value: object, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    step, count = scanned(text)
    assert (step, count) in ((Step.DONE, len(text)), (Step.PAST, len(text) + 1))


@given(json_values.map(json.dumps), st.integers(0, 10_000), st.sampled_from([*'{}[]",:\\', "", "x", "1", "\n", "-"]))
@settings(max_examples=600, deadline=None)
@example("[1]", 1, "0")
def test_json_with_a_fault_is_told_from_json_as_python_does(text: str, where: int, scrap: str) -> None:
    where %= len(text)
    text = text[:where] + scrap + text[where + 1 :]
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip(" \t\n\r"))
        expected: int | None = end + len(text) - len(text.lstrip(" \t\n\r"))
    except ValueError:
        expected = None
    step, count = scanned(text)
    if expected is None:
        assert step in (Step.FAULT, Step.MORE)
    elif step is Step.DONE:
        assert count == expected
    elif step is Step.FAULT:
        # Python takes "01" for 0 and rest, or reads NaN; a whole value that ends at once is ours too.
        assert json.loads(text[:expected], strict=False) is not None
        assert text[:expected].lstrip()[:1] in "-0123456789N"


@given(st.text(max_size=20))
def test_escaped_text_is_json(text: str) -> None:
    raw = json.dumps(text, ensure_ascii=False)[1:-1]
    assert json.loads('"' + "".join(map(escaped, raw)) + '"') == text
