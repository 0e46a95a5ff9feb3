"""The native libraries that this machine can run, one for each instruction set; none where there was no C compiler."""

import pytest

from pdserve.kernels.native.library import FOLDER, load_library, processor_flags, usable_sets
from pdserve.kernels.native.structures import WeightFormat

LIBRARIES = [
    load_library(FOLDER / f"native_{name}.so", name)
    for name in usable_sets(processor_flags())
    if (FOLDER / f"native_{name}.so").is_file()
]
PAIRS = [
    (library, each)
    for library in LIBRARIES
    for each in WeightFormat
    if each is not WeightFormat.BF16_DOT or library.has_bf16_dot
]

every_library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.instruction_set)
every_product = pytest.mark.parametrize(
    ("library", "weight_format"), PAIRS, ids=[f"{library.instruction_set}-{each.name}" for library, each in PAIRS]
)
