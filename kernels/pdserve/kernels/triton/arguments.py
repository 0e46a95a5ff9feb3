"""What every launcher asks of its tensors before a kernel sees bare pointers."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that models compute in."""


def check(is_right: bool, message: str) -> None:
    """Raise ValueError with `message` unless `is_right`."""
    if not is_right:
        raise ValueError(message)


def check_together(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors lie on one device and are contiguous in their last dimension."""
    devices = {tensor.device for tensor in tensors.values() if tensor is not None}
    check(len(devices) <= 1, f"{', '.join(tensors)} lie on several devices: {sorted(map(str, devices))}")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() > 0 and tensor.shape[-1] > 1:
            check(tensor.stride(-1) == 1, f"{name} has stride {tensor.stride(-1)} in its last dimension, not 1")


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raise ValueError unless the tensor has one of the types."""
    check(tensor.dtype in allowed, f"{name} is {tensor.dtype}, not {' or '.join(map(str, allowed))}")
