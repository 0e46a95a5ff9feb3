"""The TOML file of settings: keys at the top level for every role, a table for one role, and whatever is wrong with it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pdserve.core.setting_faults import Places, did_you_mean, faults_in

Kinds = Mapping[str, type[BaseModel]]
"""Settings class by role, which is also the table's name."""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """What a file says: per role the settings by name and what to call the place of each, and every fault of the file."""

    values: Mapping[str, Mapping[str, Any]]
    places: Mapping[str, Mapping[str, str]]
    faults: tuple[str, ...] = ()


def read_settings_file(path: Path | None, kinds: Kinds) -> SettingsFile:
    """Read `path`, or nothing. Never raises: faults of the file, of its keys and of single values come with the result.

    Values are held against every role that they are for, so one start tells what is wrong for all of them.
    """
    content, fault = ({}, "") if path is None else parsed(path)
    faults = [f"{path}: {fault}"] if fault else []
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    top = {name: value for name, value in content.items() if name not in tables}
    everything = {name for kind in kinds.values() for name in kind.model_fields}
    faults += [
        f"{path} [{name}]: unknown table{did_you_mean(name, kinds)}" for name in sorted(tables.keys() - kinds.keys())
    ]
    faults += [
        f"{path} {name}: unknown setting{did_you_mean(name, everything)}" for name in sorted(top.keys() - everything)
    ]
    values: dict[str, Mapping[str, Any]] = {}
    places: dict[str, Mapping[str, str]] = {}
    for role, kind in kinds.items():
        table = tables.get(role, {})
        shared = {name: value for name, value in top.items() if name in kind.model_fields}
        for name in sorted(table.keys() - kind.model_fields.keys()):
            owners = [other for other, its in kinds.items() if name in its.model_fields]
            belongs = f"; it is one of [{'] and ['.join(owners)}]" if owners else did_you_mean(name, kind.model_fields)
            faults.append(f"{path} [{role}] {name}: unknown setting{belongs}")
        own = {name: value for name, value in table.items() if name in kind.model_fields}
        values[role] = shared | own
        places[role] = {name: f"{path} {name}" for name in shared} | {name: f"{path} [{role}] {name}" for name in own}
        faults += value_faults(kind, values[role], places[role])
    return SettingsFile(values, places, tuple(dict.fromkeys(faults)))


def parsed(path: Path) -> tuple[dict[str, Any], str]:
    """Return the file's content, or nothing and why it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")), ""
    except FileNotFoundError:
        return {}, "there is no such file"
    except IsADirectoryError:
        return {}, "this is a folder; give a TOML file"
    except OSError as error:
        return {}, f"cannot be read ({(error.strerror or str(error)).lower()})"
    except UnicodeDecodeError as error:
        return {}, f"this is not UTF-8 text (byte {error.start})"
    except tomllib.TOMLDecodeError as error:
        words = str(error)
        return {}, f"this is not TOML: {words[:1].lower()}{words[1:]}"


def value_faults(kind: type[BaseModel], values: Mapping[str, Any], places: Mapping[str, str]) -> list[str]:
    """Return the faults of single values; whether they fit together is seen once all sources are known."""
    try:
        kind(**values)
    except ValidationError as error:
        details = [detail for detail in error.errors() if detail["loc"] and detail["loc"][0] in values]
        return list(faults_in(kind, details, Places(options=places)))
    return []
