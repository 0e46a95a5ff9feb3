"""JSON text from a client, parsed: plain values, or the fault in words."""

import json
from typing import NoReturn


class BadJson(ValueError):
    """The text is no JSON of the form that is wanted; the message says what is wrong with it."""


def parse_object(text: str) -> dict[str, object]:
    """Return the JSON object in `text`. Raises BadJson."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadJson("it is nested too deeply") from None
    except BadJson:
        raise
    except ValueError as error:
        raise BadJson(f"it is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadJson("it is no JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadJson(f"{name} is no JSON")
