"""One connection to a router, for asyncio."""

import random
import time
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import pb as translate
from pdserve.client.answer import Answer, Tokens
from pdserve.client.async_answer import AsyncAnswerStream, AsyncCourse
from pdserve.client.channels import CALL_TIMEOUT_S, Metadata, key_metadata, open_async_channel
from pdserve.client.checks import check_address, check_request
from pdserve.client.cluster import ClusterState, ModelCard
from pdserve.client.failures import error_of
from pdserve.client.many import MAX_CONCURRENCY, complete_many_async
from pdserve.client.pb_request import detokenize_to_pb, request_to_pb, tokenize_to_pb
from pdserve.client.request import Chat, Options, Prompt
from pdserve.client.retries import RetryPolicy, Tries
from pdserve.client.tls import Tls
from pdserve.v1 import inference_pb2, inference_pb2_grpc

Asked_contra = TypeVar("Asked_contra", contravariant=True)
Told_co = TypeVar("Told_co", covariant=True)
Q = TypeVar("Q")
T = TypeVar("T")


class Method(Protocol[Asked_contra, Told_co]):
    """A short call of the stub."""

    def __call__(
        self, request: Asked_contra, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> Awaitable[Told_co]:
        """Ask, and return what the answer can be awaited of."""
        ...


class AsyncClient:
    """A router's public contract. Use as `async with AsyncClient("127.0.0.1:50051") as client`.

    Every method raises a `PdserveError`: the router's own, or Unreachable when no router answers at the address. The constructor
    raises InvalidRequest for an address that is not HOST:PORT. `tls` makes it speak TLS (ConfigError for files of no use);
    `root_certificates` is the short form for authorities at hand, PEM. `api_key` goes with every call, in the clear without TLS.
    `retry` says how often an answer of which nothing came is asked for again. A client belongs to one event loop.
    `sleep` and `chance` (a number in [0, 1)) stand in for time and luck in tests.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        root_certificates: bytes | None = None,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        check_address(address)
        self.address = address
        self._metadata = key_metadata(api_key)
        self._retry = retry or RetryPolicy()
        self._sleep, self._chance = sleep, chance
        self._speaks_tls = tls is not None or root_certificates is not None
        self._channel = open_async_channel(address, tls, root_certificates)
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

    def generate(self, prompt: Prompt, options: Options | None = None, *, stream: bool = True) -> AsyncAnswerStream:
        """Return the answer's parts as they will arrive; the call is made when the first is asked for.

        With `stream` false all parts arrive at once. Raises InvalidRequest at once for what the contract cannot carry; the
        iteration raises the router's error, and InternalError if the stream ends without its summary.
        """
        options = options or Options()
        check_request(prompt, options)
        request = request_to_pb(prompt, options, stream=stream)
        course = AsyncCourse(
            start=lambda timeout_s: self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata),
            address=self.address,
            speaks_tls=self._speaks_tls,
            tries=Tries(self._retry, time.monotonic(), options.timeout_s),
            chance=self._chance,
            sleep=self._sleep,
        )
        return AsyncAnswerStream(course)

    async def complete(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """Return the whole answer, asked for in one message."""
        async with self.generate(prompt, options, stream=False) as parts:
            return await parts.whole()

    async def complete_many(
        self, prompts: Iterable[Prompt], options: Options | None = None, *, concurrency: int = MAX_CONCURRENCY
    ) -> list[Answer]:
        """Return the answers to many prompts, in their order, at most `concurrency` of them under way at once.

        The first failure cancels what is under way and is raised.
        """
        return await complete_many_async(lambda prompt: self.complete(prompt, options), prompts, concurrency)

    async def tokenize(self, prompt: str | Chat, *, model: str = "", add_special_tokens: bool | None = None) -> Tokens:
        """Return the tokens that `generate` would compute for the same prompt."""
        request = tokenize_to_pb(prompt, model, add_special_tokens)
        return translate.tokens_from_pb(await self._short(self._stub.Tokenize, request))

    async def detokenize(
        self, token_ids: Iterable[int], *, model: str = "", show_special_tokens: bool | None = None
    ) -> str:
        """Return the text of token ids; bytes that are no UTF-8 are U+FFFD."""
        request = detokenize_to_pb(tuple(token_ids), model, show_special_tokens)
        return (await self._short(self._stub.Detokenize, request)).text

    async def models(self) -> tuple[ModelCard, ...]:
        """Return the models that the router serves."""
        request = inference_pb2.ListModelsRequest()
        return translate.models_from_pb(await self._short(self._stub.ListModels, request))

    async def cluster_state(self) -> ClusterState:
        """Return the router's view of its nodes and sessions."""
        request = inference_pb2.GetClusterStateRequest()
        answer = await self._short(self._stub.GetClusterState, request)
        return translate.cluster_from_pb(answer)

    async def is_ready(self) -> bool:
        """Return whether the router says that it can serve; False also when nothing answers."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _short(self, method: Method[Q, T], request: Q) -> T:
        try:
            return await method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(self.address, error, speaks_tls=self._speaks_tls) from None
