"""Masks of attention, True where a key takes part or added to the scores, as the modules combine them."""

import math

import torch
from torch import Tensor

__all__ = ["both_masks", "hidden_by"]


def both_masks(a: Tensor, b: Tensor) -> Tensor:
    """One mask that hides what either hides and adds what both add."""
    if a.dtype == torch.bool and b.dtype == torch.bool:
        return a & b
    if a.dtype == torch.bool:
        return torch.where(a, b, -math.inf)
    if b.dtype == torch.bool:
        return torch.where(b, a, -math.inf)
    hidden = (a == -math.inf) | (b == -math.inf)
    total = a + b
    # Two finite numbers must not add up to -inf, which hides a key.
    return total.clamp(min=torch.finfo(total.dtype).min).masked_fill(hidden, -math.inf)


def hidden_by(mask: Tensor) -> Tensor:
    """True where the mask hides a key."""
    return ~mask if mask.dtype == torch.bool else mask == -math.inf
