"""Settings of each process: where they come from, their bounds, and every fault at once.

Order, first wins: command line, environment (`PDSERVE_…`), TOML file (`--config`, or PDSERVE_CONFIG), default. In the file,
keys at the top level are for every role and a table `[router]`, `[prefill]` or `[decode]` is for one role.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from pdserve.core.errors import ConfigError
from pdserve.core.node_settings import DecodeSettings, PrefillSettings
from pdserve.core.process_settings import ProcessSettings
from pdserve.core.router_settings import RouterSettings
from pdserve.core.setting_faults import HINT, Places, faults_in, unknown_variables
from pdserve.core.settings_file import read_settings_file

T = TypeVar("T", bound=ProcessSettings)

ROLE_SETTINGS: Mapping[str, type[ProcessSettings]] = {
    kind.table: kind for kind in (RouterSettings, PrefillSettings, DecodeSettings)
}


def load_settings(
    kind: type[T],
    given: Mapping[str, Any],
    config: Path | None = None,
    *,
    options: Mapping[str, str] | None = None,
) -> T:
    """Return the settings of one process.

    `given` holds what the command line set (values that are None count as not set), and `options` what to call an option that
    is not named like its setting. Raises ConfigError naming every fault of every source, in the whole file too.
    """
    stated = os.environ.get("PDSERVE_CONFIG")
    file = read_settings_file(config or (Path(stated) if stated else None), ROLE_SETTINGS)
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    named = {name: f"--{name.replace('_', '-')}" for name in values} | dict(options or {})
    values["__file__"] = dict(file.values.get(kind.table, {}))
    try:
        settings = kind(**values)
    except ValidationError as error:
        places = Places(named, file.places.get(kind.table, {}))
        faults = [*_faults(kind, values, error, places), *file.faults]
        raise ConfigError(list(dict.fromkeys(faults)), hint=HINT) from None
    if file.faults:
        raise ConfigError(list(file.faults), hint=HINT)
    return settings


def environment_warnings() -> dict[str, str]:
    """Return the PDSERVE_ variables that no process and no command knows, each with what to say of it."""
    return unknown_variables(name for kind in ROLE_SETTINGS.values() for name in kind.model_fields)


def _faults(
    kind: type[ProcessSettings], values: Mapping[str, Any], error: ValidationError, places: Places
) -> list[str]:
    """Return every fault: those of single fields, then those between fields, found with the faulty ones at their defaults."""
    details = error.errors()
    faults = list(faults_in(kind, details, places))
    wrong = {str(detail["loc"][0]) for detail in details if detail["loc"]} & kind.model_fields.keys()
    if wrong:
        defaults = {name: kind.model_fields[name].default for name in wrong}
        known = {name: value for name, value in values.items() if name in kind.model_fields or name == "__file__"}
        try:
            kind(**(known | defaults))
        except ValidationError as rest:
            faults += faults_in(kind, rest.errors(), places)
    return faults
