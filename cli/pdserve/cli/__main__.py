"""Entry point of `pdserve` and of `python -m pdserve.cli`."""

import sys
import traceback

from pdserve.cli.parent import die_with_parent
from pdserve.cli.streams import is_write_fault, open_streams

INTERRUPTED = 130
"""`ExitCode.INTERRUPTED`, which is not to be imported before Ctrl-C is caught."""


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        open_streams()
        die_with_parent()
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        status = INTERRUPTED
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status; every error is told in a line, a traceback only with `--debug`."""
    from pdserve.cli.app import app
    from pdserve.cli.exit_codes import ExitCode, exit_code_of
    from pdserve.cli.report import is_debug, message_of, show_error
    from pdserve.core.errors import PdserveError

    try:
        app(arguments, prog_name="pdserve")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except PdserveError as error:
        if is_debug():
            traceback.print_exc()
        show_error(message_of(error), error.hint)
        return exit_code_of(error)
    except Exception as error:  # noqa: BLE001 - the last place that can tell the user about a fault of ours
        if is_debug():
            traceback.print_exc()
        show_error(*words_of(error))
        return ExitCode.FAILED
    return ExitCode.OK


def words_of(error: Exception) -> tuple[str, str]:
    """Return what to say of an error that no command names, and what to do."""
    if isinstance(error, OSError) and is_write_fault(error):
        return f"cannot write: {error.strerror}", "make room where the output goes, and in the cache (`pdserve doctor`)"
    return f"pdserve itself failed: {type(error).__name__}: {error}", "run again with --debug and report it"


if __name__ == "__main__":
    main()
