"""A request's body: bounded, read within a time, and strictly JSON (RFC 8259)."""

import asyncio
import json
import math
from typing import NoReturn

from starlette.requests import Request

from pdserve.router.http.errors import HttpFault, JsonObject

BODY_WAIT_S = 30.0
"""Time for a body to arrive whole."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the whole body, which says that it is JSON. Raises HttpFault."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpFault(415, "unsupported_media_type", f"the body is {kind}; send application/json")
    return await _read(request, max_bytes)


def parsed_object(raw: bytes) -> JsonObject:
    """Return the JSON object in `raw`. Raises HttpFault for anything else."""
    try:
        text = raw.decode()
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:
            # Half of a surrogate pair is no text: no tokenizer takes it.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        raise HttpFault(400, "invalid_json", "the body is not UTF-8 text, or names half of a surrogate pair") from None
    except RecursionError:
        raise HttpFault(400, "invalid_json", "the body is nested too deeply") from None
    except ValueError as error:
        raise HttpFault(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise HttpFault(400, "invalid_json", "the body must be a JSON object")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    stated = request.headers.get("content-length", "")
    if stated.isascii() and stated.isdigit() and len(stated) < 20 and int(stated) > max_bytes:
        raise _too_large(max_bytes)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_WAIT_S):
            async for piece in request.stream():
                size += len(piece)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                pieces.append(piece)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_WAIT_S:g} s"
        raise HttpFault(408, "request_timeout", message, headers={"connection": "close"}) from None
    return b"".join(pieces)


def _too_large(max_bytes: int) -> HttpFault:
    # The connection stays, uvicorn drops the rest of the body: if it were reset, the client would not see the answer.
    return HttpFault(413, "request_too_large", f"the body has more than {max_bytes} bytes; send less")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value
