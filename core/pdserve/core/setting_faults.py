"""What is wrong with settings, in plain words: where the value came from, the rule, and the value that broke it."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

HINT = "every setting, its unit and its default: `pdserve router --help`, and the same for prefill and decode"
OTHER_VARIABLES = frozenset(
    f"PDSERVE_{name}"
    for name in ("CACHE", "CONFIG", "TEST", "COMMIT", "DEBUG", "PARENT_PID", "SERVER", "TLS", "UP_PREFILL", "UP_DECODE")
)
"""Variables of the environment that are no settings of a process."""
MAX_GUESSED_CHARS = 64
"""Longer names are no slips of the pen, and difflib's time grows with the square of their length."""
SECRET_WORDS = ("secret", "api_key")
"""In the names of settings whose values are never shown."""
SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP)\w*)?$")
"""What Kubernetes adds for a Service whose name begins with pdserve."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where each setting's value came from, as people call it: an option, a variable, or a key of a file."""

    options: Mapping[str, str] = field(default_factory=dict)
    file: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """Return the place that was heard, or the setting's own name where nothing was said."""
        if name in self.options:
            return self.options[name]
        variable = variable_of(name)
        return variable if variable in os.environ else self.file.get(name, name)


def variable_of(name: str) -> str:
    """Return the variable of the environment that sets `name`."""
    return f"PDSERVE_{name.upper()}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the name that is most like `name`, or nothing; the search is bounded."""
    if len(name) > MAX_GUESSED_CHARS:
        return ""
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def unknown_variables(settings: Iterable[str]) -> dict[str, str]:
    """Return the PDSERVE_ variables of the environment that mean nothing, each with what to say of it."""
    known = {variable_of(name) for name in settings} | OTHER_VARIABLES
    strays = [name for name in sorted(os.environ) if name.startswith("PDSERVE_") and name not in known]
    return {
        name: f"environment variable {name} is not known, and ignored{did_you_mean(name, known)}"
        for name in strays
        if not SERVICE_LINK.search(name)
    }


def faults_in(kind: type[BaseModel], details: Iterable[Mapping[str, Any]], places: Places) -> Iterator[str]:
    """Yield a line per fault from the `details` of a ValidationError of `kind`."""
    for detail in details:
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if not name:
            for line in own_words(detail).split("\n"):
                about, _, words = line.partition(": ")
                yield f"{places.of(about)}: {words}"
        elif name not in kind.model_fields:
            yield f"{places.of(name)}: unknown setting{did_you_mean(name, kind.model_fields)}"
        else:
            message = own_words(detail) or f"must be {rule_of(kind.model_fields[name])}"
            yield f"{places.of(name)}: {message}{given_in(name, detail)}"


def own_words(detail: Mapping[str, Any]) -> str:
    """Return what a validator of ours said, or nothing where pydantic found the fault."""
    return str(detail["ctx"]["error"]) if detail["type"] == "value_error" else ""


def given_in(name: str, detail: Mapping[str, Any]) -> str:
    """Return the value that was given; never that of a secret."""
    given = detail.get("input")
    is_shown = not any(word in name for word in SECRET_WORDS) and isinstance(given, str | int | float)
    return f" (given: {given!r})" if is_shown else ""


def rule_of(setting: FieldInfo) -> str:
    """Return what a value must be, to follow "must be"."""
    kind, bounds = plain_type(setting.annotation, list(setting.metadata))
    if get_origin(kind) is Literal:
        *most, last = (str(choice) for choice in get_args(kind))
        return f"{', '.join(most)} or {last}"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + range_of(bounds)
    return "HOST:PORT, or several with commas between" if get_origin(kind) is tuple else "text"


def plain_type(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any]]:
    """Return the type behind optional and annotated ones, and all metadata on the way to it."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        found = [item for entry in extra for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
        return plain_type(inner, metadata + found)
    parts = [part for part in get_args(annotation) if part is not type(None)]
    is_optional = type(None) in get_args(annotation)
    return plain_type(parts[0], metadata) if is_optional else (annotation, metadata)


def range_of(bounds: Iterable[Any]) -> str:
    """Return the range that pydantic's bounds (`gt`, `ge`, `le`) make."""
    limits = {name: getattr(bound, name) for bound in bounds for name in ("gt", "ge", "le") if hasattr(bound, name)}
    low = f"above {limits['gt']:,}" if "gt" in limits else f"at least {limits['ge']:,}" if "ge" in limits else ""
    if "ge" in limits and "le" in limits:
        return f" from {limits['ge']:,} to {limits['le']:,}"
    high = f"at most {limits['le']:,}" if "le" in limits else ""
    return "".join(f"{mark}{part}" for mark, part in ((" ", low), (", " if low else " ", high)) if part)
