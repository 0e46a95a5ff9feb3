"""Seeded faults of the attention kernels, and how many of them check 1 sees: `python -m tests.kernels.triton.mutants`.

A mutant is the source of a kernel's file with one piece replaced, imported as a module of its own and run on the cases of
`attention_cases` until one fails. Prints the table of docs/kernels.md. Takes minutes; CI runs a few (`interpreted/test_mutants`).
Names of kernels (`split`, `merge`, `prefill`) choose some.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "kernels" / "pdserve" / "kernels" / "triton"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in the kernel, the only place that reads `old` reads `new`. `equal` says why no result changes, if so."""

    kernel: str
    old: str
    new: str
    equal: str = ""


def _of(kernel: str, *pairs: tuple[str, str]) -> Iterator[Mutant]:
    return (Mutant(kernel, old, new) for old, new in pairs)


MUTANTS = [
    *_of(
        "split",
        ("tl.maximum(length - WINDOW, 0)", "tl.maximum(length - WINDOW - 1, 0)"),
        ("tl.maximum(length - WINDOW, 0)", "length - WINDOW"),
        ("tl.minimum(first + part, length)", "first + part"),
        (
            "tl.cdiv(tl.cdiv(length - visible, SPLITS), POSITIONS) * POSITIONS",
            "tl.cdiv(length - visible, SPLITS) // POSITIONS * POSITIONS",
        ),
        ("tl.cdiv(tl.cdiv(length - visible, SPLITS), POSITIONS)", "((length - visible) // SPLITS // POSITIONS)"),
        ("first = visible + split * part", "first = split * part"),
        ("heads = kv_head * GROUP + members", "heads = kv_head + members"),
        ("is_head = members < GROUP", "is_head = members < ROWS"),
        ("is_key = key_dims < KEY_DIM", "is_key = key_dims < KEY_PAD"),
        ("is_value = value_dims < VALUE_DIM", "is_value = value_dims < VALUE_PAD"),
        ("is_seen = positions < stop", "is_seen = positions <= stop"),
        ("positions // BLOCK_SIZE, mask=is_seen, other=0", "positions // BLOCK_SIZE"),
        ("page.to(tl.int64) * BLOCK_SIZE", "page * BLOCK_SIZE"),
        ("positions % BLOCK_SIZE", "(positions - start) % BLOCK_SIZE"),
        (
            "mask=is_seen[None, :] & is_key[:, None],\n            other=0.0,",
            "mask=is_seen[None, :] & is_key[:, None],",
        ),
        (
            "mask=is_seen[:, None] & is_value[None, :],\n            other=0.0,",
            "mask=is_seen[:, None] & is_value[None, :],",
        ),
        ('tl.where(is_seen[None, :], scores * LOG2_E, -float("inf"))', "scores * LOG2_E"),
        ('scores * LOG2_E, -float("inf"))', 'scores, -float("inf"))'),
        ("scores *= k_scale[None, :]", "scores *= 1.0"),
        ("weights *= v_scale[None, :]", "weights *= 1.0"),
        (
            "mask=is_seen, other=0.0)  # [POSITIONS]\n            weights",
            "mask=is_seen)  # [POSITIONS]\n            weights",
        ),
        ('k.to(q.dtype), input_precision="ieee"', "k.to(q.dtype)"),
        ("mix * fade[:, None] +", "mix +"),
        ("total = total * fade + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)"),
        ("total += 1.0", "total += 0.0"),
        ("HAS_SINKS and SPLITS == 1", "HAS_SINKS"),
        ("softcap * (1.0 -", "(1.0 -"),
        ("largest + tl.log2(divisor)", "largest + tl.log(divisor)"),
        ("(sequence * num_heads + heads) * SPLITS + split", "(sequence * num_heads + heads) * SPLITS"),
        ("tl.load(rows + sequence)", "sequence"),
    ),
    *_of(
        "merge",
        ("is_split = splits < SPLITS\n", "is_split = splits < SPLITS_PAD\n"),
        ("is_dim = dims < VALUE_DIM\n", "is_dim = dims < VALUE_PAD\n"),
        ('is_split, other=-float("inf")', "is_split, other=0.0"),
        ("is_split[:, None] & is_dim[None, :], other=0.0", "is_split[:, None] & is_dim[None, :]"),
        ("(sequence * num_heads + head) * SPLITS + splits", "(sequence * num_heads + head) * SPLITS_PAD + splits"),
        ("(sequence * num_heads + head) * SPLITS + splits", "head * SPLITS + splits"),
        ('largest = tl.where(largest == -float("inf"), 0.0, largest)', "largest += 0.0"),
        ("total += tl.exp2(sink - largest)", "total += tl.exp2(-largest)"),
        ("weights = tl.exp2(log_sum - largest)", "weights = tl.exp(log_sum - largest)"),
        ("weights = tl.exp2(log_sum - largest)", "weights = tl.exp2(log_sum)"),
        ("tl.sum(part * weights[:, None], 0) /", "tl.sum(part, 0) /"),
        ("tl.where(total > 0.0, total, 1.0)\n    tl.store", "total\n    tl.store"),
        ("tl.load(sinks + head).to(tl.float32) * LOG2_E", "tl.load(sinks + head).to(tl.float32)"),
        ("row * s_out_row + head * s_out_head + dims,", "sequence * s_out_row + head * s_out_head + dims,"),
    ),
    *_of(
        "prefill",
        ("tl.minimum(first_token + TOKENS, count) - 1", "first_token + TOKENS - 1"),
        ("tl.minimum(first_token + TOKENS, count) - 1", "tl.minimum(first_token + TOKENS, count) - 2"),
        ("first_token + members // GROUP", "first_token + members % TOKENS"),
        ("kv_head * GROUP + members % GROUP", "kv_head * GROUP + members // TOKENS"),
        ("(members < TOKENS * GROUP) & (tokens < count)", "tokens < count"),
        ("(members < TOKENS * GROUP) & (tokens < count)", "members < TOKENS * GROUP"),
        ("places = start + tokens", "places = tokens"),
        ("is_key = key_dims < KEY_DIM", "is_key = key_dims < KEY_PAD"),
        ("is_value = value_dims < VALUE_DIM", "is_value = value_dims < VALUE_PAD"),
        ("is_cached = positions < stop", "is_cached = positions <= stop"),
        ("positions // BLOCK_SIZE, mask=is_cached, other=0)", "positions // BLOCK_SIZE)"),
        ("page.to(tl.int64) * BLOCK_SIZE", "page * BLOCK_SIZE"),
        ("positions % BLOCK_SIZE", "(positions - begin) % BLOCK_SIZE"),
        ("positions[None, :] <= places[:, None]\n", "positions[None, :] < places[:, None]\n"),
        ("positions[None, :] > places[:, None] - WINDOW", "positions[None, :] >= places[:, None] - WINDOW"),
        ("tl.maximum(start + first_token - WINDOW + 1, 0)", "tl.maximum(start + first_token - WINDOW, 0)"),
        ("tl.maximum(start + first_token - WINDOW + 1, 0)", "tl.maximum(start + last_token - WINDOW + 1, 0)"),
        ('anchor = tl.where(new_largest == -float("inf"), 0.0, new_largest)', "anchor = new_largest"),
        ("scores *= k_scale[None, :]", "scores *= 1.0"),
        ("weights *= v_scale[None, :]", "weights *= 1.0"),
        ("mix * fade[:, None] +", "mix +"),
        ("total = total * fade + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)"),
        ("total += 1.0", "total += 0.0"),
        ("softcap * (1.0 -", "(1.0 -"),
        ('k.to(q.dtype), input_precision="ieee"', "k.to(q.dtype)"),
        (
            "mask=is_cached[None, :] & is_key[:, None],\n            other=0.0,",
            "mask=is_cached[None, :] & is_key[:, None],",
        ),
        (
            "mask=is_cached[:, None] & is_value[None, :],\n            other=0.0,",
            "mask=is_cached[:, None] & is_value[None, :],",
        ),
    ),
]
EQUAL = [
    Mutant(
        "split",
        "is_seen = positions < stop",
        "is_seen = positions < length",
        "splits begin and end where tiles do",
    ),
    Mutant(
        "merge",
        "largest = tl.maximum(largest, sink)",
        "largest += 0.0",
        "a sink so large that its power overflows leaves 0 either way",
    ),
    Mutant(
        "prefill", "if first_token >= count:", "if first_token > count:", "the part that then runs has no rows to store"
    ),
]
"""Faults that change no result; they survive, and count in no sum."""
FILES = {"split": "paged_decode.py", "merge": "paged_decode.py", "prefill": "paged_prefill.py"}


def source_of(mutant: Mutant) -> str:
    """Return the file with the fault, which lies within its kernel; raise ValueError unless there is one place for it."""
    text = (KERNELS / FILES[mutant.kernel]).read_text(encoding="utf-8")
    start = text.index(f"def {mutant.kernel}_kernel(")
    stop = text.index("\n\n\n", start)
    if text.count(mutant.old, start, stop) != 1:
        raise ValueError(f"{mutant.kernel}: {mutant.old!r} stands there {text.count(mutant.old, start, stop)} times")
    return text[:start] + text[start:stop].replace(mutant.old, mutant.new) + text[stop:]


def load(mutant: Mutant, folder: Path) -> ModuleType:
    """Import the mutant from a file of its own: the interpreter reads a kernel's source."""
    name = f"mutant_{[*MUTANTS, *EQUAL].index(mutant)}"
    path = folder / f"{name}.py"
    path.write_text(source_of(mutant), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def verdict(mutant: Mutant, folder: Path) -> str:
    """Return which case kills the mutant, and how; empty if none does."""
    from tests.kernels.triton.attention_cases import DECODE, PREFILL, check_decode, check_large, check_prefill

    module = load(mutant, folder)
    checks: list[Callable[[], None]]
    if mutant.kernel == "prefill":
        checks = [partial(check_prefill, case, module.paged_prefill) for case in PREFILL]
        checks.append(partial(check_large, None, module.paged_prefill))
    else:
        checks = [partial(check_decode, case, module.paged_decode) for case in DECODE]
        checks.append(partial(check_large, module.paged_decode, None))
    for number, check in enumerate(checks):
        try:
            check()
        except Exception as error:  # noqa: BLE001  # whatever a broken kernel ends in is a verdict
            return f"case {number}: {_kind(error)}"
    return ""


def _kind(error: Exception) -> str:
    text = str(error)
    for sign, kind in (("out of bounds", "bounds"), ("overflow", "overflow"), ("stores twice", "double store")):
        if sign in text:
            return kind
    return "wrong numbers" if isinstance(error, AssertionError) else type(error).__name__


def main() -> None:
    """Try the mutants, print the table and the sums."""
    kernels = sys.argv[1:] or list(FILES)
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.triton.checked_interpreter import install

    install()
    killed: dict[str, list[bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mutant in (mutant for mutant in MUTANTS if mutant.kernel in kernels):
            how = verdict(mutant, Path(folder))
            killed.setdefault(mutant.kernel, []).append(bool(how))
            line = f"| {mutant.kernel} | `{_one_line(mutant.old)}` | `{_one_line(mutant.new)}` | {how or 'survives'} |"
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    for kernel, results in killed.items():
        sys.stdout.write(f"{kernel}: {sum(results)} of {len(results)} killed\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
