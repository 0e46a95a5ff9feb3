"""The goldens are what they claim: 24 clear answers of plain transformers for this very model. Three are recomputed per day."""

from datetime import UTC, datetime

import pytest
import torch

from pdserve.engine.quiet import quieten_transformers
from pdserve.engine.weights import weight_digest
from tests.goldens.goldens import LEAST_MARGIN, LOGPROB_TOLERANCE, MAX_NEW_TOKENS, load_goldens
from tests.goldens.model import default_model_dir
from tests.goldens.plain import PlainModel
from tests.goldens.prompts import Prompt

NUM_RECOMPUTED = 3


def test_every_golden_is_clear_and_complete() -> None:
    goldens = load_goldens().goldens
    assert len(goldens) == len({golden.name for golden in goldens}) == 24
    for golden in goldens:
        assert (golden.text is None) != (golden.messages is None)
        assert 1 <= len(golden.tokens) == len(golden.logprobs) == len(golden.margins) <= MAX_NEW_TOKENS
        assert min(golden.margins) >= LEAST_MARGIN


def test_goldens_cover_the_edges() -> None:
    lengths = {len(golden.prompt_ids) for golden in load_goldens().goldens}
    assert {1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 3000} <= lengths
    assert sum(1 for golden in load_goldens().goldens if golden.messages and len(golden.messages) > 2) >= 2


@pytest.mark.smollm2
def test_weights_are_those_of_the_goldens() -> None:
    assert weight_digest(default_model_dir()) == load_goldens().weight_digest


@pytest.mark.smollm2
def test_three_goldens_are_what_transformers_says_today() -> None:
    quieten_transformers()
    torch.set_num_threads(1)
    goldens = load_goldens().goldens
    day = datetime.now(UTC).timetuple().tm_yday
    today = [goldens[(NUM_RECOMPUTED * day + index) % len(goldens)] for index in range(NUM_RECOMPUTED)]
    print("recomputed:", ", ".join(golden.name for golden in today))  # noqa: T201 - shown when it fails, and with -s
    model = PlainModel(default_model_dir())
    for golden in today:
        fresh = model.answer(golden.name, Prompt(golden.text, golden.messages))
        assert (fresh.prompt_ids, fresh.tokens) == (golden.prompt_ids, golden.tokens), golden.name
        assert fresh.logprobs == pytest.approx(golden.logprobs, abs=LOGPROB_TOLERANCE), golden.name
