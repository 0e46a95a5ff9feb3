"""Philox against the vectors published with Random123, and the noise made from it against fixed numbers."""

import numpy as np
import pytest

from pdserve.kernels.philox import (
    BLOCK,
    LEAST_UNIFORM,
    MAX_NOISE,
    first_words,
    gumbel,
    gumbel_from_uniform,
    gumbel_of_rows,
    philox_4x32,
    uniform,
    uniform_from_bits,
)

# (counter, key, output) of philox4x32 with 10 rounds.
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    words = [np.array([word], np.uint32) for word in counter]
    outputs = philox_4x32(key[0] | key[1] << 32, *words)
    assert tuple(int(output[0]) for output in outputs) == expected


def test_counters_are_broadcast_and_independent() -> None:
    ids = np.arange(1000, dtype=np.uint32)
    one, zero = np.array([7], np.uint32), np.zeros(1, np.uint32)
    together = philox_4x32(5, ids, one, zero, zero)[0]
    alone = [int(philox_4x32(5, ids[index : index + 1], one, zero, zero)[0][0]) for index in (0, 1, 999)]
    assert [int(together[index]) for index in (0, 1, 999)] == alone


@pytest.mark.parametrize("length", [1, 100, BLOCK, BLOCK + 1, 3 * BLOCK - 1])
def test_many_candidates_get_the_numbers_of_the_plain_rounds(length: int) -> None:
    key, position, sequence = 0xFEDCBA9876543210, 0xFFFFFFFF, 63
    ids = np.arange(length) * 7 % 2**32
    plain = philox_4x32(
        key,
        ids.astype(np.uint32),
        np.array([position], np.uint32),
        np.array([sequence], np.uint32),
        np.zeros(1, np.uint32),
    )[0]
    assert np.array_equal(first_words(key, ids, position, sequence), plain)


def test_rows_at_once_get_the_noise_of_each_alone() -> None:
    seeds, positions, sequences = [2**64 - 1, 0, 5, 5], [9, 0, 3, 4], [0, 63, 1, 1]
    token_ids = [np.arange(n) * 11 for n in (300, 1, 2 * BLOCK, 40)]
    together = gumbel_of_rows(seeds, positions, sequences, token_ids)
    for index, ids in enumerate(token_ids):
        assert np.array_equal(together[index], gumbel(seeds[index], ids, positions[index], sequences[index]))


def test_no_noise_is_above_the_largest() -> None:
    largest = float(gumbel_from_uniform(np.zeros(1, np.float32))[0])
    assert MAX_NOISE - 0.01 < largest < MAX_NOISE
    assert float(uniform_from_bits(np.array([1], np.uint32))[0]) > LEAST_UNIFORM


def test_uniform_folds_the_sign_and_stays_below_one() -> None:
    bits = np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32)
    values = uniform_from_bits(bits)
    assert values.dtype == np.float32
    assert values[0] == 0.0
    assert values[4] == 0.0
    assert values[2] == values[3] == np.float32(0.99999994)


def test_noise_is_frozen() -> None:
    """Both nodes, every version and every backend must draw the same numbers: these may never change."""
    assert [f"{value:.6f}" for value in gumbel(1234567890123456789, np.array([0, 1, 49151]), 17, 3)] == GOLDEN_NOISE


GOLDEN_NOISE = ["-0.205790", "0.554321", "1.212659"]


def test_each_word_of_the_key_and_counter_matters() -> None:
    ids = np.arange(4)
    base = uniform(1, ids, 2, 3)
    for other in (
        uniform(2, ids, 2, 3),
        uniform(1 + (1 << 32), ids, 2, 3),
        uniform(1, ids, 3, 3),
        uniform(1, ids, 2, 4),
    ):
        assert not np.any(base == other)


def test_noise_is_finite_and_ordered_at_the_ends() -> None:
    ends = uniform_from_bits(np.array([0, 1, 2, 0x7FFFFFFE, 0x7FFFFFFF], np.uint32))
    noise = gumbel_from_uniform(ends)
    assert np.isfinite(noise).all()
    assert noise[0] > noise[1] > noise[2] > 20
    assert noise[-1] < -2


def test_noise_has_the_mean_of_gumbel_and_is_finite() -> None:
    noise = gumbel(9, np.arange(200_000), 0, 0)
    assert np.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - np.pi**2 / 6) < 0.02
