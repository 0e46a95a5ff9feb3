"""The public service: one coroutine per call, from bytes to bytes. It checks, admits, tokenizes, and writes what comes."""

import asyncio
from concurrent.futures import Executor
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from pdserve.core.build import ProcessInfo
from pdserve.core.clock import Clock
from pdserve.core.errors import NoNodes, PdserveError, SlowReader
from pdserve.router import journal, pb
from pdserve.router.admission import Admission
from pdserve.router.instructions import Answer, Fail
from pdserve.router.mailbox import Parcel
from pdserve.router.membership import Membership
from pdserve.router.output import OutputText
from pdserve.router.placement import length_limits
from pdserve.router.request import GenerateCall, TextInput, TokenInput, ValidRequest
from pdserve.router.sessions import OpenSession, Sessions
from pdserve.router.timeline import TimelineRecorder
from pdserve.router.tokenizer import TextModel
from pdserve.router.validation import input_field, label_fault, resolve_max_tokens, validate
from pdserve.rpc.errors import abort_with
from pdserve.rpc.process_gauges import process_gauges
from pdserve.v1 import inference_pb2

CLIENT_STALL_S = 60.0
"""Time for which a client may leave a message with the transport; what waits meanwhile is bounded in bytes."""
SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
MAX_INLINE_CHARS = 4096
"""Texts up to this length are tokenized on the event loop (well under a millisecond); longer ones on a thread."""
MAX_SESSION_ROWS = 1000

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceFront:
    """Serves Generate, ListModels and GetClusterState.

    Requests arrive as bytes, so that those that do not parse are refused by name like all others.
    """

    def __init__(
        self,
        process: ProcessInfo,
        model: TextModel,
        membership: Membership,
        admission: Admission,
        sessions: Sessions,
        clock: Clock,
        threads: Executor,
        max_message_bytes: int,
    ) -> None:
        self._process, self._model, self._membership = process, model, membership
        self._admission, self._sessions, self._clock = admission, sessions, clock
        self._threads, self._max_message_bytes = threads, max_message_bytes
        self._num_clients = 0

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to `server`."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, request_deserializer=bytes, response_serializer=_to_bytes
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models,
                request_deserializer=inference_pb2.ListModelsRequest.FromString,
                response_serializer=_to_bytes,
            ),
            "GetClusterState": grpc.unary_unary_rpc_method_handler(
                self.get_cluster_state,
                request_deserializer=inference_pb2.GetClusterStateRequest.FromString,
                response_serializer=_to_bytes,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def generate(self, raw: bytes, context: Context) -> None:
        """Answer one prompt.

        Written with `context.write`, not as a generator: a cancelled call ends a coroutine here and now, a generator only
        when it is collected.
        """
        received_s = self._clock.now_s()
        self._num_clients += 1
        label = ""
        entry: OpenSession | None = None
        try:
            call = pb.parse_generate(raw, self._max_message_bytes)
            label = call.request_id if label_fault(call.request_id) is None else ""
            entry = await self._open(call, context, received_s)
            await self._answer(entry, context)
        except PdserveError as error:
            if entry is None:
                journal.refused(label, error)
            await abort_with(context, error)
        finally:
            self._num_clients -= 1
            if entry is not None:
                self._sessions.client_left(entry)

    async def list_models(self, request: Message, context: Context) -> Message:  # noqa: ARG002 - gRPC's signature
        """Name the served model."""
        limits = length_limits(self._membership.loads())
        served = self._model.served
        max_len = 0 if limits is None else limits.longest
        return pb.models_response(served.name, max_len, served.vocab_size, served.has_chat_template)

    async def get_cluster_state(self, request: Message, context: Context) -> Message:  # noqa: ARG002
        """Show the pools, their load and the open sessions."""
        gauges = self.gauges() | self._sessions.gauges() | self._membership.gauges() | process_gauges()
        rows = self._sessions.rows(MAX_SESSION_ROWS)
        return pb.cluster_response(self._process, self._membership.rows(), gauges, rows)

    def gauges(self) -> dict[str, float]:
        """Return what the front itself holds, and whether it takes new work."""
        return {
            "clients": float(self._num_clients),
            "violations": float(len(self._sessions.check_invariants())),
            "draining": float(self._admission.is_draining),
        }

    async def _open(self, call: GenerateCall, context: Context, received_s: float) -> OpenSession:
        """Check, admit and tokenize a request, and open its session."""
        request = validate(call, self._model.served)
        timeline = TimelineRecorder(received_s)
        remaining_s = cast("float | None", context.time_remaining())  # None without a deadline, whatever the stubs say
        self._admission.admit(self._sessions.num_waiting)
        try:
            limits = length_limits(self._membership.loads())
            if limits is not None:
                self._model.check_size(request.input, limits.longest)
            prompt_ids = await self._encode(request)
            max_tokens = self._max_tokens(request, len(prompt_ids))
        except BaseException:  # a cancelled call leaves as well
            self._admission.leave(self._clock.now_s())
            raise
        return self._sessions.open(
            request,
            prompt_ids,
            max_tokens,
            OutputText(self._model.detokenizer(), request.stop),
            timeline,
            received_s,
            None if remaining_s is None else received_s + remaining_s,
        )

    async def _encode(self, request: ValidRequest) -> tuple[int, ...]:
        match request.input:
            case TokenInput(ids):
                return ids
            case TextInput(text) if len(text) <= MAX_INLINE_CHARS:
                return self._model.encode(request.input)
            case given:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._model.encode, given)

    def _max_tokens(self, request: ValidRequest, num_prompt_ids: int) -> int:
        limits = length_limits(self._membership.loads())
        if limits is None:
            raise NoNodes(
                "no prefill and decode node of equal identity are ready",
                hint=self._membership.why_empty(),
                retry_after_s=1.0,
            )
        return resolve_max_tokens(num_prompt_ids, request.max_tokens, limits, input_field(request.input))

    async def _answer(self, entry: OpenSession, context: Context) -> None:
        """Write what comes until the answer ends. Raises the session's error if it ends badly."""
        is_whole = not entry.request.stream
        while True:
            parcel = await entry.mailbox.take(whole=is_whole)
            if isinstance(parcel.end, Fail) and (is_whole or not parcel.gains):
                raise parcel.end.error
            for piece in (parcel,) if is_whole else pb.prompt_pieces(parcel):
                await self._write(context, pb.response(piece, self._closing(entry, piece)))
            if isinstance(parcel.end, Fail):
                raise parcel.end.error
            if parcel.end is not None:
                return

    async def _write(self, context: Context, message: Message) -> None:
        """Hand a message to the transport; raise SlowReader if the client takes nothing for too long."""
        try:
            async with asyncio.timeout(CLIENT_STALL_S):
                await context.write(message)
        except TimeoutError:
            raise SlowReader(f"the client read nothing for {CLIENT_STALL_S:g} s", hint="read the stream") from None

    def _closing(self, entry: OpenSession, parcel: Parcel) -> pb.Closing:
        nodes = entry.processes if isinstance(parcel.end, Answer) else ()
        return pb.Closing(entry.request, (self._process, *nodes))


def _to_bytes(message: Message) -> bytes:
    return message.SerializeToString()
