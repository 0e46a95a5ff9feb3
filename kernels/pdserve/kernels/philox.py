"""Philox-4x32-10: counter-based random numbers, as Triton's `tl.philox` and `tl.rand` make them.

One round over a counter (c0, c1, c2, c3) and a key (k0, k1), all 32 bits, hi and lo the halves of a 64-bit product:

    (c0, c1, c2, c3) <- (hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1, lo(A c0));    (k0, k1) += (W0, W1)

ten times. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11; the golden vectors of the tests are
those published with its library Random123.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

UInt32Array = NDArray[np.uint32]
UInt64Array = NDArray[np.uint64]
Words = int | UInt64Array

ROUND_A = np.uint64(0xD2511F53)
ROUND_B = np.uint64(0xCD9E8D57)
KEY_A = 0x9E3779B9
KEY_B = 0xBB67AE85
NUM_ROUNDS = 10
MASK_32 = 0xFFFFFFFF
LOW = np.uint64(MASK_32)
HALF = np.uint64(32)
BLOCK = 12288
"""Candidates at a time: six arrays of 96 KiB stay in a core's second cache and below what the C library fetches afresh."""
UNIFORM_SCALE = np.float32(4.6566127342e-10)
"""Just under 2^-31, so that the largest uniform stays below 1 in float32."""
LEAST_UNIFORM = 2.0**-32
"""What a uniform of 0 counts as."""
MAX_NOISE = 22.19
"""No Gumbel number is above this: the noise of `LEAST_UNIFORM` is 22.1807."""


def philox_4x32(
    key: int, c0: UInt32Array, c1: UInt32Array, c2: UInt32Array, c3: UInt32Array
) -> tuple[UInt32Array, UInt32Array, UInt32Array, UInt32Array]:
    """Return the four output words, each of the counters' broadcast shape. `key` has 64 bits, low word first."""
    shape = np.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    # One-dimensional inputs of length 1 stay so: the first rounds then cost almost nothing for constant counter words.
    k0, k1 = key & MASK_32, (key >> 32) & MASK_32
    shift = np.uint64(32)
    for _ in range(NUM_ROUNDS):
        product_a = c0.astype(np.uint64) * ROUND_A
        product_b = c2.astype(np.uint64) * ROUND_B
        c0 = (product_b >> shift).astype(np.uint32) ^ c1 ^ np.uint32(k0)
        c2 = (product_a >> shift).astype(np.uint32) ^ c3 ^ np.uint32(k1)
        c1 = product_b.astype(np.uint32)
        c3 = product_a.astype(np.uint32)
        k0, k1 = (k0 + KEY_A) & MASK_32, (k1 + KEY_B) & MASK_32
    return (
        np.broadcast_to(c0, shape),
        np.broadcast_to(c1, shape),
        np.broadcast_to(c2, shape),
        np.broadcast_to(c3, shape),
    )


def uniform_from_bits(bits: UInt32Array) -> NDArray[np.float32]:
    """Map 32 random bits to [0, 1) in float32 as `tl.rand` does: the sign bit folds, 31 bits remain."""
    signed = bits.view(np.int32)
    folded = signed ^ (signed >> 31)
    return folded.astype(np.float32) * UNIFORM_SCALE


def first_words(key: Words, c0: NDArray[np.integer], c1: Words, c2: Words) -> UInt32Array:
    """Return the first output word of `philox_4x32` for counters (`c0`, `c1`, `c2`, 0), [n]; all but `c0` may be one for all.

    The same numbers, made for many candidates: in place, in 64-bit lanes, in blocks that stay in the cache.
    """
    words = np.empty(c0.shape[0], np.uint32)
    round_keys = _round_keys(key)
    for start in range(0, c0.shape[0], BLOCK):
        part = slice(start, start + BLOCK)
        words[part] = _first_words_of_block(
            [(_part(k0, part), _part(k1, part)) for k0, k1 in round_keys],
            c0[part].astype(np.uint64),
            _part(np.asarray(c1, np.uint64), part),
            _part(np.asarray(c2, np.uint64), part),
        )
    return words


def _round_keys(key: Words) -> list[tuple[UInt64Array, UInt64Array]]:
    k0, k1 = np.asarray(key & MASK_32, np.uint64), np.asarray((key >> 32) & MASK_32, np.uint64)
    steps = np.arange(NUM_ROUNDS, dtype=np.uint64)
    return [((k0 + step * np.uint64(KEY_A)) & LOW, (k1 + step * np.uint64(KEY_B)) & LOW) for step in steps]


def _part(words: UInt64Array, part: slice) -> UInt64Array:
    return words[part] if words.ndim else words


def _first_words_of_block(
    round_keys: Sequence[tuple[UInt64Array, UInt64Array]], w0: UInt64Array, c1: UInt64Array, c2: UInt64Array
) -> UInt64Array:
    """Return the words, each in the low half of 64 bits."""
    w1, w2, w3 = c1 & LOW, c2 & LOW, np.zeros((), np.uint64)
    for k0, k1 in round_keys[:3]:  # constants reach every word only with the third round
        a, b = w0 * ROUND_A, w2 * ROUND_B
        w0, w1, w2, w3 = (b >> HALF) ^ (w1 ^ k0), b & LOW, (a >> HALF) ^ (w3 ^ k1), a & LOW
    spare_0, spare_2 = np.empty_like(w0), np.empty_like(w0)
    for k0, k1 in round_keys[3:-1]:
        w0 *= ROUND_A
        w2 *= ROUND_B
        np.right_shift(w2, HALF, out=spare_0)
        spare_0 ^= w1
        spare_0 ^= k0
        np.right_shift(w0, HALF, out=spare_2)
        spare_2 ^= w3
        spare_2 ^= k1
        w2 &= LOW
        w0 &= LOW
        w0, w1, w2, w3, spare_0, spare_2 = spare_0, w2, spare_2, w0, w1, w3
    w2 *= ROUND_B
    w2 >>= HALF
    w2 ^= w1
    w2 ^= round_keys[-1][0]
    return w2


def uniform(seed: int, token_ids: NDArray[np.integer], position: int, sequence: int) -> NDArray[np.float32]:
    """Return one uniform in [0, 1) per candidate: key = `seed` (64 bits), counter = (token id, position, sequence, 0)."""
    return uniform_from_bits(first_words(seed, np.asarray(token_ids), position, sequence))


def gumbel(seed: int, token_ids: NDArray[np.integer], position: int, sequence: int) -> NDArray[np.float64]:
    """Return one standard Gumbel number per candidate, from `uniform`."""
    return gumbel_from_uniform(uniform(seed, token_ids, position, sequence))


def gumbel_of_rows(
    seeds: Sequence[int], positions: Sequence[int], sequences: Sequence[int], token_ids: Sequence[NDArray[np.integer]]
) -> list[NDArray[np.float64]]:
    """Return `gumbel` of each row's seed, position, sequence and candidates. At once: a few candidates cost as much as many."""
    if not token_ids:
        return []
    lengths = [len(ids) for ids in token_ids]
    keys, c1, c2 = (np.repeat(np.array(values, np.uint64), lengths) for values in (seeds, positions, sequences))
    noise = gumbel_from_uniform(uniform_from_bits(first_words(keys, np.concatenate(token_ids), c1, c2)))
    return np.split(noise, np.cumsum(lengths)[:-1])


def gumbel_from_uniform(u: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return -log(-log(1 - u)).

    1 - u rather than u: large noise, which decides draws, then comes from small u, where float32 is finest. A u of exactly 0
    (once in 2^31) counts as 2^-32, so that the noise is finite.
    """
    clamped = np.maximum(u.astype(np.float64), LEAST_UNIFORM)
    return np.asarray(-np.log(-np.log1p(-clamped)))
