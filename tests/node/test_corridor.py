"""Which transport a node's settings make."""

import logging
from contextlib import closing

import pytest

from pdserve.core.clock import SystemClock
from pdserve.core.errors import ConfigError
from pdserve.core.ids import new_incarnation
from pdserve.core.node_settings import DecodeSettings, NodeSettings, PrefillSettings
from pdserve.core.settings import load_settings
from pdserve.kvtransfer import nixl_engine
from pdserve.kvtransfer.curve import listener_keys
from pdserve.kvtransfer.faults import FaultyChannel
from pdserve.kvtransfer.lent_payloads import MANY_LENT
from pdserve.kvtransfer.nixl_channel import NixlChannel
from pdserve.kvtransfer.shaping import ShapedChannel
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from pdserve.node.corridor import corridor_channel, link_settings
from tests.engine.small import small_engine

SECRET = "a secret of the test"
KINDS = pytest.mark.parametrize("kind", [PrefillSettings, DecodeSettings])


@KINDS
@pytest.mark.parametrize("encryption", ["none", "curve"])
def test_encryption_is_what_the_settings_say(kind: type[NodeSettings], encryption: str) -> None:
    # A shaped link, since that is always a network.
    given = {"cluster_secret": SECRET, "kv_encryption": encryption, "kv_link": "unlimited,0ms"}
    with closing(corridor_channel(load_settings(kind, given), SystemClock())()) as channel:
        assert isinstance(channel, ShapedChannel)
        assert isinstance(channel._inner, ZeroMqChannel)
        assert channel._inner._keys == (listener_keys(SECRET.encode()) if encryption == "curve" else None)


@KINDS
def test_encryption_without_a_secret_is_refused(kind: type[NodeSettings]) -> None:
    with pytest.raises(ConfigError, match="cluster_secret"):
        load_settings(kind, {"kv_encryption": "curve"})


@KINDS
def test_experiments_wrap_the_transport_and_say_so(kind: type[NodeSettings], caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings(kind, {"kv_link": "1Gbps,2ms", "kv_faults": "drop=0.5"})
    with caplog.at_level(logging.WARNING), closing(corridor_channel(settings, SystemClock())()) as channel:
        assert isinstance(channel, FaultyChannel)
        assert isinstance(channel._inner, ShapedChannel)
        assert isinstance(channel._inner._inner, ZeroMqChannel)
    assert [record.message.split(":")[0] for record in caplog.records] == ["EXPERIMENT"] * 2


def test_the_transport_is_told_how_few_buffers_a_sender_has() -> None:
    for staging_bytes, many in ((1 << 20, 1), (16 << 20, MANY_LENT)):
        settings = load_settings(PrefillSettings, {"kv_staging_bytes": staging_bytes, "kv_link": "unlimited,0ms"})
        with closing(corridor_channel(settings, SystemClock())()) as channel:
            assert isinstance(channel, ShapedChannel)
            assert isinstance(channel._inner, ZeroMqChannel)
            assert channel._inner._lent._many == many


@KINDS
def test_the_corridor_is_told_the_bounds_of_kv(kind: type[NodeSettings]) -> None:
    given = {"kv_window_bytes": 5 << 20, "kv_receive_bytes": 7 << 20, "kv_staging_bytes": 3 << 20}
    link = link_settings(load_settings(kind, given), small_engine(), new_incarnation())
    assert (link.window_bytes, link.receive_bytes, link.staging_bytes) == (5 << 20, 7 << 20, 3 << 20)
    with pytest.raises(ConfigError, match="receive_bytes"):
        link_settings(load_settings(kind, {"kv_receive_bytes": 1000}), small_engine(), new_incarnation())


@KINDS
def test_nixl_is_chosen_by_name(kind: type[NodeSettings]) -> None:
    if nixl_engine.installed_package() is None:
        pytest.skip(f"NIXL is not installed ({nixl_engine.INSTALL})")
    settings = load_settings(kind, {"cluster_secret": SECRET, "kv_engine": "nixl"})
    with closing(corridor_channel(settings, SystemClock())()) as channel:
        assert isinstance(channel, NixlChannel)
        assert isinstance(channel._inner, ZeroMqChannel)
        assert channel._secret is settings.secret


@KINDS
def test_nixl_that_is_not_installed_is_refused_by_name(
    kind: type[NodeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_engine, "PACKAGES", ("nixl_of_nobody",))
    with pytest.raises(ConfigError, match="nixl is not installed") as refused:
        corridor_channel(load_settings(kind, {"kv_engine": "nixl"}), SystemClock())
    assert "pip install pdserve[nixl]" in refused.value.hint


@KINDS
def test_nixl_does_not_pretend_to_encrypt(kind: type[NodeSettings]) -> None:
    with pytest.raises(ConfigError, match="not encrypted"):
        load_settings(kind, {"cluster_secret": SECRET, "kv_encryption": "curve", "kv_engine": "nixl"})
