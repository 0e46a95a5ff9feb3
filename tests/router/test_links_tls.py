"""Links to nodes by TLS: who comes together, what the router says where they do not, and that it keeps trying."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.certificates import TlsFiles
from pdserve.router.attach_call import TLS_REASONS
from pdserve.rpc.tls import TlsSource
from pdserve.rpc.tls_faults import TlsFault
from tests.certificates import Authority, Pair, files_of
from tests.router.client_calls import IDS, ask, collect
from tests.router.http_calls import play
from tests.router.scripted_node import ScriptedNode, Stage, start_stage, until

pytestmark = pytest.mark.asyncio


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def given(ca: Path, pair: Pair | None = None) -> dict[str, Any]:
    own = {} if pair is None else {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    return {"tls_ca": str(ca), **own}


async def told_of(stage: Stage, node: ScriptedNode) -> str:
    """Wait until the router has tried in vain, and return why, in its words."""
    member = next(its for its in stage.router.membership.members if its.address == node.address)
    await until(lambda: member.reason)
    assert str(member.state) == "down"
    return member.reason


async def restart(node: ScriptedNode, pair: Pair, ca: Path | None) -> None:
    """Start the node anew at its address, with these files."""
    await node.stop()
    node.tls = files_of(pair, ca)
    await node.start()


async def test_a_request_is_served_over_links_and_front_with_tls(authority: Authority, tmp_path: Path) -> None:
    router, client = authority.issue("router"), authority.issue("client")
    trust = TlsSource(TlsFiles(client.cert, client.key, authority.ca, is_client=True)).current()
    own = given(authority.ca, router) | {"tls_client_ca": str(authority.ca)}
    nodes = files_of(authority.issue("node"), authority.ca)
    async with start_stage(tmp_path, node_tls=nodes, trust=trust, **own, http_port="off") as stage:
        await stage.until("ready", 2)
        asking = asyncio.create_task(collect(ask(stage)))
        await play(stage, IDS[:4])
        assert (await asking)[1] == list(IDS[:4])
        await stage.leak_oracle()


async def test_a_router_without_a_certificate_is_refused_by_a_node_that_wants_one(
    authority: Authority, tmp_path: Path
) -> None:
    nodes = files_of(authority.issue("node"), authority.ca)
    async with start_stage(tmp_path, node_tls=nodes, **given(authority.ca), http_port="off") as stage:
        for node in (*stage.prefill, *stage.decode):
            assert await told_of(stage, node) == TLS_REASONS[TlsFault.OWN_CERTIFICATE]
            assert node.num_streams == 0


async def test_each_reason_is_told_and_goes_once_the_node_is_right(authority: Authority, tmp_path: Path) -> None:
    """One router, one node after another at the same address: wrong authority, wrong name, no TLS at all, then the right one."""
    other = Authority(tmp_path, "other")
    router = authority.issue("router")
    wrong = files_of(other.issue("node"))
    async with start_stage(tmp_path, node_tls=wrong, **given(authority.ca, router), http_port="off") as stage:
        prefill, decode = stage.prefill[0], stage.decode[0]
        for node in (prefill, decode):
            assert await told_of(stage, node) == TLS_REASONS[TlsFault.AUTHORITY]
            assert node.num_streams == 0
        member = next(its for its in stage.router.membership.members if its.address == prefill.address)

        async def told(fault: TlsFault) -> None:
            await until(lambda: member.reason == TLS_REASONS[fault])

        await restart(prefill, authority.issue("elsewhere", "node.example.org"), None)
        await told(TlsFault.NAME)
        await restart(prefill, authority.issue("strict"), other.ca)
        await told(TlsFault.OWN_CERTIFICATE)
        await prefill.stop()
        prefill.tls = None
        await prefill.start()
        await told(TlsFault.PLAIN_PORT)
        for node in (prefill, decode):
            await restart(node, authority.issue("node"), authority.ca)
        await stage.until("ready", 2)


async def test_a_plain_router_is_told_that_the_node_speaks_tls(authority: Authority, tmp_path: Path) -> None:
    async with start_stage(tmp_path, node_tls=files_of(authority.issue("node")), http_port="off") as stage:
        assert await told_of(stage, stage.prefill[0]) == TLS_REASONS[TlsFault.TLS_PORT]


async def test_the_next_dial_uses_the_files_of_then(authority: Authority, tmp_path: Path) -> None:
    """A router whose certificate nodes refuse is let in once its files are right, without a start of its own."""
    other = Authority(tmp_path, "other")
    pair = other.issue("router")
    nodes = files_of(authority.issue("node"), authority.ca)
    async with start_stage(tmp_path, node_tls=nodes, **given(authority.ca, pair), http_port="off") as stage:
        assert await told_of(stage, stage.prefill[0]) == TLS_REASONS[TlsFault.OWN_CERTIFICATE]
        pair.become(authority.issue("right"))
        await stage.until("ready", 2)
        streams = [node.num_streams for node in (*stage.prefill, *stage.decode)]
        pair.become(authority.issue("renewed"))
        assert [node.num_streams for node in (*stage.prefill, *stage.decode)] == streams, "what stands, stands"
