"""How commands speak: results on standard output, errors as one red line and a hint on standard error."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Coroutine, Iterator
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from pdserve.cli.exit_codes import exit_code_of
from pdserve.core.errors import Cancelled, InternalError, PdserveError

T = TypeVar("T")
PIPE_WIDTH = 200


def is_debug() -> bool:
    """Whether tracebacks are wanted: PDSERVE_DEBUG=1, which `--debug` sets."""
    return os.environ.get("PDSERVE_DEBUG") == "1"


class PipeConsole(Console):
    """A console that raises BrokenPipeError like any stream; rich's own ends the process from wherever it stands."""

    def on_broken_pipe(self) -> None:
        """Raise what was caught."""
        self.quiet = True
        raise  # noqa: PLE0704 - rich calls this while it handles a BrokenPipeError


def output() -> Console:
    """Return the console of results; as wide as the terminal, or wide enough for any table where a pipe reads."""
    return PipeConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def errors_output() -> Console:
    """Return the console of errors and progress."""
    return PipeConsole(stderr=True, soft_wrap=True, highlight=False)


def show_error(message: str, hint: str = "") -> None:
    """Show one error: a red line, the rest of its lines as they are, and what to do."""
    console = errors_output()
    first, _, rest = message.partition("\n")
    console.print(Text.assemble(("error: ", "bold red"), (first, "red")))
    if rest:
        console.print(Text(rest))
    if hint:
        console.print(Text.assemble(("hint: ", "bold"), hint))


def show_warning(message: str) -> None:
    """Show something that is probably not meant, and does not stop the command."""
    errors_output().print(Text.assemble(("warning: ", "bold yellow"), message))


def message_of(error: PdserveError) -> str:
    """Return the message, with the option or field at fault where it is not named already."""
    from pdserve.cli.request_options import option_of

    option = option_of(error.field)
    if option:
        return error.message if option in error.message else f"{option}: {error.message}"
    last = error.field if "[" in error.field else error.field.rpartition(".")[2]
    named = not error.field or last in error.message
    return error.message if named else f"{error.field}: {error.message}"


def write_json(value: object) -> None:
    """Write one JSON line to standard output and flush it."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str) + "\n")
    sys.stdout.flush()


def error_as_json(error: PdserveError) -> dict[str, object]:
    """Return `error` as the object that `--json` prints."""
    return {
        "event": "error",
        "reason": error.reason,
        "message": error.message,
        "hint": error.hint,
        "field": error.field,
        "retry_after_s": error.retry_after_s,
        "metadata": error.metadata,
        "exit_code": int(exit_code_of(error)),
    }


@contextlib.contextmanager
def errors_as_json(wanted: bool) -> Iterator[None]:
    """Print an error that leaves the context as a JSON object too, if `wanted`, and let it go on."""
    try:
        yield
    except PdserveError as error:
        if wanted:
            write_json(error_as_json(error))
        raise
    except Exception as error:
        if wanted:
            write_json(error_as_json(InternalError(f"{type(error).__name__}: {error}")))
        raise


def count(number: float, noun: str) -> str:
    """Return "1 token", "2 tokens"."""
    return f"{number:g} {noun}" if number == 1 else f"{number:,.0f} {noun}s"


def run_async(main: Coroutine[object, object, T]) -> T:
    """Run `main` to its end. Raises Cancelled for Ctrl-C, after `main` was cancelled and cleaned up."""
    try:
        return asyncio.run(main)
    except KeyboardInterrupt:
        raise Cancelled("interrupted") from None
