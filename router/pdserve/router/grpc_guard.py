"""What stands before every gRPC method of a router: the check of keys, before a byte of the request is taken."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc

from pdserve.core.api_keys import Caller
from pdserve.core.errors import PdserveError
from pdserve.router.access import GRPC_ACCESS, Access, AccessCheck
from pdserve.rpc.errors import abort_with

HEADER = "authorization"

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class GrpcGuard(grpc.aio.ServerInterceptor):
    """Lets a call through, or ends it with the error that says why not."""

    def __init__(self, access: AccessCheck) -> None:
        self._access = access

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        """Return the method's own handler, or one that refuses. That one is a stream: it has no request to wait for."""
        try:
            caller_of(details.invocation_metadata, GRPC_ACCESS.get(details.method, Access.OPERATE), self._access)
        except PdserveError as error:
            refusal = error

            async def refuse(requests: object, context: Context) -> None:  # noqa: ARG001 - gRPC's signature
                await abort_with(context, refusal)

            return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(details)


def caller_of(metadata: object, need: Access, access: AccessCheck) -> Caller:
    """Return who sent a call with this metadata. Raises Unauthenticated or Forbidden."""
    # The stubs know metadata as objects with two attributes; they are pairs.
    pairs = cast("tuple[tuple[str, str | bytes], ...]", metadata or ())
    return access.caller([value for name, value in pairs if name == HEADER], need)
