"""What is found out about a model at load, by running it: the shape of its KV, and that nothing goes past the pool.

A model that computes attention on its own, or carries state outside its KV, would often still give plausible tokens. So it
is run on a few tokens and judged by what it did:

1. `discover`: every layer calls paged attention exactly once, with its own keys, under a causal mask or a sliding window, and
   with no further ingredient (bias, ALiBi) that paged attention would drop.
2. `check_isolation`: a sequence computed beside another one in one step gives the logits that it gives alone in two chunks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdserve.core.errors import ModelUnsupported
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.engine.attention import AttentionCall, entered
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.forward import Forward
from pdserve.engine.kv_pool import KvPool
from pdserve.kernels.backends import Backend
from pdserve.kernels.ragged import ChunkRows

NUM_PROBE_TOKENS = 6
PROBE_BLOCK_SIZE = 16
"""At least the probe's tokens, so that one block holds a sequence; the usual size, for which kernels are compiled anyway."""
ISOLATION_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.1}
"""Largest difference allowed, as a share of the largest logit. Below fp32 the batch's shape alone changes logits."""


@dataclass(frozen=True, slots=True)
class _Mask:
    marker: Tensor
    window: int | None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer asks of attention, beside the shape of its KV; `sinks` [heads] or None."""

    num_heads: int
    scaling: float
    softcap: float | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class Discovered:
    """What the discovering forward found: the KV layout, and each layer's call."""

    layout: KvLayout
    calls: tuple[LayerCall, ...]


class Discovery:
    """The frame of the discovering forward: answers with plain causal attention, and writes down what it was asked."""

    def __init__(self, architecture: str, backend: Backend) -> None:
        self.layers: list[LayerLayout] = []
        self.calls: list[LayerCall] = []
        self._architecture = architecture
        self._backend = backend
        self._masks: list[_Mask] = []
        self._keys: list[Tensor] = []

    def mask(self, arguments: Mapping[str, object]) -> Tensor:
        """Read the window off the mask's own function; return a marker that leads from a layer's call back to it."""
        window = arguments.get("local_size")
        if window is not None and not isinstance(window, int):
            raise self._unsupported(f"a sliding window of {window!r}")
        function = arguments["mask_function"]
        assert callable(function)
        if not _is_causal(function, window):
            raise self._unsupported("an attention mask that is neither causal nor a causal sliding window")
        marker = torch.zeros(1, 1, 1, 1)
        self._masks.append(_Mask(marker, window))
        return marker

    def attend(self, call: AttentionCall) -> Tensor:
        """Record the layer and answer as a step would."""
        self._refuse_extras(call)
        if any(call.keys.data_ptr() == seen.data_ptr() for seen in self._keys):
            raise self._unsupported(f"keys shared between layers ({call.layer_name})")
        self._keys.append(call.keys)  # kept alive, so that equal addresses mean shared keys
        window = self._window(call)
        rows, heads, key_dim = call.keys.shape
        self.layers.append(LayerLayout(heads, key_dim, call.values.shape[2], window))
        self.calls.append(LayerCall(call.query.shape[1], call.scaling, call.softcap, call.sinks))
        plan = self._backend.plan([ChunkRows(0, rows, [0])], PROBE_BLOCK_SIZE, call.query.dtype, call.query.device)
        return self._backend.attend(
            call.query,
            call.keys.contiguous(),
            call.values.contiguous(),
            plan,
            window=window,
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def _window(self, call: AttentionCall) -> int | None:
        """Return the layer's window. The mask decides, as in transformers' own attention; the argument may be idle."""
        if call.mask is None:
            return call.window
        for mask in self._masks:
            if call.mask is mask.marker:
                return mask.window
        raise self._unsupported(f"an attention mask changed after it was made ({call.layer_name})")

    def _refuse_extras(self, call: AttentionCall) -> None:
        if call.query.shape[0] != call.keys.shape[0]:
            raise self._unsupported(f"attention over other tokens than its own ({call.layer_name})")
        if call.others.get("is_causal") is False:
            raise self._unsupported(f"attention that is not causal ({call.layer_name})")
        harmless = {"position_ids", "cache_position"}
        tensors = [name for name, value in call.others.items() if isinstance(value, Tensor) and name not in harmless]
        if tensors:
            raise self._unsupported(f"attention with {', '.join(sorted(tensors))} ({call.layer_name})")

    def _unsupported(self, what: str) -> ModelUnsupported:
        return ModelUnsupported(f"{self._architecture} uses {what}, which is not served")


def discover(
    module: torch.nn.Module,
    architecture: str,
    num_layers: int,
    vocab_size: int,
    dtype: str,
    backend: Backend,
    device: torch.device,
) -> Discovered:
    """Return the model's KV layout and its layers' calls.

    Raises ModelUnsupported, naming the architecture, if paged attention cannot serve it.
    """
    frame = Discovery(architecture, backend)
    with entered(frame), torch.inference_mode():
        module(
            input_ids=torch.tensor([_probe_tokens(0, vocab_size)], device=device),
            position_ids=torch.arange(NUM_PROBE_TOKENS, device=device)[None],
            use_cache=False,
        )
    if len(frame.layers) != num_layers:
        raise ModelUnsupported(
            f"{architecture} calls paged attention {len(frame.layers)} times for {num_layers} layers: part of it keeps its "
            "state elsewhere (recurrent layers, or attention of its own), which is not served"
        )
    return Discovered(KvLayout(tuple(frame.layers), dtype), tuple(frame.calls))


def check_isolation(
    module: torch.nn.Module,
    architecture: str,
    layout: KvLayout,
    vocab_size: int,
    backend: Backend,
    device: torch.device,
) -> None:
    """Raise ModelUnsupported if a sequence's logits depend on its neighbours, or on being cut into chunks."""
    pool = KvPool(layout, num_blocks=3, block_size=PROBE_BLOCK_SIZE, device=device, backend=backend)
    forward = Forward(module, pool, backend, device)
    neighbour, tokens = _probe_tokens(0, vocab_size), _probe_tokens(1, vocab_size)
    half = NUM_PROBE_TOKENS // 2
    together = forward.logits(
        [SequenceChunk(neighbour, 0, [0]), SequenceChunk(tokens, 0, [1])], [(), (len(tokens) - 1,)]
    )
    forward.logits([SequenceChunk(tokens[:half], 0, [2])], [()])
    alone = forward.logits([SequenceChunk(tokens[half:], half, [2])], [(len(tokens) - half - 1,)])
    difference = float((together.float() - alone.float()).abs().max())
    allowed = ISOLATION_TOLERANCE[layout.dtype] * float(alone.float().abs().max())
    if not difference <= allowed:  # also true for NaN
        raise ModelUnsupported(
            f"{architecture} gives other logits in a mixed step than alone (by {difference:.3g}, {allowed:.3g} allowed): it "
            "carries state outside its KV cache (recurrent or convolution layers), which is not served"
        )


def _probe_tokens(number: int, vocab_size: int) -> tuple[int, ...]:
    return tuple((3 + 17 * number + 7 * index) % vocab_size for index in range(NUM_PROBE_TOKENS))


def _is_causal(function: Callable[..., Any], window: int | None) -> bool:
    """Evaluate a mask function at the first positions and around the window's edge."""
    zero = torch.tensor(0)
    edge = window or 0
    for query in (*range(8), edge, edge + 1, 2 * edge + 3):
        key = torch.arange(query + 3)
        expected = key <= query
        if window is not None:
            expected &= query - key < window
        if not torch.equal(torch.as_tensor(function(zero, zero, torch.tensor(query), key)).expand(key.shape), expected):
            return False
    return True
