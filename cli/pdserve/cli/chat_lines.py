"""Where a conversation's lines come from, and where notes about it go: a terminal, or pipes."""

import sys
from typing import TextIO

from rich.text import Text

from pdserve.cli.report import errors_output, message_of, show_error
from pdserve.core.errors import InvalidRequest, PdserveError

PROMPT = "> "


class ChatLines:
    """Reads the user's lines. It is a terminal only if both ends are one; notes go to standard error."""

    def __init__(self, source: TextIO, out: TextIO) -> None:
        self._source, self.out = source, out
        self.is_terminal = source.isatty() and out.isatty()
        self._notes = errors_output()
        self._num_read = 0
        if self.is_terminal:
            import_readline()

    def read(self) -> str | None:
        """Return the next line, or None at the end of input. Ctrl-C at the prompt drops the line that was begun."""
        if not self.is_terminal:
            return self._read_piped()
        while True:
            try:
                return input(PROMPT)
            except EOFError:
                sys.stdout.write("\n")
                return None
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                self.note("Ctrl-D or /quit leaves")

    def note(self, text: str, *, even_in_pipe: bool = False) -> None:
        """Show something that is no answer, dimmed; a pipe has no reader for it unless it was asked for."""
        if self.is_terminal or even_in_pipe:
            self._notes.print(Text(text, style="dim"))

    def error(self, error: PdserveError) -> None:
        """Show an error that ends one answer."""
        show_error(message_of(error), error.hint)

    def _read_piped(self) -> str | None:
        raw = self._source.buffer.readline()
        if not raw:
            return None
        self._num_read += 1
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            message = f"line {self._num_read} of the input is not valid UTF-8 (byte {error.start})"
            raise InvalidRequest(message) from None


def import_readline() -> None:
    """Give the prompt editing and a history of this run, where Python was built with it."""
    try:
        import readline  # noqa: F401 - `input` finds it by itself
    except ImportError:
        return
