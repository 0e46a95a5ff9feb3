"""Write the keys and values of a step's new tokens into a layer's paged cache.

    cache[slots[t], h, :] = new[t, h, :]        for every new token t and KV head h

Slots (see `slots`) of one call are distinct.
"""

from torch import Tensor


def write_kv(key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Scatter `keys` [tokens, kv_heads, key_dim] and `values` [tokens, kv_heads, value_dim] by `slots` [tokens], int64.

    Caches are `[slots, kv_heads, dim]`, contiguous. Raises ValueError if shapes or dtypes disagree.
    """
    for name, cache, new in (("keys", key_cache, keys), ("values", value_cache, values)):
        if new.shape[1:] != cache.shape[1:] or new.shape[0] != slots.shape[0]:
            raise ValueError(
                f"{name} {tuple(new.shape)} do not fit cache {tuple(cache.shape)} and {tuple(slots.shape)} slots"
            )
        if new.dtype != cache.dtype:
            raise ValueError(f"{name} are {new.dtype}, the cache is {cache.dtype}")
        # Rows of one dimension: torch copies them whole, several times faster than over two dimensions.
        cache.view(cache.shape[0], -1).index_copy_(0, slots, new.reshape(new.shape[0], -1))


def write_kv_reference(
    key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Return copies of both caches with the new tokens written one by one."""
    new_keys, new_values = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        new_keys[slot] = keys[token]
        new_values[slot] = values[token]
    return new_keys, new_values
