"""A request's body: bounded, read within a time, and strictly JSON (RFC 8259)."""

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from starlette.requests import Request

from pdserve.router.http.errors import HttpFault, JsonObject

BODY_WAIT_S = 30.0
"""Time for a body to arrive whole."""
MAX_UNDER_WAY = 16
"""Of the largest bodies, how many may be on their way at once; smaller ones are as many more."""
MAX_CONTAINERS = 65_536
"""Lists and objects in one body. Each costs a hundred times its bytes: a few megabytes of them held the loop for seconds."""
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


class BodyRoom:
    """Bytes of bodies that have not arrived whole, over all connections."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._left = MAX_UNDER_WAY * max_body_bytes

    @contextmanager
    def taken(self) -> Iterator[Callable[[int], None]]:
        """Give what a body calls for each piece; all of it goes back at the end. Raises HttpFault when there is no room."""
        held = 0

        def take(num_bytes: int) -> None:
            nonlocal held
            if num_bytes > self._left:
                told = "too many request bodies are on their way; come back later"
                raise HttpFault(503, "overloaded", told, headers={"connection": "close", "retry-after": "1"})
            held += num_bytes
            self._left -= num_bytes

        try:
            yield take
        finally:
            self._left += held


async def read_body(request: Request, room: BodyRoom) -> bytes:
    """Return the whole body, which says that it is JSON. Raises HttpFault."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpFault(415, "unsupported_media_type", f"the body is {kind}; send application/json")
    with room.taken() as take:
        return await _read(request, room.max_body_bytes, take)


def parsed_object(raw: bytes) -> JsonObject:
    """Return the JSON object in `raw`. Raises HttpFault for anything else."""
    if _num_containers(raw) > MAX_CONTAINERS:
        raise HttpFault(400, "invalid_json", f"the body has more than {MAX_CONTAINERS:,} lists and objects; send fewer")
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


async def _read(request: Request, max_bytes: int, take: Callable[[int], None]) -> bytes:
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
                take(len(piece))
                pieces.append(piece)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_WAIT_S:g} s"
        raise HttpFault(408, "request_timeout", message, headers={"connection": "close"}) from None
    return b"".join(pieces)


def _num_containers(raw: bytes) -> int:
    """Return how many lists and objects begin in `raw`; brackets inside strings count only where there are few."""
    num = raw.count(b"[") + raw.count(b"{")
    if num <= MAX_CONTAINERS:
        return num
    bare = _STRINGS.sub(b"", raw)
    return bare.count(b"[") + bare.count(b"{")


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
