"""Write the keys and values of a step's new tokens into a layer's paged cache.

    cache[slots[t], h, :] = new[t, h, :]        for every new token t with slots[t] >= 0, and KV head h

A negative slot writes nothing: lanes that only fill a captured graph have one. The reference is `kv_write.write_kv`.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.arguments import check, check_together

HEADS_AT_ONCE = 8
"""KV heads that one program copies."""


@triton.jit
def write_kernel(
    keys,
    values,
    key_cache,
    value_cache,
    slots,
    s_keys_token,
    s_keys_head,
    s_values_token,
    s_values_head,
    s_key_slot,
    s_key_head,
    s_value_slot,
    s_value_head,
    num_heads,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Copy one token's heads; grid (tokens, groups of heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)  # a scalar inside the grid
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = ((heads < num_heads) & (slot >= 0))[:, None]

    dims = tl.arange(0, KEY_PAD)
    mask = is_head & (dims < KEY_DIM)[None, :]
    source = keys + token * s_keys_token + heads[:, None] * s_keys_head + dims[None, :]
    row = tl.load(source, mask=mask, other=0)  # [HEADS, KEY_PAD]
    tl.store(key_cache + slot * s_key_slot + heads[:, None] * s_key_head + dims[None, :], row, mask=mask)

    dims = tl.arange(0, VALUE_PAD)
    mask = is_head & (dims < VALUE_DIM)[None, :]
    source = values + token * s_values_token + heads[:, None] * s_values_head + dims[None, :]
    row = tl.load(source, mask=mask, other=0)  # [HEADS, VALUE_PAD]
    tl.store(value_cache + slot * s_value_slot + heads[:, None] * s_value_head + dims[None, :], row, mask=mask)


def write_kv(key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Scatter `keys` [tokens, kv_heads, key_dim] and `values` [tokens, kv_heads, value_dim] by `slots` [tokens], int64.

    Caches are `[slots, kv_heads, dim]`; slots are distinct, or negative for no write. Raises ValueError if shapes, types,
    strides or devices disagree.
    """
    check_write(key_cache, value_cache, keys, values, slots)
    for name, cache, new in (("keys", key_cache, keys), ("values", value_cache, values)):
        check(new.dtype == cache.dtype, f"{name} are {new.dtype}, the cache is {cache.dtype}")
    num_tokens, num_heads, key_dim = keys.shape
    value_dim = values.shape[2]
    if num_tokens == 0:
        return
    at_once = min(HEADS_AT_ONCE, triton.next_power_of_2(num_heads))
    write_kernel[(num_tokens, triton.cdiv(num_heads, at_once))](
        keys,
        values,
        key_cache,
        value_cache,
        slots,
        *keys.stride()[:2],
        *values.stride()[:2],
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_PAD=triton.next_power_of_2(key_dim),
        VALUE_PAD=triton.next_power_of_2(value_dim),
        HEADS=at_once,
        num_warps=4,
    )


def check_write(key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Raise ValueError unless new tokens, caches and slots fit together; types are the caller's to check."""
    check_together(key_cache=key_cache, value_cache=value_cache, keys=keys, values=values, slots=slots)
    for name, cache, new in (("keys", key_cache, keys), ("values", value_cache, values)):
        check(
            new.shape[1:] == cache.shape[1:] and new.shape[0] == slots.shape[0],
            f"{name} {tuple(new.shape)} do not fit cache {tuple(cache.shape)} and {tuple(slots.shape)} slots",
        )
    check(key_cache.shape[:2] == value_cache.shape[:2], "the two caches differ in slots or KV heads")
