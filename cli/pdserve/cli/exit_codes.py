"""What an exit status of `pdserve` means."""

from enum import IntEnum

from pdserve.core import errors
from pdserve.core.errors import PdserveError


class ExitCode(IntEnum):
    """Exit status of every command; listed in README.md."""

    OK = 0
    """Done; a cluster that was told to stop has drained."""
    FAILED = 1
    """The request or the service failed."""
    USAGE = 2
    """Wrong command line or settings, or a request that can never work as sent."""
    MODEL = 3
    """The model cannot be had, is damaged, or cannot be served."""
    UNAVAILABLE = 4
    """Nothing answers, or the cluster cannot take the request now; trying again may help."""
    ADDRESS = 5
    """A port is taken."""
    INTERRUPTED = 130
    """Ctrl-C, or a second stop signal that cut a drain short."""


_BY_ERROR: dict[type[PdserveError], ExitCode] = {
    errors.ConfigError: ExitCode.USAGE,
    errors.InvalidRequest: ExitCode.USAGE,
    errors.NotServed: ExitCode.USAGE,
    errors.GrammarNotServed: ExitCode.USAGE,
    errors.GrammarTooSlow: ExitCode.USAGE,
    errors.ModelUnavailable: ExitCode.MODEL,
    errors.ModelUnsupported: ExitCode.MODEL,
    errors.UnknownModel: ExitCode.MODEL,
    errors.Unreachable: ExitCode.UNAVAILABLE,
    errors.NoNodes: ExitCode.UNAVAILABLE,
    errors.Overloaded: ExitCode.UNAVAILABLE,
    errors.Draining: ExitCode.UNAVAILABLE,
    errors.AddressInUse: ExitCode.ADDRESS,
    errors.Cancelled: ExitCode.INTERRUPTED,
}


def exit_code_of(error: PdserveError) -> ExitCode:
    """Return the exit status that tells of `error`; FAILED for those without one of their own."""
    return _BY_ERROR.get(type(error), ExitCode.FAILED)
