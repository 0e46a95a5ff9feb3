"""One connection to a router, for programs without an event loop; gRPC's own plain stubs do the waiting."""

import random
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import pb as translate
from pdserve.client.answer import Answer, Tokens
from pdserve.client.answer_stream import AnswerStream, Course
from pdserve.client.channels import CALL_TIMEOUT_S, Metadata, key_metadata, open_channel
from pdserve.client.checks import check_address, check_request
from pdserve.client.cluster import ClusterState, ModelCard
from pdserve.client.failures import error_of
from pdserve.client.many import MAX_CONCURRENCY, complete_many
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
        self, request: Asked_contra, timeout: float | None = None, metadata: Metadata | None = None
    ) -> Told_co:
        """Ask, and wait for the answer."""
        ...


class Client:
    """A router's public contract, without an event loop. Use as `with Client("127.0.0.1:50051") as client`.

    Any number of threads may share a client. It does not survive a fork: make it in the process that uses it. Errors, `retry`,
    `tls`, `api_key`, `root_certificates`, `sleep` and `chance` are those of `AsyncClient`.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        root_certificates: bytes | None = None,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], object] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        check_address(address)
        self.address = address
        self._metadata = key_metadata(api_key)
        self._retry = retry or RetryPolicy()
        self._sleep, self._chance = sleep, chance
        self._speaks_tls = tls is not None or root_certificates is not None
        self._channel = open_channel(address, tls, root_certificates)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls still running are cancelled."""
        self._channel.close()

    def generate(self, prompt: Prompt, options: Options | None = None, *, stream: bool = True) -> AnswerStream:
        """Return the answer's parts as they will arrive; the call is made when the first is asked for.

        With `stream` false all parts arrive at once. Raises InvalidRequest at once for what the contract cannot carry; the
        iteration raises the router's error, and InternalError if the stream ends without its summary.
        """
        options = options or Options()
        check_request(prompt, options)
        request = request_to_pb(prompt, options, stream=stream)
        course = Course(
            start=lambda timeout_s: self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata),
            address=self.address,
            speaks_tls=self._speaks_tls,
            tries=Tries(self._retry, time.monotonic(), options.timeout_s),
            chance=self._chance,
            sleep=self._sleep,
        )
        return AnswerStream(course)

    def complete(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """Return the whole answer, asked for in one message."""
        with self.generate(prompt, options, stream=False) as parts:
            return parts.whole()

    def complete_many(
        self, prompts: Iterable[Prompt], options: Options | None = None, *, concurrency: int = MAX_CONCURRENCY
    ) -> list[Answer]:
        """Return the answers to many prompts, in their order, at most `concurrency` of them under way at once, a thread each.

        The first failure cancels what is under way and is raised.
        """
        return complete_many(lambda prompt: self.generate(prompt, options, stream=False), prompts, concurrency)

    def tokenize(self, prompt: str | Chat, *, model: str = "", add_special_tokens: bool | None = None) -> Tokens:
        """Return the tokens that `generate` would compute for the same prompt."""
        return translate.tokens_from_pb(
            self._short(self._stub.Tokenize, tokenize_to_pb(prompt, model, add_special_tokens))
        )

    def detokenize(self, token_ids: Iterable[int], *, model: str = "", show_special_tokens: bool | None = None) -> str:
        """Return the text of token ids; bytes that are no UTF-8 are U+FFFD."""
        request = detokenize_to_pb(tuple(token_ids), model, show_special_tokens)
        return self._short(self._stub.Detokenize, request).text

    def models(self) -> tuple[ModelCard, ...]:
        """Return the models that the router serves."""
        return translate.models_from_pb(self._short(self._stub.ListModels, inference_pb2.ListModelsRequest()))

    def cluster_state(self) -> ClusterState:
        """Return the router's view of its nodes and sessions."""
        request = inference_pb2.GetClusterStateRequest()
        return translate.cluster_from_pb(self._short(self._stub.GetClusterState, request))

    def is_ready(self) -> bool:
        """Return whether the router says that it can serve; False also when nothing answers."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _short(self, method: Method[Q, T], request: Q) -> T:
        try:
            return method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of(self.address, error, speaks_tls=self._speaks_tls) from None
