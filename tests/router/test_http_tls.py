"""The HTTP port with TLS: who is served, files that change under it, and strangers that fill it."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
from pathlib import Path

import httpx
import psutil
import pytest

from pdserve.rpc import http_listener as listener
from pdserve.rpc.http_tls import RenewedContext
from pdserve.rpc.tls import TlsSource
from pdserve.v1 import node_pb2
from tests.certificates import DAY, Authority, Pair, files_of, now
from tests.router.client_calls import IDS, submits
from tests.router.http_calls import COMPLETIONS, body_of, front_stage, play
from tests.router.scripted_node import DEADLINE_S, until

pytestmark = pytest.mark.asyncio
REQUEST = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def trusting(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


def given(pair: Pair, **more: Path) -> dict[str, str]:
    return {name: str(path) for name, path in {"tls_cert": pair.cert, "tls_key": pair.key, **more}.items()}


async def shown_by(port: int, context: ssl.SSLContext) -> bytes:
    """Return the certificate that the port shows to a new connection on which it answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(REQUEST)
        assert (await asyncio.wait_for(reader.readline(), DEADLINE_S)).startswith(b"HTTP/1.1 200")
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return shown
    finally:
        writer.close()


async def is_let_in(port: int, context: ssl.SSLContext) -> bool:
    try:
        await shown_by(port, context)
    except (ssl.SSLError, ConnectionError, AssertionError):
        return False
    return True


def der_of(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.cert.read_text())


async def test_answers_stream_through_tls_and_nothing_else_is_served(authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue("router")
    async with front_stage(tmp_path, trusting(authority), given(pair)) as (stage, client):
        asking = asyncio.create_task(client.post(COMPLETIONS, json=body_of(COMPLETIONS)))
        await play(stage, (3, 4, 5, 6))
        assert (await asking).json()["usage"]["completion_tokens"] == 4
        assert stage.router.http is not None
        plain = f"http://127.0.0.1:{stage.router.http.port}/health"
        async with httpx.AsyncClient(timeout=DEADLINE_S) as stranger:
            with pytest.raises(httpx.TransportError):
                await stranger.get(plain)
            with pytest.raises(httpx.ConnectError):  # an authority that the stranger does not know
                await stranger.get(plain.replace("http:", "https:"))
        assert (await client.get("/health")).status_code == 200


async def test_a_client_that_leaves_is_noticed_through_tls(authority: Authority, tmp_path: Path) -> None:
    context = trusting(authority)
    async with front_stage(tmp_path, context, given(authority.issue("router"))) as (stage, _):
        assert stage.router.http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.router.http.port, ssl=context)
        body = json.dumps(body_of(COMPLETIONS, stream=True)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, IDS[0])
        await asyncio.wait_for(reader.readuntil(b"data: "), DEADLINE_S)
        writer.transport.abort()
        for node in (stage.prefill[0], stage.decode[0]):
            node.released(await node.next_of("cancel"), node_pb2.LEG_OUTCOME_CANCELLED)


async def test_a_port_with_client_authorities_serves_whom_they_signed(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    mine, theirs = authority.issue("me"), other.issue("me")
    files = given(authority.issue("router"), tls_client_ca=authority.ca)
    async with front_stage(tmp_path, trusting(authority, mine), files) as (stage, client):
        assert (await client.get("/health")).status_code == 200
        assert stage.router.http is not None
        port = stage.router.http.port
        assert await is_let_in(port, trusting(authority, mine))
        assert not await is_let_in(port, trusting(authority))
        assert not await is_let_in(port, trusting(authority, theirs))


async def test_files_that_change_count_for_new_connections(authority: Authority, tmp_path: Path) -> None:
    """With their times put back (failure class 41). A connection from before goes on; a bad pair changes nothing."""
    pair, context = authority.issue("router"), trusting(authority)
    async with front_stage(tmp_path, context, given(pair)) as (stage, _):
        assert stage.router.http is not None
        port = stage.router.http.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)

        async def old_one_answers() -> bool:
            writer.write(REQUEST)
            await reader.readuntil(b'"}')
            return True

        assert await old_one_answers()
        assert await shown_by(port, context) == der_of(pair)
        times = {path: (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in (pair.cert, pair.key)}
        renewed = authority.issue("renewed")
        pair.become(renewed)
        for path, old in times.items():
            os.utime(path, ns=old)
        assert await shown_by(port, context) == der_of(renewed)
        assert await old_one_answers()
        pair.become(authority.issue("old", begins=now() - 9 * DAY, ends=now() - DAY))
        assert await shown_by(port, context) == der_of(renewed)
        pair.cert.unlink()
        assert await shown_by(port, context) == der_of(renewed)
        last = authority.issue("last")
        pair.become(last)
        assert await shown_by(port, context) == der_of(last)
        assert await old_one_answers()
        writer.close()


async def test_a_pair_that_changes_while_it_is_taken_up_is_left_for_the_next_connection(authority: Authority) -> None:
    pair = authority.issue("router")
    source = TlsSource(files_of(pair))
    context = RenewedContext.of(source, max_connections=9)
    first = context._inner
    pair.become(authority.issue("renewed"))
    material = source.current()
    pair.key.write_bytes(authority.issue("stranger").key.read_bytes())
    context._renew(material)
    assert context._inner is first
    pair.become(authority.issue("last"))
    context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)
    assert context._inner is not first


def resumed(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """Ask on a new connection that goes on with `session`; return its own, or None if nothing was answered."""
    plain = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
    with context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secure:
        secure.sendall(REQUEST)
        try:
            return secure.session if secure.recv(99) else None
        except OSError:
            return None


async def test_an_authority_that_leaves_the_file_vouches_for_nobody(authority: Authority, tmp_path: Path) -> None:
    """Not for a session that one of its clients resumes, either."""
    new, ca = Authority(tmp_path, "new"), tmp_path / "trusted.pem"
    ca.write_bytes(authority.ca.read_bytes())
    old, later = trusting(authority, authority.issue("old")), trusting(authority, new.issue("later"))
    files = given(authority.issue("router"), tls_client_ca=ca)
    async with front_stage(tmp_path, old, files) as (stage, client):
        assert stage.router.http is not None
        port = stage.router.http.port
        assert (await client.get("/health")).status_code == 200
        session = await asyncio.to_thread(resumed, port, old, None)
        assert session is not None
        assert await asyncio.to_thread(resumed, port, old, session) is not None
        assert not await is_let_in(port, later)
        ca.write_bytes(new.ca.read_bytes())
        assert await is_let_in(port, later)
        assert not await is_let_in(port, old)
        assert await asyncio.to_thread(resumed, port, old, session) is None
        assert (await client.get("/health")).status_code == 200, "its connection stood before"


async def test_silent_and_noisy_strangers_leave_nothing(authority: Authority, tmp_path: Path) -> None:
    garbage = (b"", b"\x16\x03\x01\x40\x00" + b"x" * 9000, b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 99)
    async with front_stage(tmp_path, trusting(authority), given(authority.issue("router"))) as (stage, client):
        assert stage.router.http is not None
        assert (await client.get("/health")).status_code == 200
        process = psutil.Process()
        baseline = process.num_fds()
        address = ("127.0.0.1", stage.router.http.port)
        ends = [await asyncio.to_thread(socket.create_connection, address, DEADLINE_S) for _ in range(60)]
        for number, end in enumerate(ends):
            with contextlib.suppress(OSError):
                end.sendall(garbage[number % len(garbage)])
        assert (await client.get("/health")).status_code == 200
        for end in ends:
            end.close()
        await until(lambda: process.num_fds() <= baseline)
        assert len(stage.router.http._server.server_state.connections) == 1


async def test_connections_within_their_handshake_are_bounded_too(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing above TLS hears of them: without a bound of their own a stranger could take every descriptor."""
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 4)
    context = trusting(authority)
    async with front_stage(tmp_path, context, given(authority.issue("router"))) as (stage, _):
        assert stage.router.http is not None
        port = stage.router.http.port
        ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        assert not await is_let_in(port, context)
        for _, writer in ends:
            writer.close()
            await writer.wait_closed()

        async def has_room() -> bool:
            return await is_let_in(port, context)

        await until(has_room)
