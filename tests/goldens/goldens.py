"""The golden answers: what plain transformers says to 24 prompts, as `make goldens` wrote it down."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("smollm2-135m-instruct.json")
MODEL = "smollm2-135m-instruct"
MAX_NEW_TOKENS = 64
LEAST_MARGIN = 1e-2
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Golden:
    """One prompt and its greedy answer in fp32.

    Exactly one of `text` and `messages` is given; `margins` are the distances of the two best logits at each step.
    """

    name: str
    text: str | None
    messages: tuple[dict[str, str], ...] | None
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class GoldenFile:
    """All of them, with what they were computed by."""

    model: str
    weight_digest: str
    versions: dict[str, str]
    goldens: tuple[Golden, ...]


@cache
def load_goldens() -> GoldenFile:
    content = json.loads(FILE.read_text())
    goldens = tuple(
        Golden(
            name=entry["name"],
            text=entry["text"],
            messages=None if entry["messages"] is None else tuple(entry["messages"]),
            prompt_ids=tuple(entry["prompt_ids"]),
            tokens=tuple(entry["tokens"]),
            logprobs=tuple(entry["logprobs"]),
            margins=tuple(entry["margins"]),
        )
        for entry in content["goldens"]
    )
    return GoldenFile(content["model"], content["weight_digest"], content["versions"], goldens)


def write_goldens(file: GoldenFile) -> None:
    """Write one line per field, numbers of a list on one line: a changed golden then shows as a readable difference."""
    lines = ["{"]
    lines += [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in asdict(file).items() if name != "goldens"]
    lines.append('"goldens": [')
    for index, golden in enumerate(file.goldens):
        fields = [
            f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in asdict(golden).items()
        ]
        lines.append("{\n" + ",\n".join(fields) + "\n}" + ("," if index + 1 < len(file.goldens) else ""))
    FILE.write_text("\n".join([*lines, "]", "}"]) + "\n")
