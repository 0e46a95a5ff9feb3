"""The end of a call that does not wait for its client.

What a server sends last, its status, stands behind what it sent before, and that stands behind the client's flow control. So the
call of a client that never reads stays open after `context.abort`, and after its handler returned, with its stream and its bytes,
for as long as the client likes. Only cancelling the call in gRPC's core passes the bytes that wait: it drops them, sends the
status at once (headers know no flow control), then RST_STREAM, and leaves the connection and its other calls as they are.
grpc.aio has no word for that on a server. Its context lends the call to one function of its own module, `peer_identities`, as an
object that has one: here that function is replaced for the length of one call of it. `tests/rpc/test_unread.py` sees the reset on
the wire.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import grpc

_CYGRPC: ModuleType = import_module("grpc._cython.cygrpc")


def cut(context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, message: str) -> None:
    """End the call now; what it has not sent is dropped. Harmless when the call is over.

    grpc.aio then cancels the handler's task, if it still runs. There is no room for details beside the message. To be called
    on the event loop's thread. Raises RuntimeError if gRPC changed so that it cannot be done.
    """
    outcomes: list[object] = []

    def cancel(call: Any) -> tuple[()]:
        try:
            outcomes.append(call.cancel(code.value[0], message))
        except ValueError:  # the call is gone
            outcomes.append(None)
        except Exception as error:  # noqa: BLE001 - raised below: raised here, gRPC would release the call twice
            outcomes.append(error)
        return ()

    lent = _CYGRPC.peer_identities
    _CYGRPC.peer_identities = cancel  # type: ignore[attr-defined]  # the module has no stubs
    try:
        context.peer_identities()
    finally:
        _CYGRPC.peer_identities = lent  # type: ignore[attr-defined]  # the module has no stubs
    match outcomes:
        case [Exception() as error]:
            raise RuntimeError("this version of gRPC does not let a call be cut") from error
        case []:
            raise RuntimeError("this version of gRPC does not lend its calls: none can be cut")
