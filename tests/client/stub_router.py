"""A router's public contract, served for real over gRPC, with an answer that a test scripts."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc

from pdserve.core.certificates import TlsFiles
from pdserve.core.errors import PdserveError
from pdserve.rpc.errors import abort_with
from pdserve.rpc.options import ServerBounds
from pdserve.rpc.server import GrpcServer
from pdserve.rpc.tls import tls_source
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc, timeline_pb2

NAME = "pdserve.v1.InferenceService"
MAX_MODEL_LEN = 64


def process(role: int) -> pb.ProcessInfo:
    return pb.ProcessInfo(role=pb.Role.ValueType(role), incarnation="ab" * 16, version="1", commit="c", dtype="float32")


SUMMARY = pb.Summary(
    request_id="label",
    model="m",
    usage=pb.Usage(prompt_tokens=3, cached_prompt_tokens=1, completion_tokens=3),
    timeline=timeline_pb2.Timeline(
        schema_version=1,
        e2el_s=2.0,
        ttft_s=0.5,
        tpot_s=0.75,
        stages=[
            timeline_pb2.Stage(
                name="prefill",
                attempt=1,
                duration_s=0.5,
                nodes=[timeline_pb2.NodeDuration(name="prefill.compute", duration_s=0.4)],
                hop_s=0.1,
            ),
            timeline_pb2.Stage(name="decode", attempt=1, duration_s=1.5),
        ],
        overlapped=timeline_pb2.Overlapped(
            kv_bytes=1 << 20,
            kv_frames=4,
            exposed_transfer_s=0.01,
            place_s=0.03,
            nodes=[timeline_pb2.NodeDuration(name="decode.queue", duration_s=0.04)],
        ),
        attempts=2,
        stalls=[timeline_pb2.Stall(attempt=1, cause="decode_lost", duration_s=0.2)],
    ),
    seed=7,
    processes=[process(1)],
)
ANSWER = (
    pb.GenerateResponse(deltas=[pb.Delta(text="Zwölf", token_ids=[5], logprobs=[-0.5])]),
    pb.GenerateResponse(deltas=[pb.Delta(text=" Bären", token_ids=[6, 7], logprobs=[-0.25, -0.125])]),
    pb.GenerateResponse(
        finished=[pb.Finished(reason=pb.FINISH_REASON_STOP, stop_token_id=7)],
        summary=SUMMARY,
    ),
)


class StubRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Answers every request with `answer`, then `error`, then, if `hangs`, nothing more until it is cancelled.

    As long as there are `refusals`, each refuses one request instead.
    """

    def __init__(self) -> None:
        self.answer: tuple[pb.GenerateResponse, ...] = ANSWER
        self.error: PdserveError | None = None
        self.refusals: deque[PdserveError] = deque()
        self.hangs = False
        self.requests: list[pb.GenerateRequest] = []
        self.deadlines_s: list[float | None] = []
        self.authorizations: list[str | bytes | None] = []
        """What each call said of itself, by any method."""
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()

    async def Generate(  # type: ignore[override] # a coroutine that writes; the stubs know generators only
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Answer as told. No generator: one that is cancelled at `yield` learns of it only when it is collected."""
        self._note(context)
        self.requests.append(request)
        self.asked.set()
        self.deadlines_s.append(context.time_remaining())
        if self.refusals:
            await abort_with(context, self.refusals.popleft())
        try:
            for message in self.answer:
                await context.write(message)
            if self.error is not None:
                await abort_with(context, self.error)
            if self.hangs:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        self._note(context)
        return pb.ListModelsResponse(
            models=[pb.Model(name="m", max_model_len=MAX_MODEL_LEN, vocab_size=9, has_chat_template=True)]
        )

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TokenizeResponse:
        """One token per word; its id is the word's length."""
        self._note(context)
        texts = [message.content for message in request.chat.messages] or [request.text]
        words = [word for text in texts for word in text.split()]
        return pb.TokenizeResponse(token_ids=[len(w) for w in words], tokens=words, max_model_len=MAX_MODEL_LEN)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DetokenizeResponse:
        """A word of x for every id."""
        self._note(context)
        return pb.DetokenizeResponse(text=" ".join("x" * token_id for token_id in request.token_ids))

    async def GetClusterState(
        self, request: pb.GetClusterStateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetClusterStateResponse:
        self._note(context)
        if self.refusals:
            await abort_with(context, self.refusals.popleft())
        return pb.GetClusterStateResponse(
            router=process(1),
            nodes=[
                pb.NodeView(address="127.0.0.1:1", state="ready", process=process(2), gauges={"prefill.waiting": 2.0}),
                pb.NodeView(address="127.0.0.1:2", state="down", reason="it hung up"),
            ],
            gauges={"sessions": 1.0},
            sessions=[pb.SessionView(session_id=4, request_id="label", state="DECODING", attempt=1, age_s=0.5)],
        )

    def _note(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.authorizations.append(dict(context.invocation_metadata() or ()).get("authorization"))


@contextlib.asynccontextmanager
async def stub_router(
    router: StubRouter | None = None, tls: TlsFiles | None = None
) -> AsyncIterator[tuple[StubRouter, str]]:
    """Serve a stub on a free port; yields it and its address."""
    router = router or StubRouter()
    server = GrpcServer("127.0.0.1", 0, bounds=ServerBounds(idle_s=None), tls=tls_source(tls))
    server.add(NAME, lambda to: inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, to))
    await server.start()
    await server.set_ready(True)
    try:
        yield router, f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)
