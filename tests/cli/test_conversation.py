"""What a conversation keeps and forgets, what lines mean, and how an answer is written."""

import io
from dataclasses import replace

import pytest

from pdserve.cli.answer_display import AnswerDisplay
from pdserve.cli.chat import stats_line
from pdserve.cli.conversation import Command, Conversation, Line, fits, parse_line
from pdserve.cli.request_options import option_of
from pdserve.cli.scores_view import scores_view
from pdserve.client import Answer, Delta, Finished, PromptScores, ScoredToken, ToolCallDelta, Turn
from pdserve.client.pb import summary_from_pb
from pdserve.core.errors import InvalidRequest
from pdserve.core.work import FinishReason
from tests.cli.test_views import shown as shown_view
from tests.client.stub_router import SUMMARY


def said(conversation: Conversation) -> list[tuple[str, str | None]]:
    return [(turn.role, turn.content) for turn in conversation.chat().turns]


def test_history_is_kept_with_the_system_message_first() -> None:
    conversation = Conversation("be brief", '{"enable_thinking": false}')
    conversation.ask("a")
    conversation.answered("A", "hm")
    conversation.ask("b")
    assert conversation.chat().turns == (
        Turn("system", "be brief"),
        Turn("user", "a"),
        Turn("assistant", "A", reasoning="hm"),
        Turn("user", "b"),
    )
    assert conversation.chat().template_arguments == '{"enable_thinking": false}'


def test_question_without_an_answer_leaves_nothing_behind_and_can_be_asked_again() -> None:
    conversation = Conversation()
    assert not conversation.ask_again()
    conversation.ask("a")
    conversation.answered("A")
    conversation.ask("a")
    conversation.answered("")
    assert len(conversation) == 1
    assert conversation.ask_again()
    assert said(conversation) == [("user", "a"), ("assistant", "A"), ("user", "a")]


def test_asking_again_replaces_the_last_answer_only() -> None:
    conversation = Conversation()
    for question in ("a", "b"):
        conversation.ask(question)
        conversation.answered(question.upper())
    assert conversation.ask_again()
    assert said(conversation) == [("user", "a"), ("assistant", "A"), ("user", "b")]


def test_forgetting_begins_with_the_oldest_and_never_takes_the_question() -> None:
    conversation = Conversation("be brief")
    for question in ("a", "b"):
        conversation.ask(question)
        conversation.answered(question.upper())
    conversation.ask("c")
    assert conversation.drop_oldest()
    assert said(conversation) == [("system", "be brief"), ("user", "b"), ("assistant", "B"), ("user", "c")]
    assert conversation.drop_oldest()
    assert not conversation.drop_oldest()
    assert said(conversation) == [("system", "be brief"), ("user", "c")]


def test_reset_keeps_the_system_message_unless_there_is_another() -> None:
    conversation = Conversation("be brief")
    conversation.ask("a")
    conversation.answered("A")
    conversation.reset()
    assert not conversation.ask_again()
    conversation.ask("b")
    assert said(conversation) == [("system", "be brief"), ("user", "b")]
    conversation.reset("")
    conversation.ask("c")
    assert said(conversation) == [("user", "c")]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("hello\n", Line("hello")),
        ("  \n", Line("")),
        ("/retry", Line("", Command.RETRY)),
        ("/system be  brief\n", Line("be  brief", Command.SYSTEM)),
        ("//usr is a folder", Line("/usr is a folder")),
    ],
)
def test_line_is_text_or_a_command(line: str, meant: Line) -> None:
    assert parse_line(line) == meant


def test_command_that_is_none_is_told_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match="/exit is no command") as refused:
        parse_line("/exit now")
    assert all(command.value in refused.value.hint for command in Command)


@pytest.mark.parametrize(
    ("num_prompt", "max_model_len", "max_tokens", "has_room"),
    [
        (750, 1000, None, True),
        (751, 1000, None, False),
        (744, 8192, None, True),
        (7936, 8192, None, True),
        (7937, 8192, None, False),
        (48, 64, None, True),
        (49, 64, None, False),
        (60, 64, 4, True),
        (61, 64, 4, False),
        (1, 64, 1000, True),
        (2, 64, 1000, False),
        (9999, 0, None, True),
    ],
)
def test_room_for_an_answer(num_prompt: int, max_model_len: int, max_tokens: int | None, has_room: bool) -> None:
    assert fits(num_prompt, max_model_len, max_tokens) is has_room


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def delta(text: str = "", sequence: int = 0, reasoning: str = "") -> Delta:
    return Delta(text, (1,), (-1.0,), 0.0, sequence=sequence, reasoning=reasoning)


def test_reasoning_is_dimmed_before_the_text_and_left_out_of_a_pipe() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        display = AnswerDisplay(out)
        for part in (delta(reasoning="h"), delta(reasoning="m"), delta("yes"), delta("!")):
            display.show(part)
        display.end()
        display.end()
    assert terminal.getvalue() == "\x1b[2mhm\x1b[0m\nyes!\n"
    assert pipe.getvalue() == "yes!\n"


def test_cut_reasoning_does_not_leave_the_terminal_dim() -> None:
    terminal = Terminal()
    display = AnswerDisplay(terminal)
    display.show(delta(reasoning="h"))
    display.end()
    assert terminal.getvalue() == "\x1b[2mh\x1b[0m\n"


def test_model_cannot_command_the_terminal() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        display = AnswerDisplay(out)
        display.show(delta("a\x1b[2Jb\r\tc\x9b\n日é🙂"))
        display.end()
    assert terminal.getvalue() == "a\\x1b[2Jb\\r\tc\\x9b\n日é🙂\n"
    assert pipe.getvalue() == "a\x1b[2Jb\r\tc\x9b\n日é🙂\n"


def test_several_sequences_come_whole_as_they_end() -> None:
    out = io.StringIO()
    display = AnswerDisplay(out, num_sequences=3)
    for part in (
        delta("a", 0),
        delta("b", 1),
        delta("B", 1),
        Finished(FinishReason.STOP, sequence=1),
        delta("A", 0),
        Finished(FinishReason.STOP, sequence=0),
        Finished(FinishReason.STOP, sequence=2),
    ):
        display.show(part)
    display.end()
    assert out.getvalue() == "[1] bB\n[0] aA\n[2] \n"


def test_tool_calls_have_lines_of_their_own() -> None:
    out = io.StringIO()
    display = AnswerDisplay(out)
    first = (ToolCallDelta(0, "c1", "f", '{"x"'),)
    rest = (ToolCallDelta(0, "", "", ": 1}"), ToolCallDelta(1, "c2", "g", "{}"))
    for part in (delta("so"), replace(delta(), tool_calls=first), replace(delta(), tool_calls=rest)):
        display.show(part)
    display.end()
    assert out.getvalue() == 'so\nf {"x": 1}\ng {}\n'
    several = AnswerDisplay(out := io.StringIO(), num_sequences=2)
    several.show(replace(delta(), tool_calls=rest[1:]))
    several.show(Finished(FinishReason.STOP))
    assert out.getvalue() == "[0] g {}\n"


def test_stats_are_one_line() -> None:
    answer = Answer(summary=summary_from_pb(SUMMARY))
    assert stats_line(answer) == (
        "TTFT 500 ms · TPOT 750.0 ms · 3 tokens in 2.00 s · prompt 3 tokens (1 cached) · 2 attempts"
    )
    assert answer.summary is not None
    usage = replace(answer.summary.usage, completion_tokens=1)
    answer.summary = replace(answer.summary, usage=usage)
    assert "TPOT" not in stats_line(answer)


def test_scores_have_a_row_per_token() -> None:
    answer = Answer()
    answer.add(PromptScores((ScoredToken(7, None), ScoredToken(8, -0.5, ((9, -0.25),)))))
    answer.add(Delta("a", (5, 6), (-0.5, -1.5), 0.0, top_logprobs=(((5, -0.5), (4, -2.0)), ((6, -1.5),))))
    rows = [line.split() for line in shown_view(scores_view(answer)).splitlines()[1:]]
    assert rows == [
        ["prompt", "7"],
        ["prompt", "8", "-0.500", "9", "-0.250"],
        ["answer", "5", "-0.500", "5", "-0.500", "4", "-2.000"],
        ["answer", "6", "-1.500", "6", "-1.500"],
    ]


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("sampling.top_p", "--top-p"),
        ("stop.stop[3]", "--stop"),
        ("n", "--n"),
        ("sampling.banned_words[0]", "--banned-word"),
        ("structured_output.json_schema", "--json-schema"),
        ("structured_output.choice.texts[1]", "--choice"),
        ("top_logprobs", "--logprobs"),
        ("chat.template_arguments", "--template-arguments"),
        ("chat.tool_choice.name", "--tool-choice"),
        ("chat.tools[2]", "--tool"),
        ("chat.messages[0].name", ""),
        ("text", ""),
        ("", ""),
    ],
)
def test_field_of_the_contract_is_told_as_its_option(field: str, option: str) -> None:
    assert option_of(field) == option
