"""Philox-4x32-10: counter-based random numbers, as Triton's `tl.philox` and `tl.rand` make them.

One round over a counter (c0, c1, c2, c3) and a key (k0, k1), all 32 bits, hi and lo the halves of a 64-bit product:

    (c0, c1, c2, c3) <- (hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1, lo(A c0));    (k0, k1) += (W0, W1)

ten times. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11; the golden vectors of the tests are
those published with its library Random123.
"""

import numpy as np
from numpy.typing import NDArray

UInt32Array = NDArray[np.uint32]

ROUND_A = np.uint64(0xD2511F53)
ROUND_B = np.uint64(0xCD9E8D57)
KEY_A = 0x9E3779B9
KEY_B = 0xBB67AE85
NUM_ROUNDS = 10
MASK_32 = 0xFFFFFFFF
UNIFORM_SCALE = np.float32(4.6566127342e-10)
"""Just under 2^-31, so that the largest uniform stays below 1 in float32."""


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
    folded = np.where(signed < 0, -signed - 1, signed)
    return folded.astype(np.float32) * UNIFORM_SCALE


def uniform(seed: int, token_ids: NDArray[np.integer], position: int, sequence: int) -> NDArray[np.float32]:
    """Return one uniform in [0, 1) per candidate: key = `seed` (64 bits), counter = (token id, position, sequence, 0)."""
    words = (
        np.asarray(token_ids).astype(np.uint32),
        np.array([position & MASK_32], np.uint32),
        np.array([sequence & MASK_32], np.uint32),
        np.zeros(1, np.uint32),
    )
    return uniform_from_bits(philox_4x32(seed, *words)[0].copy())


def gumbel(seed: int, token_ids: NDArray[np.integer], position: int, sequence: int) -> NDArray[np.float64]:
    """Return one standard Gumbel number per candidate, from `uniform`."""
    return gumbel_from_uniform(uniform(seed, token_ids, position, sequence))


def gumbel_from_uniform(u: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return -log(-log(1 - u)).

    1 - u rather than u: large noise, which decides draws, then comes from small u, where float32 is finest. A u of exactly 0
    (once in 2^31) counts as 2^-32, so that the noise is finite.
    """
    clamped = np.maximum(u.astype(np.float64), 2.0**-32)
    return np.asarray(-np.log(-np.log1p(-clamped)))
