"""Runs one native operation outside a tape, with as many threads as torch has."""

import ctypes
import threading
import weakref

import torch

from pdserve.kernels.native.library import NativeLibrary, native_library
from pdserve.kernels.native.structures import OperationStruct, StepStruct


class _Teams(threading.local):
    """Each thread's teams, by size: a team has one caller at a time."""

    def __init__(self) -> None:
        self.by_size: dict[int, int] = {}

    def of(self, library: NativeLibrary, num_threads: int) -> int:
        if num_threads not in self.by_size:
            team = library.new_team(num_threads)
            weakref.finalize(threading.current_thread(), library.c.team_free, team)
            self.by_size[num_threads] = team
        return self.by_size[num_threads]


_teams = _Teams()


def run_alone(operation: OperationStruct, step: StepStruct) -> None:
    """Run an operation for a step. The library must be there."""
    library = native_library()
    assert library is not None
    team = _teams.of(library, torch.get_num_threads())
    library.c.tape_run(team, ctypes.byref(operation), 0, 1, ctypes.byref(step))
