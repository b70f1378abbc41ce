"""Who runs a case and on which inputs.

A `Workload` draws fresh inputs for its case, lists the contenders, and judges their answers. The workloads
themselves are in workloads.py and parts.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_ext
from benchmarks.cases import Case

__all__ = [
    "Contender",
    "Inputs",
    "Outputs",
    "Workload",
    "ours_per_backend",
    "reference_beside_kernels",
    "sdpa_per_backend",
]

# Every implementation behind scaled_dot_product_attention, by the name used in the tables.
SDPA_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
HOLD_SCORES = ("unfused", "reference")  # our backends that keep (B, H, L, L) matrices in memory
# What keeps whole score matrices would take most of the time of a run on a CPU: how many scores are worth it.
REFERENCE_SCORES = 2**23
MATH_SCORES = 2**26

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Inputs:
    """What a contender is called with, and the gradients of its outputs that the backward starts from."""

    tensors: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors + self.grads)


@dataclass(frozen=True)
class Contender:
    """One way to compute a case, or (with `judge`) something else that the case is compared with."""

    name: str
    ours: bool
    forward: Callable[..., Any]  # inputs -> a tensor or a tuple of them
    pinned: Callable[[], AbstractContextManager[object]] = nullcontext  # entered once around many calls
    asked: Callable[[], AbstractContextManager[object]] | None = None  # around one call before, which may refuse
    holds_scores: bool = False
    unavailable: str | None = None  # why it cannot run here at all
    own_threads: bool = False  # not torch's: both need time to go to sleep
    judge: Callable[[Inputs, Outputs], float] | None = None  # in place of the workload's, of another answer


class Workload:
    """Inputs, contenders and judgement for one case."""

    inputs_hold_scores = False  # the inputs or outputs themselves are (B, H, L, L): every contender needs the room

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, *shape: int) -> Tensor:
        """Standard normal numbers in the case's dtype; they want a gradient where the case is a training pass."""
        values = torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return values.to(self.case.dtype).requires_grad_(self.case.training)

    def inputs(self) -> Inputs:
        """Fresh random inputs."""
        raise NotImplementedError

    def contenders(self) -> list[Contender]:
        """Ours first, then PyTorch's; those that cannot run here included."""
        raise NotImplementedError

    def error(self, inputs: Inputs, outputs: Outputs) -> float:
        """Largest relative error ||x - exact|| / ||exact|| over outputs and gradients; inf where not finite."""
        raise NotImplementedError

    def step(self, contender: Contender) -> Callable[[Inputs], object]:
        """What is timed. Without a backward it adds nothing to the call: short ones are measured too."""
        if self.case.training:
            return partial(self.run, contender)
        forward = contender.forward
        return lambda inputs: forward(*inputs.tensors)

    def run(self, contender: Contender, inputs: Inputs) -> Outputs:
        """The outputs, then (training) the gradients of the inputs."""
        outputs = contender.forward(*inputs.tensors)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        if not self.case.training:
            return outputs
        return outputs + torch.autograd.grad(outputs, inputs.tensors, inputs.grads)

    def with_grads(self, tensors: tuple[Tensor, ...], *shapes: tuple[int, ...]) -> Inputs:
        """Inputs, with a random gradient of each output shape where the case is a training pass."""
        grads = tuple(self.draw(*shape).detach() for shape in shapes) if self.case.training else ()
        return Inputs(tensors, grads)

    def matrix_bytes(self) -> int:
        """What a contender that keeps whole score matrices will hold at once, roughly: 3 of them, 6 with a backward."""
        item = max(4, self.case.dtype.itemsize)  # scores are often fp32 under half inputs
        return (6 if self.case.training else 3) * scores_of(self.case) * item


def scores_of(case: Case) -> int:
    """Numbers in the score matrices of all heads."""
    return case.batch * case.preset.num_heads * case.queries * case.length


def our_backends(device: torch.device) -> dict[str, str | None]:
    """Backends of mha_ext for this device by name; None, or why it is not available."""
    left_out = ("cpu",) if device.type == "cuda" else ("fused", "unfused")
    return {name: reason for name, reason in mha_ext.backends.available().items() if name not in left_out}


def has_kernels(device: torch.device) -> bool:
    """Whether something else than plain PyTorch is ours there."""
    return any(reason is None for name, reason in our_backends(device).items() if name != "reference")


def ours_per_backend(device: torch.device, forward: Callable[..., Any]) -> list[Contender]:
    """`forward(*inputs)`, one of ours, once per backend; the reference where there is no other.

    The first that is there is what a call takes that names none. It is timed so, and named in a call before, to see
    whether it refuses; the others are named in every call.
    """
    named = our_backends(device)
    by_itself = next((name for name, reason in named.items() if reason is None), None)
    if mha_ext.backends.requested() is not None:  # by the environment
        by_itself = None
    made = []
    for name, reason in named.items():
        if name != "reference" or not has_kernels(device):
            asked = partial(mha_ext.backends.use_backend, name)
            pinned = nullcontext if name == by_itself else asked
            made.append(Contender(f"ours-{name}", True, forward, pinned, asked, name in HOLD_SCORES, reason))
    return made


def reference_beside_kernels(case: Case, device: torch.device, forward: Callable[..., Any]) -> list[Contender]:
    """Plain PyTorch as one of those that our kernels are compared with.

    It is written to be read: on a GPU it is left out, on a CPU timed up to some size.
    """
    if device.type != "cpu" or not has_kernels(device):
        return []
    reason = f"timed up to {REFERENCE_SCORES} scores" if scores_of(case) > REFERENCE_SCORES else None
    pinned = partial(mha_ext.backends.use_backend, "reference")
    return [Contender("reference", False, forward, pinned, holds_scores=True, unavailable=reason)]


def sdpa_per_backend(case: Case, device: torch.device, sdpa: Callable[..., Tensor]) -> list[Contender]:
    """torch's call, pinned to each of its backends by name."""

    def refusal(backend: str) -> str | None:  # what torch's own message about a pinned backend would not say
        if device.type == "cpu" and backend in ("efficient", "cudnn"):
            return "scaled_dot_product_attention has it for CUDA tensors only"
        if device.type == "cpu" and backend == "math" and scores_of(case) > MATH_SCORES:
            return f"timed up to {MATH_SCORES} scores"
        return None

    return [
        Contender(
            f"sdpa-{name}",
            False,
            sdpa,
            partial(sdpa_kernel, [backend]),
            holds_scores=name == "math",
            unavailable=refusal(name),
        )
        for name, backend in SDPA_BACKENDS.items()
    ]
