"""The Triton backend on the CPU, natively: for tests only, since no product code ever computes this way."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from pdserve.kernels.backends import BACKENDS
from tests.kernels.native.lowering import reason_not_here, substituted

DECODE_ROWS, PREFILL_ROWS, POSITIONS = 4, 8, 8
"""Tiles of the size of a GPU's become so much straight-line code that each takes a minute to compile; the source is the same."""
WIDE = 128
"""Heads that are wider take fewer rows."""


@contextmanager
def triton_on_cpu() -> Iterator[None]:
    """Let the backend `triton` serve CPU tensors inside the `with` block, with small tiles."""
    from pdserve.kernels import triton_backend
    from pdserve.kernels.triton import paged_decode, paged_prefill
    from pdserve.kernels.triton.tiles import Tile

    def rows_for(padded_dim: int, rows: int) -> int:
        return rows if padded_dim <= WIDE else rows // 2

    def decode_tile(group: int, padded_dim: int, element_bytes: int) -> Tile:
        return Tile(max(rows_for(padded_dim, DECODE_ROWS), group), POSITIONS, 1, 1)

    def prefill_tile(max_rows: int, group: int, padded_dim: int, element_bytes: int, stored_bytes: int) -> Tile:
        return Tile(max(rows_for(padded_dim, PREFILL_ROWS), group), POSITIONS, 1, 1)

    backend = replace(triton_backend.BACKEND, devices=frozenset({"cpu"}))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(BACKENDS, {"triton": backend}))
        stack.enter_context(mock.patch.object(paged_decode, "decode_tile", decode_tile))
        stack.enter_context(mock.patch.object(paged_prefill, "prefill_tile", prefill_tile))
        stack.enter_context(substituted())
        yield


_for_good = ExitStack()


def install() -> None:
    """Do so until the process ends; for the node processes that `site/sitecustomize.py` is given to."""
    reason = reason_not_here()
    if reason is not None:
        sys.exit(reason)
    _for_good.enter_context(triton_on_cpu())
