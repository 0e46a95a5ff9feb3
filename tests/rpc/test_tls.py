"""gRPC with TLS: who is let in, files that change under a running server, and strangers at the port."""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.core.certificates import TlsFiles
from pdserve.rpc.options import channel_options
from pdserve.rpc.server import GrpcServer
from pdserve.rpc.tls import TlsSource, open_async_channel
from pdserve.rpc.tls_faults import TlsFault, tls_fault
from tests.certificates import DAY, Authority, Pair, files_of, now

DEADLINE_S = 30.0
CHECK = health_pb2.HealthCheckRequest()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def serving(files: TlsFiles | None) -> AsyncIterator[int]:
    """Serve health on a free port; yield the port."""
    server = GrpcServer("127.0.0.1", 0, tls=None if files is None else TlsSource(files))
    await server.start()
    await server.set_ready(True)
    try:
        yield server.port
    finally:
        await server.stop(0)


def dial(port: int, ca: Path | None, pair: Pair | None = None, host: str = "127.0.0.1") -> grpc.aio.Channel:
    """Return a channel that trusts `ca` and shows `pair`, or a plain one without `ca`."""
    files = TlsFiles(None if pair is None else pair.cert, None if pair is None else pair.key, ca, is_client=True)
    material = None if ca is None else TlsSource(files).current()
    return open_async_channel(f"{host}:{port}", material, channel_options())


async def check(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=DEADLINE_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def fault_of(port: int, ca: Path | None, pair: Pair | None = None, host: str = "127.0.0.1") -> TlsFault | None:
    """Dial, fail, and return what gRPC's words for it are read as; None if the call does not fail."""
    async with dial(port, ca, pair, host) as channel:
        try:
            await check(channel)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            found = tls_fault(error.details() or "", speaks_tls=ca is not None)
            assert found is not None, error.details()
            return found
    return None


@pytest.mark.asyncio
async def test_every_way_not_to_come_together_is_told_apart(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("server"), Authority(tmp_path, "other")
    async with serving(files_of(pair)) as port, serving(None) as plain:
        assert await fault_of(port, authority.ca) is None
        assert await fault_of(port, other.ca) is TlsFault.AUTHORITY
        assert await fault_of(port, authority.ca, host="localhost") is TlsFault.NAME
        assert await fault_of(port, None) is TlsFault.TLS_PORT
        assert await fault_of(plain, authority.ca) is TlsFault.PLAIN_PORT
        assert await fault_of(plain, None) is None


@pytest.mark.asyncio
async def test_a_server_with_an_authority_lets_in_whom_it_signed(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    async with serving(files_of(authority.issue("server"), authority.ca)) as port:
        assert await fault_of(port, authority.ca, authority.issue("client")) is None
        assert await fault_of(port, authority.ca) is TlsFault.OWN_CERTIFICATE
        assert await fault_of(port, authority.ca, other.issue("client")) is TlsFault.OWN_CERTIFICATE


@contextlib.asynccontextmanager
async def bare(pair: Pair) -> AsyncIterator[int]:
    """Serve with a pair that no process of ours would start with."""
    server = grpc.aio.server()
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@pytest.mark.asyncio
async def test_certificates_that_nobody_should_show_are_told_apart_too(authority: Authority) -> None:
    old = authority.issue("old", begins=now() - 9 * DAY, ends=now() - DAY)
    early = authority.issue("early", begins=now() + DAY)
    for pair, fault in ((old, TlsFault.EXPIRED), (early, TlsFault.EXPIRED)):
        async with bare(pair) as port:
            assert await fault_of(port, authority.ca) is fault
    async with bare(authority.issue_odd("use", uses=(ExtendedKeyUsageOID.CLIENT_AUTH,))) as port:
        assert await fault_of(port, authority.ca) is TlsFault.PURPOSE
    async with bare(authority.issue_odd("ed", key=ed25519.Ed25519PrivateKey.generate())) as port:
        assert await fault_of(port, authority.ca) is TlsFault.BROKEN_OFF
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = authority.issue("web")
    context.load_cert_chain(pair.cert, pair.key)
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as web:
        assert await fault_of(web.sockets[0].getsockname()[1], authority.ca) is TlsFault.NO_HTTP2


def shown_by(port: int, ca: Path) -> bytes:
    """Return the certificate that the port shows, DER."""
    context = ssl.create_default_context(cafile=ca)
    with (
        socket.create_connection(("127.0.0.1", port), DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""


def der_of(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.cert.read_text())


@pytest.mark.asyncio
async def test_files_that_change_count_for_new_connections_and_leave_old_ones_alone(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with their times put back (failure class 41), and a bad pair changes nothing but the log, once."""
    pair, ca = authority.issue("server"), authority.ca
    caplog.set_level(logging.INFO, "pdserve.rpc.tls")
    async with serving(files_of(pair)) as port, dial(port, ca) as standing:
        assert await check(standing)
        assert await asyncio.to_thread(shown_by, port, ca) == der_of(pair)
        times = {path: (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in (pair.cert, pair.key)}
        renewed = authority.issue("renewed")
        pair.become(renewed)
        for path, old in times.items():
            os.utime(path, ns=old)
        assert await asyncio.to_thread(shown_by, port, ca) == der_of(renewed)
        assert await fault_of(port, ca) is None
        assert await check(standing)

        pair.key.write_bytes(authority.issue("stranger").key.read_bytes())
        for _ in range(3):
            assert await asyncio.to_thread(shown_by, port, ca) == der_of(renewed)
            assert await fault_of(port, ca) is None
        pair.cert.unlink()
        assert await fault_of(port, ca) is None

        last = authority.issue("last")
        pair.become(last)
        assert await asyncio.to_thread(shown_by, port, ca) == der_of(last)
        assert await check(standing)
    told = [record.getMessage() for record in caplog.records if record.name == "pdserve.rpc.tls"]
    assert [line.partition(":")[0] for line in told] == [
        "the TLS files changed",
        "the TLS files changed and cannot be used, so the old ones stay",
        "the TLS files changed and cannot be used, so the old ones stay",
        "the TLS files changed",
    ]
    assert "is not the key of the certificate" in told[1]
    assert "cannot be read" in told[2]


@pytest.mark.asyncio
async def test_an_authority_that_leaves_the_file_lets_nobody_in_any_more(authority: Authority, tmp_path: Path) -> None:
    """The steps of a rotation: old; old and new; new."""
    new = Authority(tmp_path, "new")
    ca, client, later = tmp_path / "trusted.pem", authority.issue("client"), new.issue("client")
    ca.write_bytes(authority.ca.read_bytes())
    async with serving(files_of(authority.issue("server"), ca)) as port:

        async def who_gets_in() -> list[bool]:
            return [await fault_of(port, authority.ca, pair) is None for pair in (client, later)]

        assert await who_gets_in() == [True, False]
        async with dial(port, authority.ca, client) as standing:
            assert await check(standing)
            ca.write_bytes(authority.ca.read_bytes() + new.ca.read_bytes())
            assert await who_gets_in() == [True, True]
            ca.write_bytes(new.ca.read_bytes())
            assert await who_gets_in() == [False, True]
            assert await check(standing)


def test_a_certificate_that_is_not_valid_yet_is_taken_when_it_is(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Clocks differ: the pair is good in a minute, and the files do not change again."""
    at = now()
    pair, clock = authority.issue("server"), [at.timestamp()]
    source = TlsSource(files_of(pair), lambda: clock[0])
    first = source.current()
    pair.become(authority.issue("early", begins=at + DAY / 1440))
    assert source.current() is first
    assert source.current() is first
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    clock[0] += 120
    assert source.current() is not first
    assert source.current() is source.current()


def test_the_end_that_comes_near_while_the_process_runs_is_warned_of_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    ends = now() + 90 * DAY
    clock = [now().timestamp()]
    source = TlsSource(files_of(authority.issue("x", ends=ends)), lambda: clock[0])
    for days_before, number in ((20, 0), (10, 1), (9, 1), (-1, 2), (-2, 2)):
        clock[0] = (ends - days_before * DAY).timestamp()
        source.current()
        told = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(told) == number, days_before


def test_a_key_that_every_user_can_read_is_warned_of(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    pair = authority.issue("x")
    TlsSource(files_of(pair))
    assert not caplog.records
    pair.key.chmod(0o644)
    TlsSource(files_of(pair))
    assert "every user of this machine can read tls_key" in caplog.text


GARBAGE = (
    b"",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x40\x00" + b"x" * 9000,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00" * 99,
)


@pytest.mark.asyncio
async def test_strangers_at_the_port_leave_nothing(authority: Authority) -> None:
    """Connections that say nothing, or garbage, and go: no descriptor stays, and an honest caller is served meanwhile."""
    async with serving(files_of(authority.issue("server"), authority.ca)) as port:
        pair = authority.issue("client")
        assert await fault_of(port, authority.ca, pair) is None
        baseline = psutil.Process().num_fds()
        ends = [socket.create_connection(("127.0.0.1", port), DEADLINE_S) for _ in range(60)]
        for number, end in enumerate(ends):
            with contextlib.suppress(OSError):
                end.sendall(GARBAGE[number % len(GARBAGE)])
        assert await fault_of(port, authority.ca, pair) is None
        for end in ends:
            end.close()
        async with asyncio.timeout(DEADLINE_S):
            while psutil.Process().num_fds() > baseline + 2:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
        assert await fault_of(port, authority.ca, pair) is None
