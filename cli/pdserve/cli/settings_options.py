"""Command-line options made from the fields of a settings class, so that the two can never drift apart.

Every option is text here; the settings class parses it, which is how all faults, whatever their source, are told at once.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from pdserve.core.process_settings import ProcessSettings

HIDDEN = frozenset({"hold_at", "ready_fd", "cluster_secret_fd"})
"""For tests and for the supervisor."""

ADDRESSES = frozenset({"prefill", "decode"})

METAVARS: Mapping[type, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT"}

Run = Callable[[Mapping[str, Any], Path | None], None]


def command_of(kind: type[ProcessSettings], run: Run, doc: str) -> Callable[..., None]:
    """Return a command with one option per field of `kind` and `--config`.

    It calls `run(given, config)`, where `given` has the options that were set, as text.
    """

    def command(config: Path | None = None, **options: str | list[str] | None) -> None:
        given = {name: joined(value) for name, value in options.items() if value}
        run(given, config)

    parameters = [option_of(name, field) for name, field in kind.model_fields.items()]
    parameters.append(
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None,
                typer.Option("--config", metavar="FILE", help="TOML file of settings; also PDSERVE_CONFIG."),
            ],
        )
    )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # typer reads it to make options
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = doc
    return command


def option_of(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the keyword parameter that typer turns into the option of one field."""
    kind = base_type(field.annotation)
    takes_many = kind is tuple
    help_text = f"{field.description} {default_text(field)}(env: PDSERVE_{name.upper()})"
    option = typer.Option(
        "--" + name.replace("_", "-"),
        help=escape(help_text),
        metavar="HOST:PORT" if name in ADDRESSES else METAVARS.get(kind, "TEXT"),
        hidden=name in HIDDEN,
        show_default=False,
    )
    text = list[str] if takes_many else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[text | None, option]
    )


def base_type(annotation: Any) -> type:
    """Return the plain type behind an optional or annotated field type."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return base_type(next(part for part in get_args(annotation) if part is not NoneType))
    if origin is Annotated:
        return base_type(get_args(annotation)[0])
    plain = origin or annotation
    return plain if isinstance(plain, type) else str


def default_text(field: FieldInfo) -> str:
    """Return the default as help text, or nothing where there is none to tell."""
    return "" if field.default in (None, (), "") else f"[default: {field.default}] "


def joined(value: str | list[str] | None) -> str | None:
    """Return a repeated option as the comma-separated text that settings take from everywhere."""
    return ",".join(value) if isinstance(value, list) else value
