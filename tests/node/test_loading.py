"""What a node says before it loads a model for a device that it cannot have."""

import pytest
import torch

from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.node_settings import DecodeSettings
from pdserve.core.settings import load_settings
from pdserve.node.loading import check_device, load_engine


@pytest.mark.parametrize(
    ("device", "said"),
    [("gpu", "'gpu' is no device"), ("cuda", "cuda is not here; torch sees 0"), ("cuda:1", "cuda:1 is not here")],
)
def test_device_that_is_not_here_is_a_wrong_setting(device: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=said):
        check_device(device)


def test_device_that_is_here_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda", "cuda:1"):
        check_device(device)


@pytest.mark.asyncio
async def test_node_asks_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda` without CUDA was told as a fault of pdserve's: an assertion of torch's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(PdserveError, match="cuda is not here"):
        await load_engine(load_settings(DecodeSettings, {"device": "cuda", "model": "no-such-model"}))
