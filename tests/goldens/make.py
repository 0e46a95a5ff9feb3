"""Write the goldens: `python -m tests.goldens.make`. The only writer; computed by plain `transformers`, never by pdserve."""

import sys

from tokenizers import Tokenizer

from pdserve.engine.quiet import quieten_transformers
from pdserve.engine.weights import weight_digest
from tests.goldens.goldens import LEAST_MARGIN, MODEL, Golden, GoldenFile, write_goldens
from tests.goldens.model import default_model_dir
from tests.goldens.plain import PlainModel, versions
from tests.goldens.prompts import plans

NUM_GOLDENS = 24


def main() -> None:
    quieten_transformers()
    folder = default_model_dir()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = PlainModel(folder)
    goldens: list[Golden] = []
    for name, candidates in plans(tokenizer):
        for candidate in candidates:
            golden = model.answer(name, candidate, LEAST_MARGIN)
            least = min(golden.margins)
            _say(f"{name}: {len(golden.prompt_ids)} + {len(golden.tokens)} tokens, least margin {least:.4f}")
            if least >= LEAST_MARGIN:
                goldens.append(_checked(golden))
                break
            _say(f"{name}: replaced, two answers are too close at some step")
        else:
            raise SystemExit(
                f"{name}: no candidate keeps a margin of {LEAST_MARGIN}; add some in tests/goldens/prompts.py"
            )
    if len(goldens) != NUM_GOLDENS:
        raise SystemExit(f"{len(goldens)} goldens instead of {NUM_GOLDENS}")
    write_goldens(GoldenFile(MODEL, weight_digest(folder), versions(), tuple(goldens)))


def _checked(golden: Golden) -> Golden:
    words = golden.name.split()
    if words[0].isdigit() and len(golden.prompt_ids) != int(words[0]):
        raise SystemExit(f"{golden.name}: transformers encodes it to {len(golden.prompt_ids)} tokens")
    if golden.name == "one token" and len(golden.prompt_ids) != 1:
        raise SystemExit(f"{golden.text!r} is {len(golden.prompt_ids)} tokens")
    return golden


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
