"""What stands before every path: the check of keys, the request id, and the count of answers."""

import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.core.errors import PdserveError
from pdserve.router.access import HTTP_ACCESS, Access, AccessCheck
from pdserve.router.http.answer import error_response
from pdserve.router.validation import label_fault

REQUEST_ID = "x-request-id"
LABEL, CALLER = "pdserve.label", "pdserve.caller"
"""Keys of the scope: the request's id, and who sent it."""
OTHER_PATH = "other"


class Guard:
    """Middleware. Each answer carries the id that the client gave, or a new one."""

    def __init__(
        self, app: ASGIApp, access: AccessCheck, routes: Sequence[Route], count: Callable[[str, int], None]
    ) -> None:
        self._app, self._access, self._routes, self._count = app, access, routes, count
        self._paths = frozenset(route.path for route in routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through with its caller, or answer 401 or 403."""
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

        try:
            scope[CALLER] = self._access.caller(headers.getlist("authorization"), self._needed(scope))
        except PdserveError as error:
            await error_response(error, {})(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _needed(self, scope: Scope) -> Access:
        """Return what the path asks for, as its route takes it: `/metrics%0A` is `/metrics` too. Nothing is at other paths."""
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return HTTP_ACCESS.get(route.path, Access.OPERATE)
        return Access.USE
