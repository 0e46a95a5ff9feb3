"""The public gRPC service: one coroutine per call, from bytes to bytes. What it does for a client is in `answering`."""

from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from pdserve.core.api_keys import Caller
from pdserve.core.errors import PdserveError
from pdserve.router import pb, pb_text
from pdserve.router.access import Access, AccessCheck
from pdserve.router.answering import Answering, Reply
from pdserve.router.grpc_guard import caller_of
from pdserve.router.instructions import Fail
from pdserve.router.request import GenerateCall
from pdserve.router.text_calls import TextCalls
from pdserve.router.views import MAX_SESSION_ROWS
from pdserve.rpc.errors import abort_with
from pdserve.v1 import inference_pb2

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceFront:
    """Serves Generate, Tokenize, Detokenize, ListModels and GetClusterState.

    Requests arrive as bytes, so that those that do not parse are refused by name like all others. `grpc_guard` stands before it.
    """

    def __init__(self, answering: Answering, texts: TextCalls, access: AccessCheck, max_message_bytes: int) -> None:
        self._answering, self._texts, self._access = answering, texts, access
        self._max_message_bytes = max_message_bytes

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to `server`."""
        unary = {
            "Tokenize": self.tokenize,
            "Detokenize": self.detokenize,
            "ListModels": self.list_models,
            "GetClusterState": self.get_cluster_state,
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(method, request_deserializer=bytes, response_serializer=_to_bytes)
            for name, method in unary.items()
        }
        handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
            self.generate, request_deserializer=bytes, response_serializer=_to_bytes
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def generate(self, raw: bytes, context: Context) -> None:
        """Answer one prompt.

        Written with `context.write`, not as a generator: a cancelled call ends a coroutine here and now, a generator only
        when it is collected.
        """
        answering = self._answering
        received_s = answering.clock.now_s()
        remaining_s = cast("float | None", context.time_remaining())  # None without a deadline, whatever the stubs say
        deadline_s = None if remaining_s is None else received_s + remaining_s
        with answering.client():
            try:
                caller = caller_of(context.invocation_metadata(), Access.USE, self._access)
                call = self._parsed(raw, caller)
                async with answering.session(call, caller, received_s, deadline_s) as reply:
                    await self._answer(reply, context)
            except PdserveError as error:
                await abort_with(context, error)

    async def tokenize(self, raw: bytes, context: Context) -> Message:
        """Return the token ids of an input."""
        try:
            call = pb_text.parse_tokenize(raw, self._max_message_bytes)
            return pb_text.tokenized_to_pb(await self._texts.tokenize(call))
        except PdserveError as error:
            await abort_with(context, error)

    async def detokenize(self, raw: bytes, context: Context) -> Message:
        """Return the text of token ids."""
        try:
            call = pb_text.parse_detokenize(raw, self._max_message_bytes)
            return inference_pb2.DetokenizeResponse(text=await self._texts.detokenize(call))
        except PdserveError as error:
            await abort_with(context, error)

    async def list_models(self, raw: bytes, context: Context) -> Message:  # noqa: ARG002 - gRPC's signature
        """Name the served model."""
        served = self._answering.model.served
        return pb.models_response(
            served.name, self._answering.max_model_len, served.vocab_size, served.has_chat_template
        )

    async def get_cluster_state(self, raw: bytes, context: Context) -> Message:  # noqa: ARG002
        """Show the pools, their load and the open sessions."""
        answering = self._answering
        rows = answering.sessions.rows(MAX_SESSION_ROWS)
        return pb.cluster_response(answering.process, answering.membership.rows(), answering.all_gauges(), rows)

    def _parsed(self, raw: bytes, caller: Caller) -> GenerateCall:
        try:
            return pb.parse_generate(raw, self._max_message_bytes)
        except PdserveError as error:
            self._answering.refused("", error, caller.owner)
            raise

    async def _answer(self, reply: Reply, context: Context) -> None:
        """Write what comes until the answer ends. Raises the session's error if it ends badly, SlowReader if nobody reads it."""
        while True:
            parcel = await reply.take()
            closing = pb.Closing(reply.request, reply.processes)
            if reply.request.stream:
                for piece in pb.prompt_pieces(parcel):
                    await context.write(pb.response(piece, closing))
            else:
                whole = await self._answering.put_into_words(parcel.num_entries, partial(pb.response, parcel, closing))
                await context.write(whole)
            if isinstance(parcel.end, Fail):
                raise parcel.end.error
            if parcel.end is not None:
                return


def _to_bytes(message: Message) -> bytes:
    return message.SerializeToString()
