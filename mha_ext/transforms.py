"""Which of torch's transforms are at work: no kernel knows tangents or batched tensors, so they see plain PyTorch."""

import torch
from torch.autograd import forward_ad


def active_transform() -> str | None:
    """What sees through a call made here and now, as a reason to compute it in plain PyTorch; None: nothing."""
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms differentiate plain PyTorch"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives go through plain PyTorch"
    return None


def backward_in_plain_pytorch() -> bool:
    """Whether a backward has to be differentiable itself: again (`create_graph=True`), or by a transform.

    A transform need not have been there in the forward: gradients may be batched, or have tangents, alone.
    """
    return torch.is_grad_enabled() or active_transform() is not None


def is_traced() -> bool:
    """Whether torch.jit.trace is at work: it keeps operators, for a backward too, and no Python around them."""
    return torch._C._get_tracing_state() is not None
