"""One connection to a router."""

import time
from collections.abc import AsyncGenerator, Awaitable
from types import TracebackType
from typing import Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import pb as translate
from pdserve.client.answer import Answer, ClusterState, Delta, Finished, ModelCard, Summary
from pdserve.client.checks import check_address, check_request
from pdserve.client.request import Options, Prompt
from pdserve.client.unreachable import unreachable
from pdserve.core.errors import DeadlineExceeded, InternalError, InvalidRequest, PdserveError
from pdserve.rpc.errors import error_from_rpc
from pdserve.rpc.options import channel_options
from pdserve.v1 import inference_pb2, inference_pb2_grpc

CALL_TIMEOUT_S = 10.0
"""Deadline of the short calls; `generate` has the one that its options give, or none."""

T = TypeVar("T")


class Client:
    """A router's public contract. Use as `async with Client("127.0.0.1:50051") as client`.

    Every method raises a `PdserveError`: the router's own, or Unreachable when no router answers at the address. The constructor
    raises InvalidRequest for an address that is not HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        check_address(address)
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(64 << 20))
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls still running are cancelled."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, options: Options | None = None, *, stream: bool = True
    ) -> AsyncGenerator[Delta | Finished | Summary, None]:
        """Yield the parts of the answer as they arrive; the summary is the last one.

        Leaving the iteration early (`aclose`, cancellation) cancels the call on the router. With `stream` false all parts
        arrive at once. Raises InvalidRequest for what the contract cannot carry, and InternalError if the stream ends without
        its summary.
        """
        options = options or Options()
        check_request(prompt, options)
        try:
            request = translate.request_to_pb(prompt, options, stream=stream)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        began_s = time.monotonic()
        call = self._stub.Generate(request, timeout=options.timeout_s)
        is_complete = has_begun = False
        try:
            async for message in call:
                arrival_s = time.monotonic() - began_s
                for part in translate.parts_from_pb(message, arrival_s):
                    has_begun, is_complete = True, isinstance(part, Summary)
                    yield part
        except grpc.aio.AioRpcError as error:
            raise self._error(error, has_begun=has_begun) from None
        finally:
            call.cancel()
        if not is_complete:
            raise InternalError("the answer ended without a summary", hint="the router broke its contract; see its log")

    async def complete(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """Return the whole answer, asked for in one message."""
        answer = Answer()
        async for part in self.generate(prompt, options, stream=False):
            answer.add(part)
        return answer

    async def models(self) -> tuple[ModelCard, ...]:
        """Return the models that the router serves."""
        request = inference_pb2.ListModelsRequest()
        return translate.models_from_pb(await self._short(self._stub.ListModels(request, timeout=CALL_TIMEOUT_S)))

    async def cluster_state(self) -> ClusterState:
        """Return the router's view of its nodes and sessions."""
        request = inference_pb2.GetClusterStateRequest()
        answer = await self._short(self._stub.GetClusterState(request, timeout=CALL_TIMEOUT_S))
        return translate.cluster_from_pb(answer)

    async def is_ready(self) -> bool:
        """Return whether the router says that it can serve; False also when nothing answers."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _short(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    def _error(self, error: grpc.aio.AioRpcError, *, has_begun: bool = False) -> PdserveError:
        lost = unreachable(self.address, error, has_begun=has_begun)
        if lost is not None:
            return lost
        typed = error_from_rpc(error)
        if isinstance(typed, DeadlineExceeded) and not typed.hint:
            return DeadlineExceeded("the deadline passed before the answer was complete", hint="allow more time")
        return typed
