"""Draw a token per row: the largest z + g over the kept candidates.

    z_i = (logit_i - max logit) / temperature,    g_i = -log(-log(1 - u_i)),    token = argmax over kept i of z_i + g_i

u is Philox-4x32-10 of key `seed` and counter (token id, position, sequence, 0), bit by bit that of `philox.uniform`; z and g are
float64. Candidates that the filters do not keep have a logit of negative infinity, which wins against nothing. Ties go to the
lowest id. The reference is `gumbel_max` with `philox`. Each program draws among some of the candidates, a second pass among the
winners; the vocabulary is the grid, so that one row fills the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.arguments import check, check_dtype, check_together

CANDIDATES = 1024
"""Token ids of one program."""
LEAST_UNIFORM = tl.constexpr(2.0**-32)
"""What a uniform of 0 counts as, as in `philox`."""
NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def uniform_kernel(seeds, positions, sequences, out, s_out, vocabulary, CANDIDATES: tl.constexpr):
    """Write the uniforms of some of a row's candidates; grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * CANDIDATES + tl.arange(0, CANDIDATES)
    seed = tl.load(seeds + row)
    nothing = ids * 0
    position = nothing + tl.load(positions + row)
    sequence = nothing + tl.load(sequences + row)
    bits, _, _, _ = tl.philox(seed, ids, position, sequence, nothing)
    tl.store(out + row * s_out + ids, tl.uint_to_uniform_float(bits), mask=ids < vocabulary)


@triton.jit
def draw_kernel(
    logits,
    largest,
    temperatures,
    seeds,
    positions,
    sequences,
    best_values,
    best_ids,
    s_logits,
    vocabulary,
    num_parts,
    CANDIDATES: tl.constexpr,
):
    """Draw among some of a row's candidates; grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * CANDIDATES + tl.arange(0, CANDIDATES)
    logit = tl.load(logits + row * s_logits + ids, mask=ids < vocabulary, other=-float("inf"))  # [CANDIDATES]
    seed = tl.load(seeds + row)
    nothing = ids * 0
    position = nothing + tl.load(positions + row)
    sequence = nothing + tl.load(sequences + row)
    bits, _, _, _ = tl.philox(seed, ids, position, sequence, nothing)
    u = tl.maximum(tl.uint_to_uniform_float(bits).to(tl.float64), LEAST_UNIFORM)
    # log(1 - u) as exact as log1p: what 1 - u lost by rounding is put back by the quotient.
    rest = 1.0 - u
    noise = -tl.log(-tl.log(rest) * (u / (1.0 - rest)))
    z = (logit.to(tl.float64) - tl.load(largest + row).to(tl.float64)) / tl.load(temperatures + row)
    score = z + noise
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, ids, NOBODY), 0)
    tl.store(best_values + row * num_parts + part, best)
    tl.store(best_ids + row * num_parts + part, winner)


@triton.jit
def choose_kernel(best_values, best_ids, tokens, num_parts, PARTS_PAD: tl.constexpr):
    """Draw among the winners of a row's parts; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS_PAD)
    mask = parts < num_parts
    score = tl.load(best_values + row * num_parts + parts, mask=mask, other=-float("inf"))  # [PARTS_PAD]
    ids = tl.load(best_ids + row * num_parts + parts, mask=mask, other=NOBODY)  # [PARTS_PAD]
    winner = tl.min(tl.where(score == tl.max(score, 0), ids, NOBODY), 0)
    tl.store(tokens + row, winner.to(tl.int64))


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, sequences: Tensor) -> Tensor:
    """Return the token drawn from each row of `logits` [rows, vocabulary], float32, as int64 [rows].

    `temperatures` [rows] in float64, above 0; `seeds` [rows] in int64, the 64 bits of a seed; `positions` and `sequences` [rows]
    in int32. The maximum of each row is finite. Raises ValueError if shapes, types or devices disagree.
    """
    _check_rows(seeds, positions, sequences)
    check_together(logits=logits, temperatures=temperatures, seeds=seeds)
    check_dtype("logits", logits, torch.float32)
    check_dtype("temperatures", temperatures, torch.float64)
    rows, vocabulary = logits.shape
    check(temperatures.shape == seeds.shape == (rows,), f"temperatures and seeds are not [{rows}]")
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    candidates = min(CANDIDATES, triton.next_power_of_2(vocabulary))
    parts = triton.cdiv(vocabulary, candidates)
    best_values = torch.empty((rows, parts), dtype=torch.float64, device=logits.device)
    best_ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    draw_kernel[(rows, parts)](
        logits,
        logits.amax(dim=1),
        temperatures,
        seeds,
        positions,
        sequences,
        best_values,
        best_ids,
        logits.stride(0),
        vocabulary,
        parts,
        CANDIDATES=candidates,
        num_warps=4,
    )
    choose_kernel[(rows,)](best_values, best_ids, tokens, parts, PARTS_PAD=triton.next_power_of_2(parts), num_warps=4)
    return tokens


def uniform(seeds: Tensor, positions: Tensor, sequences: Tensor, vocabulary: int) -> Tensor:
    """Return the uniforms of ids 0 … vocabulary - 1, float32 [rows, vocabulary]: those of `philox.uniform`, bit by bit."""
    _check_rows(seeds, positions, sequences)
    out = torch.empty((seeds.shape[0], vocabulary), dtype=torch.float32, device=seeds.device)
    if out.numel():
        candidates = min(CANDIDATES, triton.next_power_of_2(vocabulary))
        uniform_kernel[(seeds.shape[0], triton.cdiv(vocabulary, candidates))](
            seeds, positions, sequences, out, out.stride(0), vocabulary, CANDIDATES=candidates, num_warps=4
        )
    return out


def _check_rows(seeds: Tensor, positions: Tensor, sequences: Tensor) -> None:
    check_together(seeds=seeds, positions=positions, sequences=sequences)
    check_dtype("seeds", seeds, torch.int64)
    check_dtype("positions", positions, torch.int32)
    check_dtype("sequences", sequences, torch.int32)
    check(seeds.shape == positions.shape == sequences.shape, "seeds, positions and sequences differ in shape")
