"""Arrays that travel together stay what they were, and begin where wide loads may."""

from unittest import mock

import torch

from pdserve.kernels.one_copy import ALIGNMENT, OneCopy

WANTED = [(torch.float64, 3), (torch.int32, 0), (torch.int64, 1), (torch.int32, 5), (torch.int32, 2)]


def test_each_array_arrives_whole_and_aligned() -> None:
    arrays = OneCopy(WANTED, torch.device("cpu"))
    for number, part in enumerate(arrays.here):
        part.fill_(number + 1)
    assert not any(part.any() for part in arrays.there), "nothing travels before it is sent"
    arrays.send()
    for number, (part, (dtype, count)) in enumerate(zip(arrays.there, WANTED, strict=True)):
        assert part.dtype == dtype
        assert part.tolist() == [number + 1] * count
        assert part.storage_offset() * dtype.itemsize % ALIGNMENT == 0


def test_what_is_read_stays_where_it_is() -> None:
    """A captured graph reads the same memory again."""
    arrays = OneCopy([(torch.int32, 2)], torch.device("cpu"))
    (there,) = arrays.there
    for value in (4, 9):
        arrays.here[0].fill_(value)
        arrays.send()
        assert there.tolist() == [value, value]


def test_the_host_does_not_ask_to_wait_for_the_device() -> None:
    """A plain copy waits until the stream is empty: what draws a step's tokens was launched only when its forward had ended."""
    arrays = OneCopy([(torch.int32, 2)], torch.device("cpu"))
    with mock.patch.object(torch.Tensor, "copy_") as copy:
        arrays.send()
    assert copy.call_args.kwargs == {"non_blocking": True}
