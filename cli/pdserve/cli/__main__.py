"""Entry point of `pdserve` and of `python -m pdserve.cli`."""

import sys
import traceback

from pdserve.cli.parent import die_with_parent


def main() -> None:
    """Run the command line and exit with its status."""
    die_with_parent()
    sys.exit(run(sys.argv[1:]))


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
        show_error(f"pdserve itself failed: {type(error).__name__}: {error}", "run again with --debug and report it")
        return ExitCode.FAILED
    return ExitCode.OK


if __name__ == "__main__":
    main()
