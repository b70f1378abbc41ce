"""Autocast: inputs are cast to its dtype, as torch's own attention does, and within a call nothing else is cast."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocasts(x: Tensor) -> bool:
    """Whether autocast chooses the dtypes where x lives."""
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where it is on; fp64 stays."""
    if not autocasts(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products where x lives keep their dtypes."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()
