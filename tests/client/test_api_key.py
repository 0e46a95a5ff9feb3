"""Every call of either client carries the key, and nothing ever shows it."""

import asyncio

import pytest

from pdserve.client import AsyncClient, Client
from pdserve.core.errors import InvalidRequest, Unauthenticated
from tests.client.stub_router import stub_router

KEY = "sesame-sesame-sesame"
CALLS = 6

pytestmark = pytest.mark.asyncio


async def test_asyncio(key: str = KEY) -> None:
    async with stub_router() as (router, address), AsyncClient(address, api_key=key) as client:
        await client.complete("a")
        async with client.generate("a") as parts:
            await parts.whole()
        await client.tokenize("a")
        await client.detokenize([1])
        await client.models()
        await client.cluster_state()
        assert router.authorizations == [f"Bearer {key}"] * CALLS


async def test_threads() -> None:
    def call_all(address: str, api_key: str | None) -> None:
        with Client(address, api_key=api_key) as client:
            client.complete("a")
            with client.generate("a") as parts:
                parts.whole()
            client.tokenize("a")
            client.detokenize([1])
            client.models()
            client.cluster_state()

    async with stub_router() as (router, address):
        await asyncio.to_thread(call_all, address, KEY)
        assert router.authorizations == [f"Bearer {KEY}"] * CALLS
        await asyncio.to_thread(call_all, address, None)
        assert router.authorizations[CALLS:] == [None] * CALLS, "without a key nothing is said"


@pytest.mark.parametrize("key", ["sésame-sesame", "sesame sesame", "sesame\n", "sesame" * 1000])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(kind: type[Client | AsyncClient], key: str) -> None:
    with pytest.raises(InvalidRequest, match="the API key must") as error:
        kind("127.0.0.1:1", api_key=key)
    assert "same" not in f"{error.value!r} {error.value} {error.value.__cause__} {error.value.__context__}"


async def test_errors_and_clients_do_not_show_it() -> None:
    async with stub_router() as (router, address), AsyncClient(address, api_key=KEY) as client:
        router.refusals.append(Unauthenticated("the API key is missing or wrong", hint="send another"))
        with pytest.raises(Unauthenticated) as error:
            await client.complete("a")
        assert len(router.requests) == 1, "it is not asked for again"
        assert (
            KEY
            not in f"{error.value!r} {error.value.metadata} {error.value.__context__!r} {client!r} {client._channel!r}"
        )
