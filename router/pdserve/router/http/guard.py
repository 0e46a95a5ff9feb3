"""What stands before every path: the API key, the request id, and the count of answers."""

import hashlib
import hmac
import uuid
from collections.abc import Callable, Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.core.errors import PdserveError, Unauthenticated
from pdserve.router.http.answer import error_response
from pdserve.router.validation import label_fault

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
"""Paths that need no key: probes and scrapers have none."""
REQUEST_ID = "x-request-id"
LABEL = "pdserve.label"
"""Key of the scope that holds the request's id."""
OTHER_PATH = "other"


class Guard:
    """Middleware. Each answer carries the id that the client gave, or a new one."""

    def __init__(
        self, app: ASGIApp, keys: Collection[str], paths: Collection[str], count: Callable[[str, int], None]
    ) -> None:
        self._app, self._paths, self._count = app, frozenset(paths), count
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        given = headers.get(REQUEST_ID, "")
        label = given or uuid.uuid4().hex
        scope[LABEL] = label

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                if label_fault(label) is None:
                    MutableHeaders(scope=message)[REQUEST_ID] = label
                self._count(path if path in self._paths else OTHER_PATH, message["status"])
            await send(message)

        if self._digests and path not in OPEN_PATHS and not self._knows(headers.get("authorization", "")):
            error: PdserveError = Unauthenticated(
                "the API key is missing or wrong", hint="send Authorization: Bearer KEY"
            )
            await error_response(error, {})(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _knows(self, authorization: str) -> bool:
        """Whether the header holds one of the keys. The time it takes does not depend on which, nor on how much is right."""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(found)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
