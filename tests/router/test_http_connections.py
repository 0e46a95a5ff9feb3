"""What the HTTP port does to connections that say nothing, read nothing, or are too many."""

import asyncio
import contextlib
import json
import socket
import ssl
from pathlib import Path

import pytest

from pdserve.rpc import http_connection as connection
from pdserve.rpc import http_listener as listener
from pdserve.v1 import node_pb2
from tests.certificates import Authority
from tests.router.client_calls import IDS, submits
from tests.router.http_calls import COMPLETIONS, adopted, body_of, front_stage, http_stage, tokens_of
from tests.router.scripted_node import DEADLINE_S, until

pytestmark = pytest.mark.asyncio


async def test_a_head_that_does_not_come_whole_ends_its_connection_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that sends a byte now and then was kept for ever."""
    async with http_stage(tmp_path) as (stage, client):
        asking = asyncio.create_task(client.post(COMPLETIONS, json=body_of(COMPLETIONS)))
        submit, _ = await submits(stage)
        assert stage.router.http is not None
        (answering,) = stage.router.http._server.server_state.connections
        assert isinstance(answering, connection.BoundedConnection)
        assert answering._head_wait is None, "its head is there"
        whole = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
        for first, begun in ((b"", b""), (b"", whole[:9]), (whole, whole[:9])):
            monkeypatch.setattr(connection, "HEAD_WAIT_S", DEADLINE_S if first else 0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.router.http.port)
            if first:
                writer.write(first)
                await asyncio.wait_for(reader.readuntil(b"}"), DEADLINE_S)
                monkeypatch.setattr(connection, "HEAD_WAIT_S", 0.01)
            writer.write(begun)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
            writer.close()
        stage.prefill[0].first_token(submit, IDS[0])
        await adopted(stage, submit)
        stage.prefill[0].released(submit)
        stage.decode[0].step(tokens=[tokens_of(submit, 0, IDS[1:4])])
        stage.decode[0].released(submit)
        assert (await asking).status_code == 200


async def test_connections_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 2)
    async with http_stage(tmp_path) as (stage, _):
        assert stage.router.http is not None
        port = stage.router.http.port
        ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        last, _ = ends[-1]
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(last.read(), DEADLINE_S) == b""
        reader, writer = ends[0]
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), DEADLINE_S)).startswith(b"HTTP/1.1 503")
        for _, writer in ends:
            writer.close()


async def test_the_kernel_ends_connections_that_take_nothing(tmp_path: Path) -> None:
    async with http_stage(tmp_path, max_unread_s=12.5) as (stage, _):
        assert stage.router.http is not None
        with socket.socket(fileno=socket.dup(stage.router.http._socket.fileno())) as same:
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12_500


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
async def test_a_client_that_does_not_read_is_given_up(tmp_path: Path, with_tls: bool) -> None:
    """Bounded as over gRPC: once the socket is full, `max_unread_bytes` may wait. Nor does it keep the router from stopping."""
    authority = Authority(tmp_path) if with_tls else None
    with socket.socket() as deaf:
        await asyncio.wait_for(leave_unread(tmp_path, deaf, authority, max_unread_bytes=100_000), 2 * DEADLINE_S)


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
async def test_a_connection_whose_client_reads_nothing_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_tls: bool
) -> None:
    """Closing it waited for the client, until the kernel had enough; here the kernel never has."""
    monkeypatch.setattr(connection, "UNREAD_GRACE_S", 0.1)
    authority = Authority(tmp_path) if with_tls else None
    limits = {"max_unread_s": 0.5, "max_unread_bytes": 1 << 30}
    with socket.socket() as deaf:
        await asyncio.wait_for(leave_unread(tmp_path, deaf, authority, **limits), 3 * DEADLINE_S)


async def leave_unread(folder: Path, plain: socket.socket, authority: Authority | None, **limits: object) -> None:
    context, files = None, {}
    if authority is not None:
        context = ssl.create_default_context(cafile=authority.ca)
        pair = authority.issue("router")
        files = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    async with front_stage(folder, context, {**limits, **files}) as (stage, client):
        for node in (*stage.prefill, *stage.decode):
            node.max_model_len = 1 << 20
            await node.attach_anew()
        await stage.until("ready", 2)
        assert stage.router.http is not None
        stage.router.http._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        body = json.dumps(body_of(COMPLETIONS, max_tokens=100_000, stream=True, logprobs=20)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()

        def ask() -> socket.socket:
            """Returns what must be kept: a connection ends with its socket."""
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.settimeout(DEADLINE_S)
            plain.connect((client.base_url.host, client.base_url.port))
            deaf = plain if context is None else context.wrap_socket(plain, server_hostname="127.0.0.1")
            deaf.sendall(head + body)
            return deaf

        deaf = await asyncio.to_thread(ask)
        submit, _ = await submits(stage)
        top = {"token_ids": list(range(3, 23)), "logprobs": [-1.0 - i for i in range(20)]}
        stage.prefill[0].first_token(submit, IDS[0])
        await adopted(stage, submit)
        stage.prefill[0].released(submit)
        stopped = asyncio.create_task(stage.decode[0].next_of("cancel"))
        index = 1
        while not stopped.done():
            if index > 90_000:
                assert "max_unread_s" in limits, "the router took it all"
                await stopped
                break
            message = node_pb2.SequenceTokens(
                session_id=submit.session_id,
                attempt=1,
                first_index=index,
                token_ids=IDS[:1] * 100,
                logprobs=[-0.5] * 100,
            )
            for _ in range(100):
                message.top_logprobs.add(**top)
            stage.decode[0].step(tokens=[message])
            index += 100
            await asyncio.wait([stopped], timeout=0.005)
        assert index > 1200, "twice what may wait in the router: the rest is in the socket"
        stage.decode[0].released(await stopped, node_pb2.LEG_OUTCOME_CANCELLED)
        await until(lambda: stage.router.sessions.gauges()["failed_total"] == 1)
        if "max_unread_s" in limits:
            state = stage.router.http._server.server_state
            await until(lambda: not state.connections)
        deaf.close()
