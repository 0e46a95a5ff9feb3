"""What choosing a token asks of logits: as torch says, and not finite where they define no distribution."""

import ctypes
import math

import pytest
import torch
from torch import Tensor

from pdserve.kernels.backends import choose_backend
from pdserve.kernels.native import summary
from pdserve.kernels.native.library import NativeLibrary
from pdserve.kernels.native.structures import OperationStruct, StepStruct
from pdserve.kernels.sampling import summarize
from tests.kernels.cpu.libraries import every_library

WIDTHS = [1, 3, 16, 63, 64, 65, 199, 49_152]
INFINITY = float("inf")


def summarized(library: NativeLibrary, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operation of one library."""

    def run(operation: OperationStruct, step: StepStruct) -> None:
        team = library.new_team(2)
        library.c.tape_run(team, ctypes.byref(operation), 0, 1, ctypes.byref(step))
        library.c.team_free(team)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "run_alone", run)
        return summary.summarize(logits)


@every_library
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [0.1, 5.0, 200.0])
def test_it_is_what_torch_says(library: NativeLibrary, width: int, scale: float) -> None:
    logits = torch.randn(7, width, generator=torch.Generator().manual_seed(width)) * scale
    norms, best, ids = summarized(library, logits)
    exact = summarize(logits.double())
    torch.testing.assert_close(norms.double(), exact[0], atol=1e-6, rtol=1e-6)
    assert torch.equal(best.double(), exact[1])
    assert torch.equal(ids, exact[2])


@every_library
@pytest.mark.parametrize("places", [(0, 1), (5, 70), (64, 65), (3, 198)])
def test_of_equal_ones_the_first_is_the_best(library: NativeLibrary, places: tuple[int, int]) -> None:
    logits = torch.zeros(1, 199)
    logits[0, list(places)] = 2.0
    assert summarized(library, logits)[2].tolist() == [places[0]]


@every_library
@pytest.mark.parametrize("wrong", [float("nan"), INFINITY])
@pytest.mark.parametrize("place", [0, 30, 70, 198])
def test_one_broken_logit_shows_in_the_norm(library: NativeLibrary, wrong: float, place: int) -> None:
    logits = torch.zeros(3, 199)
    logits[1, place] = wrong
    norms = summarized(library, logits)[0].tolist()
    assert [math.isfinite(norm) for norm in norms] == [True, False, True]


@every_library
def test_what_is_forbidden_counts_nothing(library: NativeLibrary) -> None:
    logits = torch.full((2, 199), -INFINITY)
    logits[1, 150] = 3.0
    norms, best, ids = summarized(library, logits)
    assert not math.isfinite(norms[0])
    assert (float(norms[1]), float(best[1]), int(ids[1])) == (3.0, 3.0, 150)


@every_library
def test_rows_of_any_layout(library: NativeLibrary) -> None:
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(summarized(library, logits.T)[2], logits.argmax(0))


def test_the_backend_looks_so() -> None:
    chosen = choose_backend("cpu")
    assert chosen.summarize is (summary.summarize if chosen.name == "native" else summarize)
