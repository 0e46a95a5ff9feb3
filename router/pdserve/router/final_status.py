"""The status that a call really ended with.

grpc.aio answers a write on a call that has just ended with a status of its own (INTERNAL, "Internal error from Core"), and puts
that in the place of the status that the server sent. So the server's word is noted here in the moment it arrives.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

T = TypeVar("T")
OWN_MAKING = "Internal error from Core"
"""Details of the status that grpc.aio makes up; it says nothing about the server."""


class FinalStatus:
    """Watches one call from its start."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        self._call = call
        self._error: grpc.aio.AioRpcError | None = None
        self._is_known = asyncio.Event()
        call.add_done_callback(self._note)

    @property
    def is_known(self) -> bool:
        """Whether the server's status has arrived."""
        return self._is_known.is_set()

    async def wait(self, timeout_s: float) -> grpc.aio.AioRpcError | None:
        """Return the server's status (OK included); None if it does not arrive in time, or the call was cancelled here."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_known.wait()
        except TimeoutError:
            return None
        return self._error

    def _note(self, call: object) -> None:  # noqa: ARG002 - gRPC's signature
        """Keep the first status that was not made up. Called whenever grpc.aio sets one."""
        if self._is_known.is_set():
            return
        details = _at_once(self._call.details())
        code = _at_once(self._call.code())
        if code is grpc.StatusCode.INTERNAL and details == OWN_MAKING:
            return
        trailing = _at_once(self._call.trailing_metadata()) or grpc.aio.Metadata()
        self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)
        self._is_known.set()


def _at_once(answer: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine of an ended call yields: it has nothing to wait for, and later the status may be replaced."""
    try:
        answer.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    answer.close()
    raise RuntimeError("the call has not ended")
