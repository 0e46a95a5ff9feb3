"""`pdserve chat`: a conversation in the terminal with a running router."""

import sys
from typing import TYPE_CHECKING, Annotated

from pdserve.cli.api_keys import ApiKeyOption, key_to_send
from pdserve.cli.request_options import CONVERSATION, SERVER, SHOWN, AnswerOptions, ServerOption, option, takes_options
from pdserve.cli.tls_options import TlsOptions

if TYPE_CHECKING:
    from pdserve.cli.chat_lines import ChatLines
    from pdserve.cli.conversation import Conversation, Line
    from pdserve.client import Answer, Client, Options


@takes_options
def chat(
    answering: AnswerOptions,
    trust: TlsOptions,
    system: Annotated[str, option("System message.", CONVERSATION)] = "",
    server: ServerOption = SERVER,
    api_key: ApiKeyOption = "",
    stats: Annotated[
        bool | None, option("Show times and tokens. Default: on a terminal.", SHOWN, "--stats/--no-stats")
    ] = None,
) -> None:
    """Talk with a model. Ctrl-C cancels the running answer, Ctrl-D leaves; each line of piped input is a question."""
    from pdserve.cli.chat_lines import ChatLines
    from pdserve.cli.conversation import Conversation
    from pdserve.client import NO_RETRIES, Client
    from pdserve.core.errors import Cancelled

    lines = ChatLines(sys.stdin, sys.stdout)
    conversation = Conversation(system, answering.template_arguments)
    try:
        with Client(server, api_key=key_to_send(api_key), retry=NO_RETRIES, tls=trust.client_tls()) as client:
            Talk(client, conversation, answering.options(), lines, has_stats=stats).run()
    except KeyboardInterrupt:
        raise Cancelled("interrupted") from None


class Talk:
    """Takes the user's lines, one after the other, and writes the answers.

    On a terminal an error or a Ctrl-C ends one answer; in a pipe, where nobody can react, it ends the command.
    """

    def __init__(
        self,
        client: "Client",
        conversation: "Conversation",
        options: "Options",
        lines: "ChatLines",
        *,
        has_stats: bool | None = None,
    ) -> None:
        self._client, self._conversation, self._options, self._lines = client, conversation, options, lines
        self._has_stats = lines.is_terminal if has_stats is None else has_stats

    def run(self) -> None:
        """Talk until the user leaves. Raises the error that ended it."""
        from pdserve.core.errors import PdserveError

        self._begin()
        while (said := self._lines.read()) is not None:
            try:
                if not self._take(said):
                    return
            except PdserveError as error:
                if not self._lines.is_terminal:
                    raise
                self._lines.error(error)
            except KeyboardInterrupt:
                if not self._lines.is_terminal:
                    raise
                self._lines.note("cancelled")

    def _begin(self) -> None:
        """Say with whom the user talks. Raises UnknownModel or InvalidRequest for one that cannot chat."""
        from pdserve.core.errors import InvalidRequest, UnknownModel

        served = self._client.models()
        wanted = self._options.model
        card = next((card for card in served if card.name == wanted or not wanted), None)
        if card is None:
            names = ", ".join(card.name for card in served)
            raise UnknownModel(f"model {wanted} is not served here", hint=f"served: {names}", field="model")
        if not card.has_chat_template:
            raise InvalidRequest(f"model {card.name} has no chat template", hint="use `pdserve generate`")
        length = f", up to {card.max_model_len:,} tokens" if card.max_model_len else ""
        self._lines.note(f"{card.name}{length}. /help for help, Ctrl-C cancels an answer, Ctrl-D leaves.")

    def _take(self, said: str) -> bool:
        """Do what a line asks for; return whether to go on."""
        from pdserve.cli.conversation import Command, parse_line

        line = parse_line(said)
        if line.command is Command.QUIT:
            return False
        if line.command is not None:
            self._obey(line)
        elif line.text:
            self._conversation.ask(line.text)
            self._answer()
        return True

    def _obey(self, line: "Line") -> None:
        from pdserve.cli.conversation import HELP, Command

        conversation, note = self._conversation, self._lines.note
        match line.command:
            case Command.HELP:
                for command, told in HELP.items():
                    note(f"{command.value:<8} {told}")
            case Command.RESET:
                conversation.reset()
                note("forgotten")
            case Command.SYSTEM if line.text:
                conversation.reset("" if line.text == "-" else line.text)
                note("the system message is changed; the conversation begins anew")
            case Command.SYSTEM:
                note(conversation.system or "there is no system message")
            case Command.RETRY:
                if conversation.ask_again():
                    self._answer()
                else:
                    note("nothing was asked yet")

    def _answer(self) -> None:
        """Ask what waits, show the answer as it comes, and keep what was shown."""
        from pdserve.cli.answer_display import AnswerDisplay
        from pdserve.client import Answer

        display, answer = AnswerDisplay(self._lines.out), Answer()
        try:
            self._make_room()
            with self._client.generate(self._conversation.chat(), self._options) as parts:
                answer = parts.answer
                for part in parts:
                    display.show(part)
        finally:
            display.end()
            self._conversation.answered(*said_in(answer))
        self._close(answer)

    def _make_room(self) -> None:
        """Forget the oldest exchanges until the model's length leaves room for an answer, and say so."""
        from pdserve.cli.conversation import fits

        num_dropped = 0
        while True:
            tokens = self._client.tokenize(self._conversation.chat(), model=self._options.model)
            if fits(len(tokens.token_ids), tokens.max_model_len, self._options.max_tokens):
                break
            if not self._conversation.drop_oldest():
                break  # the question alone may be too long; the router says so by name
            num_dropped += 1
        if num_dropped:
            from pdserve.cli.report import count

            self._lines.note(
                f"the model's length is reached: {count(num_dropped, 'oldest exchange')} forgotten", even_in_pipe=True
            )

    def _close(self, answer: "Answer") -> None:
        """Say how the answer ended, if not by itself, and what it cost."""
        from pdserve.core.work import FinishReason

        finished = answer.finished
        if finished is not None and finished.reason is FinishReason.LENGTH:
            self._lines.note("cut here: the longest answer, or the model's length, is reached", even_in_pipe=True)
        if self._has_stats and answer.summary is not None:
            self._lines.note(stats_line(answer), even_in_pipe=True)


def said_in(answer: "Answer") -> tuple[str, str]:
    """Return the text and the reasoning that were shown."""
    return (answer.choices[0].text, answer.choices[0].reasoning) if answer.choices else ("", "")


def stats_line(answer: "Answer") -> str:
    """Return one line of times, at the router, and of tokens."""
    from pdserve.cli.report import count

    assert answer.summary is not None
    timeline, usage = answer.summary.timeline, answer.summary.usage
    per_token = [f"TPOT {1000 * timeline.tpot_s:.1f} ms"] if usage.completion_tokens > 1 else []
    parts = [
        f"TTFT {1000 * timeline.ttft_s:.0f} ms",
        *per_token,
        f"{count(usage.completion_tokens, 'token')} in {timeline.e2el_s:.2f} s",
        f"prompt {count(usage.prompt_tokens, 'token')} ({usage.cached_prompt_tokens} cached)",
        *([f"{timeline.attempts} attempts"] if timeline.attempts > 1 else []),
    ]
    return " · ".join(parts)
