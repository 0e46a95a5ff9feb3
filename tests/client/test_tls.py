"""Both clients with TLS: what they need to come in, and what they say when they do not."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.client import AsyncClient, Client, Tls
from pdserve.client.tls import system_authorities
from pdserve.core.certificates import TlsFiles
from pdserve.core.errors import ConfigError, InvalidRequest, Unreachable
from tests.certificates import Authority, files_of, trust
from tests.client.stub_router import stub_router


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def serving(files: TlsFiles | None) -> AsyncIterator[str]:
    async with stub_router(tls=files) as (_, address):
        yield address


async def both_ask(address: str, tls: Tls | None) -> list[str]:
    """Have both kinds of client ask; return what they are told, which must be the same."""
    async with AsyncClient(address, tls=tls) as client:
        answer = await client.complete("hello")
        assert (await client.models())[0].name == "m"
        assert await client.is_ready()

    def ask() -> str:
        with Client(address, tls=tls) as client:
            assert client.is_ready()
            return client.complete("hello").text

    return [answer.text, await asyncio.to_thread(ask)]


async def refusal_of(address: str, tls: Tls | None) -> Unreachable:
    """Have both kinds of client fail; return the error, which must be the same for a whole answer and for a short call."""
    async with AsyncClient(address, tls=tls) as client:
        with pytest.raises(Unreachable) as error:
            await client.complete("hello")
        with pytest.raises(Unreachable) as short:
            await client.models()

    def ask() -> str:
        with Client(address, tls=tls) as client, pytest.raises(Unreachable) as same:
            client.complete("hello")
        return str(same.value)

    assert str(error.value) == str(short.value) == await asyncio.to_thread(ask)
    return error.value


@pytest.mark.asyncio
async def test_clients_that_have_what_it_takes_are_served(authority: Authority) -> None:
    server, client = authority.issue("server"), authority.issue("client")
    async with serving(files_of(server)) as address:
        assert await both_ask(address, trust(authority)) == ["Zwölf Bären"] * 2
        assert await both_ask(address, Tls(ca=authority.ca.read_bytes())) == ["Zwölf Bären"] * 2
        async with AsyncClient(address, root_certificates=authority.ca.read_bytes()) as old_way:
            assert await old_way.is_ready()
    async with serving(files_of(server, authority.ca)) as address:
        assert await both_ask(address, trust(authority, client)) == ["Zwölf Bären"] * 2


@pytest.mark.asyncio
async def test_a_tunnel_is_told_the_name_that_the_certificate_bears(authority: Authority) -> None:
    async with serving(files_of(authority.issue("server", "models.example.org"))) as address:
        error = await refusal_of(address, trust(authority))
        assert "its certificate does not name this host" in error.message
        assert "server_name" in error.hint
        assert await both_ask(address, Tls(authority.ca, server_name="models.example.org")) == ["Zwölf Bären"] * 2


@pytest.mark.asyncio
async def test_the_systems_authorities_are_those_of_the_machine(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's own list does not have the authority that a company put on its machines."""
    async with serving(files_of(authority.issue("server"))) as address:
        assert "is signed by no authority that is trusted here" in (await refusal_of(address, Tls())).message
        monkeypatch.setenv(ssl.get_default_verify_paths().openssl_cafile_env, str(authority.ca))
        assert system_authorities() == authority.ca.read_bytes()
        assert await both_ask(address, Tls()) == ["Zwölf Bären"] * 2


@pytest.mark.asyncio
async def test_each_way_to_miss_says_what_to_do(authority: Authority, tmp_path: Path) -> None:
    server, other = authority.issue("server"), Authority(tmp_path, "other")
    async with (
        serving(files_of(server)) as secure,
        serving(None) as plain,
        serving(files_of(server, authority.ca)) as mutual,
    ):
        cases = (
            (plain, trust(authority), "it does not speak TLS", "connect without tls"),
            (secure, None, "as a port that speaks TLS does", "tls=Tls(ca=FILE), --tls-ca FILE"),
            (secure, trust(other), "is signed by no authority that is trusted here", "tls=Tls(ca=FILE), or --tls-ca"),
            (mutual, trust(authority), "wants a client certificate, or another one", "--tls-cert FILE --tls-key FILE"),
            (
                mutual,
                trust(authority, other.issue("me")),
                "wants a client certificate, or another one",
                "tls_client_ca",
            ),
            (mutual, None, "as a port that speaks TLS does", "--tls-ca"),
        )
        for address, tls, message, hint in cases:
            error = await refusal_of(address, tls)
            assert f"no router answers at {address} (" in error.message
            assert message in error.message
            assert hint in error.hint
            assert error.metadata["cause"], "gRPC's own words are kept"
            can_pass = "closed the connection" in error.message
            assert (error.retry_after_s is not None) == can_pass, "what cannot pass is not tried again"


def test_files_of_no_use_are_refused_when_the_client_is_made(authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue("me")
    for tls, words in (
        (Tls(ca=tmp_path / "none"), "tls_ca: .* cannot be read"),
        (Tls(ca=authority.ca, cert=pair.cert), "tls_key: required with tls_cert"),
        (Tls(ca=authority.ca, key=pair.key), "tls_cert: required with tls_key"),
        (Tls(ca=authority.ca, cert=pair.cert, key=authority.issue("you").key), "is not the key of the certificate"),
    ):
        for kind in (Client, AsyncClient):
            with pytest.raises(ConfigError, match=words):
                kind("127.0.0.1:1", tls=tls)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        Client("127.0.0.1:1", tls=Tls(), root_certificates=b"")
