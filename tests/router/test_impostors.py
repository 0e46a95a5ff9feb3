"""Failure class 35: someone else listens at a node's address. He gets a hello, no secret, and no prompt; the cluster works on."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.build import Role
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.router.server import Router
from pdserve.rpc.secret import ATTACH_NODE, proof, stream_parts
from pdserve.v1 import node_pb2
from tests.router.client_calls import IDS, ask, collect, submits
from tests.router.scripted_node import ScriptedNode, Stage, digest_of, start_stage, until
from tests.rpc.recorder import Recorder, Script, only_listens, recording

pytestmark = pytest.mark.asyncio

SECRET = "a secret of the test"
OLD, NEW = b"the old secret of the test", b"the new secret of the test"
NUM_DIALS = 3

Send = Callable[[bytes], Awaitable[None]]


def challenge(nonce: bytes, given: bytes) -> bytes:
    return node_pb2.AttachResponse(challenge=node_pb2.NodeChallenge(nonce=nonce, proof=given)).SerializeToString()


async def hello_in(messages: AsyncIterator[bytes]) -> node_pb2.RouterHello:
    return node_pb2.AttachRequest.FromString(await anext(messages)).hello


async def says_garbage(messages: AsyncIterator[bytes], send: Send) -> None:
    await send(b"\xff\x00 no protobuf")
    await only_listens(messages, send)


async def echoes(messages: AsyncIterator[bytes], send: Send) -> None:
    async for message in messages:
        await send(message)


async def reflects_the_nonce(messages: AsyncIterator[bytes], send: Send) -> None:
    nonce = (await hello_in(messages)).nonce
    await send(challenge(nonce, nonce))
    await only_listens(messages, send)


async def proves_another_secret(messages: AsyncIterator[bytes], send: Send) -> None:
    hello = await hello_in(messages)
    parts = stream_parts(hello.nonce, b"m" * 32, hello.incarnation, hello.stream_number)
    await send(challenge(b"m" * 32, proof(b"a guess", ATTACH_NODE, *parts)))
    await only_listens(messages, send)


async def asks_for_nothing(messages: AsyncIterator[bytes], send: Send) -> None:
    await hello_in(messages)
    await send(challenge(b"", b""))
    await only_listens(messages, send)


async def asks_without_a_proof(messages: AsyncIterator[bytes], send: Send) -> None:
    await hello_in(messages)
    await send(challenge(b"m" * 32, b""))
    await only_listens(messages, send)


async def says_hello_at_once(messages: AsyncIterator[bytes], send: Send) -> None:
    impostor = ScriptedNode(Role.PREFILL, "")
    await send(node_pb2.AttachResponse(hello=impostor._hello()).SerializeToString())
    await only_listens(messages, send)


class RepeatsAnOldProof:
    """Answers every stream with what was right for the first."""

    def __init__(self) -> None:
        self.kept = b""

    async def __call__(self, messages: AsyncIterator[bytes], send: Send) -> None:
        hello = await hello_in(messages)
        if not self.kept:
            # What he heard on the wire: the proof of an honest node for a stream that had this nonce a bit earlier.
            parts = stream_parts(b"e" * 32, b"m" * 32, hello.incarnation, hello.stream_number)
            self.kept = challenge(b"m" * 32, proof(SECRET.encode(), ATTACH_NODE, *parts))
        await send(self.kept)
        await only_listens(messages, send)


IMPOSTORS: list[Script] = [
    *(only_listens, says_garbage, echoes, reflects_the_nonce, proves_another_secret, asks_for_nothing),
    *(asks_without_a_proof, says_hello_at_once, RepeatsAnOldProof()),
]


def assert_got_hellos_only(stranger: Recorder) -> None:
    """Whatever was sent to a stranger is a hello without anything secret, and gRPC's own headers."""
    assert set(stranger.methods) == {"/pdserve.v1.NodeService/Attach"}
    for message in stranger.messages:
        request = node_pb2.AttachRequest.FromString(message)
        assert request.WhichOneof("message") == "hello"
        told = {field.name for field, _ in request.hello.ListFields()}
        assert told == {"incarnation", "stream_number", "lease_s", "nonce"}
        assert len(request.hello.nonce) == 32
    nonces = [node_pb2.AttachRequest.FromString(message).hello.nonce for message in stranger.messages]
    assert len(set(nonces)) == len(nonces)
    assert {key for key, _ in stranger.metadata} <= {"user-agent", "grpc-accept-encoding", "accept-encoding", "te"}
    assert SECRET.encode() not in stranger.everything


@pytest.mark.parametrize("script", IMPOSTORS, ids=lambda script: getattr(script, "__name__", type(script).__name__))
async def test_an_impostor_gets_hellos_and_requests_go_to_honest_nodes(script: Script, tmp_path: Path) -> None:
    async with recording(script) as stranger:
        async with start_stage(tmp_path, prefill=stranger.address, cluster_secret=SECRET) as stage:
            stage.trust(SECRET.encode())
            await until(lambda: len(stranger.messages) >= NUM_DIALS)
            [member] = [each for each in stage.router.membership.members if each.address == stranger.address]
            await until(lambda: str(member.state) in ("down", "refused"))
            assert member.hello is None
        assert_got_hellos_only(stranger)


async def test_no_prompt_goes_to_an_impostor_beside_an_honest_node(tmp_path: Path) -> None:
    async with recording(says_hello_at_once) as stranger:
        honest = await ScriptedNode(Role.PREFILL, "", secret=ClusterSecret(SECRET.encode())).start()
        pool = f"{stranger.address},{honest.address}"
        async with start_stage(tmp_path, prefill=pool, cluster_secret=SECRET) as stage:
            honest.tokenizer_digest = digest_of(tmp_path / "model")
            stage.trust(SECRET.encode())
            stage.prefill[0], unused = honest, stage.prefill[0]
            await stage.until("ready", 2)
            await until(lambda: len(stranger.messages) >= NUM_DIALS)
            for _ in range(4):
                call = ask(stage)
                submit, _ = await submits(stage)
                honest.first_token(submit, IDS[0])
                stage.decode[0].adopted(submit)
                stage.decode[0].tokens(submit, 1, IDS[1:4], is_last=True)
                stage.decode[0].released(submit)
                honest.released(submit)
                _, ids, _ = await collect(call)
                assert ids == IDS[:4]
            await unused.stop()
        assert_got_hellos_only(stranger)


async def reasons(stage: Stage, number: int) -> set[tuple[str, str]]:
    """Wait until that many nodes are refused, and return how the router sees them."""
    await until(lambda: sum(bool(each.reason) for each in stage.router.membership.members) == number)
    return {(str(each.state), each.reason) for each in stage.router.membership.members}


async def test_a_router_with_a_secret_does_not_take_nodes_without_one(tmp_path: Path) -> None:
    async with start_stage(tmp_path, nodes_know=False, cluster_secret=SECRET) as stage:
        found = await reasons(stage, 2)
        assert found == {("refused", "it has no cluster secret, or another process listens at this address")}


async def test_a_router_without_a_secret_is_told_that_the_node_asks_for_one(tmp_path: Path) -> None:
    async with start_stage(tmp_path) as stage:
        await stage.until("ready", 2)
        stage.trust(SECRET.encode())
        stage.decode[0].hang_up()
        await until(lambda: "cluster secret" in stage.node_state(stage.decode[0])[1])
        assert stage.node_state(stage.decode[0])[0] == "down"


async def test_a_router_of_another_secret_says_so_and_gets_in_once_it_has_the_right_one(tmp_path: Path) -> None:
    async with start_stage(tmp_path, nodes_know=False, cluster_secret=SECRET) as stage:
        stage.trust(NEW)
        for node in (*stage.prefill, *stage.decode):
            await until(lambda node=node: "does not prove the cluster secret" in stage.node_state(node)[1])
            assert stage.node_state(node)[0] == "refused"
        secret_of(stage.router).replace(NEW)
        await stage.until("ready", 2)


def secret_of(router: Router) -> ClusterSecret:
    secret = router._settings.secret
    assert secret is not None
    return secret


STEPS: list[tuple[bytes, ...]] = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]


@pytest.mark.parametrize("router_first", [True, False], ids=["router first", "nodes first"])
async def test_a_secret_is_changed_step_by_step_and_every_stream_is_taken(router_first: bool, tmp_path: Path) -> None:
    async with start_stage(tmp_path, cluster_secret=OLD.decode()) as stage:
        stage.trust(OLD)
        await stage.until("ready", 2)

        async def all_attach_anew() -> None:
            for node in (*stage.prefill, *stage.decode):
                before = node.num_refused
                await node.attach_anew()
                assert node.num_refused == before
            await stage.until("ready", 2)

        for values in STEPS[1:]:
            changes: list[Callable[[], Any]] = [
                lambda values=values: secret_of(stage.router).replace(*values),  # type: ignore[misc] # bound now
                lambda values=values: stage.trust(*values),  # type: ignore[misc] # bound now
            ]
            for change in changes if router_first else reversed(changes):
                change()
                await all_attach_anew()
