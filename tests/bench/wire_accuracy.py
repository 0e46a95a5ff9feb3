"""What KV in 8 bits on the wire costs in accuracy: `python -m tests.bench.wire_accuracy`.

As between two nodes: a context is computed exactly, its KV goes through the wire form, and what follows is computed on what
arrived. Text: Python's licence and docstrings of its standard library. Perplexity is of the tokens after the context; agreement
is of greedy answers, token by token and as a whole, with the answers over exact KV.
"""

import ast
import json
import math
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from pdserve.core.models import DEFAULT_MODEL, resolve_model_dir
from pdserve.core.work import Sampling
from pdserve.engine.batch import Chosen, SequenceChunk
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import SampledRow
from pdserve.kernels.wire_quant import dequantize_wire, quantize_wire
from tests.bench.machine import describe_machine

CONTEXT = 384
SCORED = 128
ANSWER = 64
MODULES = (
    "argparse",
    "collections/__init__",
    "dataclasses",
    "decimal",
    "difflib",
    "doctest",
    "heapq",
    "pickletools",
    "random",
)
BLOCKS = (CONTEXT + SCORED) // 16 + 1
FORMS = ("plain", "int8", "float8_e4m3")
PLACES = {"plain": range(BLOCKS), "int8": range(BLOCKS, 2 * BLOCKS), "float8_e4m3": range(2 * BLOCKS, 3 * BLOCKS)}


@dataclass(slots=True)
class Tally:
    """What one wire form gave, over all windows."""

    logprob: float = 0.0
    num_scored: int = 0
    num_equal: int = 0
    num_answered: int = 0
    num_same_answers: int = 0


def texts() -> Iterator[str]:
    """Yield the licence, then the docstrings of some modules, each module's as one text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    yield (library / "LICENSE.txt").read_text(encoding="utf-8")
    for name in MODULES:
        tree = ast.parse((library / f"{name}.py").read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        yield "\n\n".join(text for text in found if text)


def windows(tokenizer: Tokenizer, most: int) -> Iterator[tuple[int, ...]]:
    """Yield at most `most` windows of text without overlap, taking turns between the texts."""
    rest = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts()]
    while most and any(len(ids) >= CONTEXT + SCORED for ids in rest):
        for number, ids in enumerate(rest):
            if most and len(ids) >= CONTEXT + SCORED:
                rest[number] = ids[CONTEXT + SCORED :]
                most -= 1
                yield tuple(ids[: CONTEXT + SCORED])


def through_the_wire(engine: Engine, form: str) -> None:
    """Copy the context's KV from the plain blocks to those of `form`, as a hand-over would."""
    layout, tokens = engine.layout, range(CONTEXT)
    for layer in range(layout.num_layers):
        layers = range(layer, layer + 1)
        plain = memoryview(bytearray(layout.range_bytes(layers, CONTEXT)))
        small = memoryview(bytearray(layout.on_wire(form).range_bytes(layers, CONTEXT)))
        engine.pack(layers, PLACES["plain"], tokens, plain)
        quantize_wire(plain, layout, layers, CONTEXT, form, small)
        dequantize_wire(small, layout, layers, CONTEXT, form, plain)
        engine.unpack(layers, PLACES[form], tokens, plain)


def scored(engine: Engine, window: tuple[int, ...], blocks: range) -> float:
    """Return the sum of log-probabilities of the tokens after the context; the first is the context's own, and not counted."""
    rest = window[CONTEXT:]
    result = engine.step([SequenceChunk(rest[:-1], CONTEXT, blocks, scored_ids=rest[1:])])
    return sum(score.logprob for score in result.chunks[0].scores)


def answers(engine: Engine, first: int) -> dict[str, list[int]]:
    """Return greedy answers over the KV of each form, in one batch; all begin with the token that the prefill node chose."""
    given = {form: [first] for form in FORMS}
    for step in range(ANSWER):
        row = (SampledRow(Sampling(temperature=0.0), 0, step + 1),)
        chunks = [SequenceChunk((given[form][-1],), CONTEXT + step, PLACES[form], row) for form in FORMS]
        for form, chunk in zip(FORMS, engine.step(chunks).chunks, strict=True):
            (choice,) = chunk.choices
            assert isinstance(choice, Chosen)
            given[form].append(choice.token_id)
    return {form: ids[1:] for form, ids in given.items()}


def measure(most: int) -> dict[str, object]:
    """Measure all forms on the same windows."""
    folder = resolve_model_dir(DEFAULT_MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    engine = Engine.load(folder, dtype="float32", threads=1, block_size=16, num_blocks=3 * BLOCKS)
    tallies, num_windows = {form: Tally() for form in FORMS}, 0
    for window in windows(tokenizer, most):
        num_windows += 1
        row = (SampledRow(Sampling(temperature=0.0), 0, 0),)
        (choice,) = engine.step([SequenceChunk(window[:CONTEXT], 0, PLACES["plain"], row)]).chunks[0].choices
        assert isinstance(choice, Chosen)
        for form in FORMS[1:]:
            through_the_wire(engine, form)
        given = answers(engine, choice.token_id)
        for form, tally in tallies.items():
            tally.logprob += scored(engine, window, PLACES[form])
            tally.num_scored += SCORED - 1
            tally.num_equal += sum(a == b for a, b in zip(given[form], given["plain"], strict=True))
            tally.num_answered += ANSWER
            tally.num_same_answers += given[form] == given["plain"]
    exact = _perplexity(tallies["plain"])
    return {
        "model": f"{DEFAULT_MODEL}, float32",
        "windows": num_windows,
        "context": CONTEXT,
        "scored_tokens": tallies["plain"].num_scored,
        "forms": {form: _row(engine, form, tally, exact, num_windows) for form, tally in tallies.items()},
    }


def _perplexity(tally: Tally) -> float:
    return math.exp(-tally.logprob / tally.num_scored)


def _row(engine: Engine, form: str, tally: Tally, exact: float, num_windows: int) -> dict[str, object]:
    wire = engine.layout if form == "plain" else engine.layout.on_wire(form)
    return {
        "bytes_per_token": wire.token_bytes,
        "smaller_than_float32": round(engine.layout.token_bytes / wire.token_bytes, 2),
        "smaller_than_bfloat16": round(engine.layout.token_bytes / 2 / wire.token_bytes, 2),
        "perplexity": round(_perplexity(tally), 4),
        "perplexity_change_percent": round(100 * (_perplexity(tally) / exact - 1), 3),
        "equal_tokens_percent": round(100 * tally.num_equal / tally.num_answered, 1),
        "equal_answers_percent": round(100 * tally.num_same_answers / num_windows, 1),
    }


if __name__ == "__main__":
    record = {"machine": describe_machine(), **measure(int(sys.argv[1]) if len(sys.argv) > 1 else 60)}
    print(json.dumps(record, indent=2))  # noqa: T201 - the record
