"""The file of keys: what it says now is what counts, and what is wrong with it never costs a caller."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from pdserve.core.api_keys import CLUSTER_CALLER, OPTION_CALLER, Caller, Owner, Scope, operator_key
from pdserve.core.errors import ConfigError, Unauthenticated
from pdserve.core.router_settings import RouterSettings
from pdserve.core.settings import load_settings
from pdserve.router import key_ring
from pdserve.router.key_ring import KeyRing
from tests.router.client_calls import IDS, ask, failure, submits
from tests.router.http_calls import COMPLETIONS, adopted, body_of, http_stage, play, post
from tests.router.scripted_node import DEADLINE_S, until

FIRST, SECOND, THIRD = "key-of-ann-number-1", "key-of-ann-number-2", "key-of-bob-number-1"
ANN = Caller(Owner("ann"), Scope.USE)


def ring_of(path: Path, **given: str) -> KeyRing:
    return KeyRing(load_settings(RouterSettings, {"api_keys_file": str(path), **given}))


def rewrite(path: Path, text: str) -> None:
    """Replace the content; size and times stay as they were."""
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"ann use {FIRST}\n")
    return path


def test_two_keys_of_an_owner_are_good_until_one_is_taken_away(keys: Path) -> None:
    ring = ring_of(keys)
    assert (ring.find(FIRST), ring.find(SECOND)) == (ANN, None)
    ring.renew(f"ann use {FIRST}\nann use {SECOND}\n".encode())
    assert ring.find(FIRST) == ring.find(SECOND) == ANN
    ring.renew(f"ann use {SECOND}\n".encode())
    assert (ring.find(FIRST), ring.find(SECOND)) == (None, ANN)


def test_wrong_content_keeps_the_keys_and_is_told_once(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    ring = ring_of(keys)
    for raw in (b"", f"ann use {SECOND}\nann rule {THIRD}".encode()):
        caplog.clear()
        for _ in range(3):
            ring.renew(raw)
        assert (ring.find(FIRST), ring.find(SECOND)) == (ANN, None)
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "number" not in caplog.text
    assert "line 2: the scope must be" in caplog.text
    ring.renew(f"ann use {FIRST}\nann use {SECOND}\n".encode())
    assert ring.find(SECOND) == ANN, "the next good content counts"


def test_all_kinds_of_keys_are_found_and_no_ring_is_empty_by_the_secret(tmp_path: Path, keys: Path) -> None:
    secret = "secret-of-the-cluster"
    settings = load_settings(
        RouterSettings, {"api_keys_file": str(keys), "api_key": f"{SECOND},{THIRD}", "cluster_secret": secret}
    )
    ring = KeyRing(settings)
    assert not ring.is_empty
    assert ring.find(FIRST) == ANN
    assert ring.find(SECOND) == ring.find(THIRD) == OPTION_CALLER
    assert ring.find(operator_key(secret.encode())) == CLUSTER_CALLER
    assert settings.secret is not None
    settings.secret.replace(b"old-secret", b"new-secret")
    assert ring.find(operator_key(secret.encode())) is None, "a value that is good no more makes no operator"
    assert ring.find(operator_key(b"old-secret")) == ring.find(operator_key(b"new-secret")) == CLUSTER_CALLER
    assert ring.find("new-secret") is None
    assert KeyRing(load_settings(RouterSettings, {"cluster_secret": secret})).is_empty


def test_a_file_that_turned_wrong_before_the_start_is_a_fault_of_the_settings(keys: Path) -> None:
    settings = load_settings(RouterSettings, {"api_keys_file": str(keys)})
    keys.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        KeyRing(settings)


@pytest.mark.asyncio
async def test_a_file_that_is_just_being_written_is_not_taken(
    keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The beginning of a file is a good file: whose key stood further down was refused for a second."""
    caplog.set_level(logging.INFO)
    ring, is_over = ring_of(keys), asyncio.Event()
    whole = f"ann use {FIRST}\nann use {SECOND}\n".encode()
    looks = iter((whole[: -len(SECOND)], whole, whole[:-1], whole, whole))

    def look(_: Path) -> bytes:
        raw = next(looks, None)
        if raw is None:
            loop.call_soon_threadsafe(is_over.set)
        return whole if raw is None else raw

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(key_ring, "POLL_S", 0)
    monkeypatch.setattr(key_ring, "read_keys_file", look)
    watching = asyncio.create_task(ring.watch())
    async with asyncio.timeout(DEADLINE_S):
        await is_over.wait()
    watching.cancel()
    await asyncio.wait([watching])
    assert caplog.messages == ["the file of API keys changed: 2 keys of 1 owners are good"]
    assert ring.find(FIRST) == ring.find(SECOND) == ANN


@pytest.mark.asyncio
async def test_a_running_router_heeds_its_file(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Failure class 41: the new keys have the old file's size and times."""
    monkeypatch.setattr(key_ring, "POLL_S", 0.005)
    async with http_stage(tmp_path, api_keys_file=str(keys)) as (stage, client):

        async def opens(key: str) -> bool:
            response = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            return response.status_code == 200

        assert [await opens(key) for key in (FIRST, SECOND)] == [True, False]
        call = ask(stage, key=FIRST)
        submit, _ = await submits(stage)
        rewrite(keys, f"ann use {SECOND}\n")
        await until(lambda: opens(SECOND))
        assert not await opens(FIRST)
        assert isinstance(await failure(ask(stage, key=FIRST)), Unauthenticated)
        stage.prefill[0].first_token(submit, IDS[0])
        await adopted(stage, submit)
        stage.prefill[0].released(submit)
        stage.decode[0].tokens(submit, 1, IDS[1:4], is_last=True)
        stage.decode[0].released(submit)
        assert [message async for message in call][-1].HasField("summary"), "what was let in goes on"
        Path.unlink(keys)
        await until(lambda: "cannot be read (no such file or directory)" in caplog.text)
        assert await opens(SECOND)
        Path.write_text(keys, "nonsense\n")
        await until(lambda: "line 1: has 1 words" in caplog.text)
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 2
        assert await opens(SECOND)


@pytest.mark.asyncio
async def test_requests_are_told_by_their_owner_and_never_by_a_key(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with http_stage(tmp_path, api_keys_file=str(keys), api_key=SECOND) as (stage, client):
        headers = {"authorization": f"Bearer {FIRST}", "x-request-id": "over-http"}
        await post(client, COMPLETIONS, body_of(COMPLETIONS), play(stage, IDS[:4]), headers=headers)
        call = ask(stage, key=SECOND, request_id="over-grpc")
        await play(stage, IDS[:4])
        assert [message async for message in call][-1].HasField("summary")
        await failure(ask(stage, key=FIRST, max_tokens=0, request_id="refused"))
        await client.post(
            COMPLETIONS, json=body_of(COMPLETIONS, n=0), headers=headers | {"x-request-id": "refused-too"}
        )
        await failure(ask(stage, key=THIRD, request_id="unknown"))
    told = {
        record.__dict__["request_id"]: record.__dict__["owner"]
        for record in caplog.records
        if record.levelno == logging.INFO and hasattr(record, "owner")
    }
    assert told == {"over-http": "ann", "over-grpc": "api-key", "refused": "ann", "refused-too": "ann"}
    for key in (FIRST, SECOND, THIRD):
        assert key not in "".join(str(record.__dict__) for record in caplog.records)
