"""No call waits for its client without end: not for the request, and not until the client takes what it is sent.

A server interceptor does it for every method of every service, reflection and health included. It turns each handler into one
that reads and writes by itself, since grpc.aio's own reading of a single request, and its own writing of a single response, have
no end that a server can set. On the wire a method is the same.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, cast

import grpc

from pdserve.core.errors import InvalidRequest, PdserveError, SlowReader
from pdserve.rpc.cut import cut
from pdserve.rpc.errors import abort_with, code_of, reason_in, terse

UNREAD_S = 60.0
"""Time for which a client may leave a message unread, unless a server is told another."""
REQUEST_WAIT_S = 30.0
"""Time for a single request to arrive whole. Messages of a stream are the method's own to wait for."""

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class BoundedCalls(grpc.aio.ServerInterceptor):
    """Ends calls whose clients keep the server waiting: by status where that arrives, else at the transport.

    On streams of methods that begin with `hurried`, each request has to follow in the time that a single one has.
    """

    def __init__(self, unread_s: float = UNREAD_S, hurried: str = "") -> None:
        self._unread_s, self._hurried = unread_s, hurried

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Return the handler of this call, bounded. Methods that nobody serves have none, and are gRPC's to refuse.

        Never one of an earlier call: interceptors that come after this one let one caller in and refuse another.
        """
        handler = await continuation(handler_call_details)
        is_hurried = bool(self._hurried) and handler_call_details.method.startswith(self._hurried)
        return None if handler is None else self._bound(handler, is_hurried)

    def _bound(self, handler: Handler, is_hurried: bool) -> Handler:
        async def serve(requests: AsyncIterator[Any], context: Context) -> None:
            call = BoundedContext(context, self._unread_s)
            given = cast("Context", call)
            try:
                several = call.each(requests) if is_hurried else requests
                await _answer(handler, several if handler.request_streaming else await call.only(requests), given)
            except PdserveError as error:
                await abort_with(given, error)
            finally:
                call.leave()

        return grpc.stream_stream_rpc_method_handler(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class BoundedContext:
    """A call's context; whoever leaves what `write` sends unread for `unread_s` ends the call.

    Everything else is the context's own.
    """

    def __init__(self, context: Context, unread_s: float) -> None:
        self._context, self._unread_s = context, unread_s
        self._is_blocked = False

    async def only(self, requests: AsyncIterator[Any]) -> Any:
        """Wait for the one request of a call that has one. Raises InvalidRequest if it does not arrive in time."""
        try:
            async with asyncio.timeout(REQUEST_WAIT_S):
                return await anext(requests)
        except TimeoutError:
            late = f"the request did not arrive within {REQUEST_WAIT_S:g} s"
            raise InvalidRequest(late, hint="send it whole", field="request") from None
        except StopAsyncIteration:  # the client left, or has nothing to ask
            self._cut(grpc.StatusCode.INVALID_ARGUMENT, "there is no request")
            raise asyncio.CancelledError from None

    async def each(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the requests of a stream. Raises InvalidRequest if the next one does not arrive in time."""
        while True:
            try:
                async with asyncio.timeout(REQUEST_WAIT_S):
                    request = await anext(requests)
            except TimeoutError:
                late = f"no further request arrived within {REQUEST_WAIT_S:g} s"
                raise InvalidRequest(late, hint="end the stream when you have asked all", field="request") from None
            except StopAsyncIteration:
                return
            yield request

    def __getattr__(self, name: str) -> Any:
        """Return what the context has."""
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Send a message and wait until the transport took it. Raises SlowReader; nothing but the end can be sent then."""
        self._is_blocked = True
        try:
            async with asyncio.timeout(self._unread_s):
                await self._context.write(message)
        except TimeoutError:
            raise SlowReader(f"the client read nothing for {self._unread_s:g} s", hint="read the stream") from None
        self._is_blocked = False

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn:
        """End the call with a status: as gRPC does, or, if a message is in the way, at once and without metadata."""
        if not self._is_blocked:
            await self._context.abort(code, details, trailing_metadata)
        self._cut(code, terse(reason_in(trailing_metadata), details))
        raise asyncio.CancelledError  # what grpc.aio does with a call that ended

    def leave(self) -> None:
        """End the call at once if its handler is over, but a message that it sent is not."""
        if self._is_blocked:
            error = SlowReader("the client did not read what it was sent")
            self._cut(code_of(error), terse(error.reason, error.message))

    def _cut(self, code: grpc.StatusCode, details: str) -> None:
        self._is_blocked = False
        cut(self._context, code, details)


async def _answer(handler: Handler, request: Any, context: Context) -> None:
    """Run a handler of any kind."""
    # The stubs know the handlers of threads only.
    if not handler.response_streaming:
        one: Any = handler.stream_unary if handler.request_streaming else handler.unary_unary
        await context.write(await one(request, context))
        return
    many: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
    if inspect.isasyncgenfunction(many):
        async with aclosing(many(request, context)) as responses:
            async for response in responses:
                await context.write(response)
    else:
        await many(request, context)
