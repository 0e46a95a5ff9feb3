"""A node whose Attach stream is real and whose words are the test's, and a router in the test's own process."""

import asyncio
import contextlib
import hashlib
import inspect
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pdserve.core.build import Role
from pdserve.core.certificates import TlsFiles, TlsMaterial
from pdserve.core.clock import SystemClock
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import PdserveError
from pdserve.core.ids import new_incarnation
from pdserve.core.router_settings import RouterSettings
from pdserve.core.settings import load_settings
from pdserve.node.greeting import Greetings
from pdserve.router.server import Router
from pdserve.rpc.errors import abort_with
from pdserve.rpc.options import channel_options
from pdserve.rpc.tls import TlsSource, open_async_channel, server_credentials
from pdserve.v1 import inference_pb2, inference_pb2_grpc, node_pb2
from tests.router.models import write_model_folder

DEADLINE_S = 30.0
Context = grpc.aio.ServicerContext[Any, Any]

COMMITTED: dict[bytes, list[node_pb2.FirstToken]] = {}
"""First tokens of each transfer that a scripted prefill node made, for the decode node: real ones get them with COMMIT."""


@dataclass
class ScriptedNode:
    """Serves Attach: what the router says lands in `heard`; what the test puts in with `say` goes out."""

    role: Role
    tokenizer_digest: str
    incarnation: bytes = field(default_factory=new_incarnation)
    max_model_len: int = 1000
    num_blocks: int = 100
    weight_digest: str = "w"
    wire_dtype: str = "float32"
    refusal: PdserveError | None = None
    secret: ClusterSecret | None = None
    lease_s: float = 3.0
    step_age_s: float = 0.0
    is_silent: bool = False
    links_up: bool = True
    num_streams: int = 0
    num_refused: int = 0
    num_beats: int = 0
    port: int = 0
    tls: TlsFiles | None = None
    spoken: list[node_pb2.StepOutput] = field(default_factory=list)
    heard: "asyncio.Queue[node_pb2.AttachRequest]" = field(default_factory=asyncio.Queue)
    _words: "asyncio.Queue[node_pb2.AttachResponse | None]" = field(default_factory=asyncio.Queue)
    _server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> "ScriptedNode":
        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            self.attach,
            request_deserializer=node_pb2.AttachRequest.FromString,
            response_serializer=node_pb2.AttachResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler("pdserve.v1.NodeService", {"Attach": handler})
        self._server.add_generic_rpc_handlers((service,))
        where = f"127.0.0.1:{self.port}"
        if self.tls is None:
            self.port = self._server.add_insecure_port(where)
        else:
            self.port = self._server.add_secure_port(where, server_credentials(TlsSource(self.tls)))
        await self._server.start()
        return self

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def attach(self, request_iterator: AsyncIterator[node_pb2.AttachRequest], context: Context) -> None:
        if self.refusal is not None:
            self.num_refused += 1
            await abort_with(context, self.refusal)
        try:
            await Greetings(self.secret, DEADLINE_S).greet(request_iterator, context.write)
        except PdserveError as error:
            self.num_refused += 1
            await abort_with(context, error)
        self.num_streams += 1
        self._words = asyncio.Queue()
        words = self._words
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._listen(request_iterator))
            beating = tasks.create_task(self._beat(context))
            await context.write(node_pb2.AttachResponse(hello=self._hello()))
            while (word := await words.get()) is not None:
                await context.write(word)
            reading.cancel()
            beating.cancel()

    async def _listen(self, requests: AsyncIterator[node_pb2.AttachRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("message") == "beat":
                self.num_beats += 1
            else:
                self.heard.put_nowait(request)
            if request.WhichOneof("message") == "peers" and self.links_up:
                connected = [peer.incarnation for peer in request.peers.nodes]
                self.say(status=node_pb2.NodeStatus(connected_peers=connected, num_free_blocks=self.num_blocks))
        self._words.put_nowait(None)

    async def _beat(self, context: Context) -> None:
        while not self.is_silent:
            self._words.put_nowait(node_pb2.AttachResponse(beat=node_pb2.Beat(running_step_age_s=self.step_age_s)))
            await asyncio.sleep(0.1)

    def _hello(self) -> node_pb2.NodeHello:
        process = inference_pb2.ProcessInfo(
            role=inference_pb2.Role.ValueType(self.role), incarnation=self.incarnation.hex(), block_size=16
        )
        identity = node_pb2.Identity(weight_digest=self.weight_digest, tokenizer_digest=self.tokenizer_digest)
        capabilities = node_pb2.Capabilities(compute_dtype="float32", kv_dtype="float32", wire_dtypes=[self.wire_dtype])
        return node_pb2.NodeHello(
            process=process,
            identity=identity,
            capabilities=capabilities,
            kv_endpoints=[node_pb2.KvEndpoint(address="tcp://127.0.0.1:1")] if self.role is Role.DECODE else [],
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            lease_s=self.lease_s,
            eos_token_ids=[2],
        )

    @property
    def has_spoken(self) -> bool:
        """Whether the stream took everything that was said."""
        return self._words.empty()

    def hang_up(self) -> None:
        """Close the stream, which must stand."""
        assert self.num_streams, "nobody is attached"
        self._words.put_nowait(None)

    async def attach_anew(self) -> None:
        """Close the stream, and wait for the next one."""
        before = self.num_streams
        self.hang_up()
        await until(lambda: self.num_streams > before)

    def say(self, **message: Any) -> None:
        """Send one message of the stream."""
        self._words.put_nowait(node_pb2.AttachResponse(**message))

    def step(self, tokens: Iterable[node_pb2.SequenceTokens] = (), events: Iterable[node_pb2.LegEvent] = ()) -> None:
        """Send what happened in one step, and keep it."""
        self.spoken.append(node_pb2.StepOutput(tokens=tokens, events=events))
        self.say(step=self.spoken[-1])

    def first_token(self, submit: node_pb2.Submit, token_id: int) -> None:
        token = node_pb2.FirstToken(index=len(submit.output_ids), token_id=token_id, logprob=-0.5)
        self._commit(
            submit, node_pb2.LegFirstToken(tokens=[token], num_cached_tokens=0, durations_s={"prefill.compute": 0.0})
        )

    def first_tokens(self, submit: node_pb2.Submit, ids: Iterable[int], num_cached_tokens: int = 0) -> None:
        """Say the first token of every sequence of a submit, each with itself as the only alternative."""
        tokens = [
            node_pb2.FirstToken(
                sequence=submit.first_sequence + place,
                index=len(submit.output_ids),
                token_id=token_id,
                logprob=-0.5,
                top_logprobs=alternatives(token_id),
            )
            for place, token_id in enumerate(ids)
        ]
        self._commit(submit, node_pb2.LegFirstToken(tokens=tokens, num_cached_tokens=num_cached_tokens))

    def _commit(self, submit: node_pb2.Submit, event: node_pb2.LegFirstToken) -> None:
        COMMITTED[submit.transfer_id] = list(event.tokens)
        self.step(events=[leg(submit, first_token=event)])

    def adopted(self, submit: node_pb2.Submit) -> None:
        """Say so with the first tokens, if the prefill node said any: the two nodes' streams may arrive in either order."""
        self.step(events=[leg(submit, adopted=node_pb2.LegAdopted(tokens=COMMITTED.get(submit.transfer_id, [])))])

    def tokens(
        self, submit: node_pb2.Submit, first_index: int, ids: list[int], *, is_last: bool = False, sequence: int = 0
    ) -> None:
        finish = inference_pb2.FINISH_REASON_LENGTH if is_last else inference_pb2.FINISH_REASON_UNSPECIFIED
        self.step(
            tokens=[
                node_pb2.SequenceTokens(
                    session_id=submit.session_id,
                    attempt=submit.attempt,
                    sequence=sequence,
                    first_index=first_index,
                    token_ids=ids,
                    logprobs=[-0.5] * len(ids),
                    finish_reason=finish,
                    top_logprobs=[alternatives(token_id) for token_id in ids] if submit.top_logprobs else [],
                )
            ]
        )

    def released(
        self,
        submit: node_pb2.Submit | node_pb2.Cancel,
        outcome: int = node_pb2.LEG_OUTCOME_FINISHED,
        reason: str = "scripted",
    ) -> None:
        ended = node_pb2.LegEnded(outcome=node_pb2.LegOutcome.ValueType(outcome), reason=reason)
        self.step(events=[leg(submit, ended=ended), leg(submit, released=node_pb2.LegReleased())])

    async def next_of(self, kind: str) -> Any:
        """Return the next message of that kind; earlier others are passed over."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                request = await self.heard.get()
                if request.WhichOneof("message") == kind:
                    return getattr(request, kind)


def alternatives(token_id: int) -> inference_pb2.TopLogprobs:
    return inference_pb2.TopLogprobs(token_ids=[token_id], logprobs=[-0.5])


def leg(submit: node_pb2.Submit | node_pb2.Cancel, **event: Any) -> node_pb2.LegEvent:
    return node_pb2.LegEvent(session_id=submit.session_id, attempt=submit.attempt, **event)


class Stage:
    """A router between scripted nodes, with a client's stub."""

    def __init__(self, router: Router, prefill: list[ScriptedNode], decode: list[ScriptedNode]) -> None:
        self.router = router
        self.prefill, self.decode = prefill, decode
        self.stop, self.stop_now = asyncio.Event(), asyncio.Event()
        self.channel = grpc.aio.insecure_channel("127.0.0.1:1")
        self.stub: inference_pb2_grpc.InferenceServiceAsyncStub

    async def until(self, state: str, number: int) -> None:
        """Wait until that many nodes are in that state."""

        def count() -> int:
            return sum(str(member.state) == state for member in self.router.membership.members)

        await until(lambda: count() == number)

    def node_state(self, node: ScriptedNode) -> tuple[str, str]:
        """Return how the router sees a node, and why."""
        member = next(member for member in self.router.membership.members if member.address == node.address)
        return str(member.state), member.reason

    def trust(self, *values: bytes) -> None:
        """Give every scripted node a secret."""
        for node in (*self.prefill, *self.decode):
            node.secret = ClusterSecret(*values)

    def gauges(self) -> dict[str, float]:
        return {**self.router.sessions.gauges(), **self.router.membership.gauges()}

    async def leak_oracle(self) -> None:
        """Wait until nothing is under way; every gauge but the counters is back at zero."""

        def left() -> dict[str, float]:
            return {
                name: value
                for name, value in self.gauges().items()
                if value and not name.endswith("_total") and not name.startswith("nodes.")
            }

        try:
            await until(lambda: not left())
        except TimeoutError:
            raise AssertionError(f"left: {left()}") from None
        assert self.router.sessions.check_invariants() == []


async def until(condition: Any) -> None:
    """Wait until the condition holds, at most `DEADLINE_S`."""
    async with asyncio.timeout(DEADLINE_S):
        while not await _truth(condition):  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def start_stage(
    folder: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    node_tls: TlsFiles | None = None,
    trust: TlsMaterial | None = None,
    nodes_know: bool = True,
    **given: Any,
) -> AsyncIterator[Stage]:
    """Run a router and its scripted nodes; check at the end that nothing is left.

    `trust`: the stub's TLS, if it has any. `nodes_know`: whether nodes have the router's cluster secret.
    """
    model = write_model_folder(folder / "model")
    digest = digest_of(model)
    secret = ClusterSecret(given["cluster_secret"].encode()) if nodes_know and "cluster_secret" in given else None

    async def nodes(role: Role, number: int) -> list[ScriptedNode]:
        return [await ScriptedNode(role, digest, tls=node_tls, secret=secret).start() for _ in range(number)]

    prefill, decode = await nodes(Role.PREFILL, num_prefill), await nodes(Role.DECODE, num_decode)
    settings = load_settings(
        RouterSettings,
        {
            "port": 0,
            "model": str(model),
            "prefill": ",".join(node.address for node in prefill) or None,
            "decode": ",".join(node.address for node in decode) or None,
            "lease_s": 1.0,
            "beat_s": 0.1,
            "drain_s": 10.0,
            **given,
        },
    )
    stage = Stage(Router(settings, SystemClock()), prefill, decode)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stage.router.run(stage.stop, stage.stop_now))
        await until(lambda: stage.router.server.port)
        address = f"127.0.0.1:{stage.router.server.port}"
        try:
            async with open_async_channel(address, trust, channel_options()) as channel:
                stage.channel = channel
                stage.stub = inference_pb2_grpc.InferenceServiceStub(channel)
                yield stage
        finally:
            stage.stop.set()
            stage.stop_now.set()
            await running
            for node in (*prefill, *decode):
                await node.stop()


async def _truth(condition: Any) -> bool:
    value = condition()
    return bool(await value if inspect.isawaitable(value) else value)


def digest_of(folder: Path) -> str:
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
