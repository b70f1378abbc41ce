"""Who runs a case, on which inputs, and whether the answer is right.

A `Workload` draws fresh inputs for its case, lists the contenders, and judges an answer against fp64 formulas written
here (not against any contender). What is too large to compute twice is judged on slices: the first and the last
(batch, key head) in full, and a few query rows of every head of every batch.
"""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mha_ext
from benchmarks.cases import Case

__all__ = ["SDPA_BACKENDS", "Contender", "Inputs", "Workload", "workload_of"]

# Every implementation behind scaled_dot_product_attention, by the name used in the tables.
SDPA_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
HOLD_SCORES = ("unfused", "reference")  # our backends that keep (B, H, L, L) matrices in memory
ROWS_CHECKED = 5  # query rows of every head
CHUNK = 1024  # query rows per fp64 product

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
    """One way to compute a case."""

    name: str
    ours: bool
    forward: Callable[..., Any]  # inputs -> a tensor or a tuple of them
    pinned: Callable[[], AbstractContextManager[object]] = nullcontext  # entered once around many calls
    holds_scores: bool = False
    unavailable: str | None = None  # why it cannot run here at all


def our_backends(device: torch.device) -> dict[str, str | None]:
    """Backends of mha_ext by name; None, or why it is not available.

    On a GPU with kernels the reference is left out: it is there to be read, and would take most of the time.
    """
    named = dict(mha_ext.backends.available())
    if device.type == "cuda" and any(reason is None for name, reason in named.items() if name != "reference"):
        named.pop("reference", None)
    return named


def our_name(backend: str) -> str:
    """`ours-unfused`."""
    return f"ours-{backend}"


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
        heads = self.case.batch * self.case.preset.num_heads
        item = max(4, self.case.dtype.itemsize)  # scores are often fp32 under half inputs
        return (6 if self.case.training else 3) * heads * self.case.length**2 * item


class Attention(Workload):
    """softmax(q k^T / sqrt(D)) v."""

    def inputs(self) -> Inputs:
        case, preset = self.case, self.case.preset
        query = (case.batch, preset.num_heads, case.length, preset.head_dim)
        key = (case.batch, preset.num_kv_heads, case.length, preset.head_dim)
        return self.with_grads((self.draw(*query), self.draw(*key), self.draw(*key)), query)

    def contenders(self) -> list[Contender]:
        causal, gqa = self.case.is_causal, self.case.preset.num_heads != self.case.preset.num_kv_heads

        def ours(backend: str) -> Callable[..., Any]:
            return lambda q, k, v: mha_ext.attention(q, k, v, is_causal=causal, enable_gqa=gqa, backend=backend)

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

        return [
            Contender(our_name(name), True, ours(name), holds_scores=name in HOLD_SCORES, unavailable=reason)
            for name, reason in our_backends(self.device).items()
        ] + [
            Contender(f"sdpa-{name}", False, sdpa, partial(sdpa_kernel, [backend]), name == "math", self.refusal(name))
            for name, backend in SDPA_BACKENDS.items()
        ]

    def refusal(self, sdpa_backend: str) -> str | None:
        """What torch's own message about a pinned backend would not say."""
        if self.device.type == "cpu" and sdpa_backend in ("efficient", "cudnn"):
            return "scaled_dot_product_attention has it for CUDA tensors only"
        return None

    def error(self, inputs: Inputs, outputs: Outputs) -> float:
        return attention_error(self.case, inputs, outputs)


class Module(Workload):
    """Self-attention with its four projections, without dropout: output and gradient of the input are judged."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        super().__init__(case, device, seed)
        preset = case.preset
        self.torch_module = nn.MultiheadAttention(
            preset.embed_dim, preset.num_heads, batch_first=True, device=device, dtype=case.dtype
        )
        self.our_module = mha_ext.MultiHeadAttention.from_torch(self.torch_module)
        for module in (self.torch_module, self.our_module):
            module.train(case.training)
        self.mask = None
        if case.is_causal:
            self.mask = nn.Transformer.generate_square_subsequent_mask(case.length, device, case.dtype)

    def inputs(self) -> Inputs:
        shape = (self.case.batch, self.case.length, self.case.preset.embed_dim)
        return self.with_grads((self.draw(*shape),), shape)

    def run(self, contender: Contender, inputs: Inputs) -> Outputs:
        """The output, then (training) the gradients of the input and of every parameter."""
        output = contender.forward(*inputs.tensors)
        assert isinstance(output, Tensor)
        if not self.case.training:
            return (output,)
        module = self.our_module if contender.ours else self.torch_module
        return (output, *torch.autograd.grad(output, (*inputs.tensors, *module.parameters()), inputs.grads))

    def contenders(self) -> list[Contender]:
        def ours(x: Tensor) -> Any:
            return self.our_module(x, is_causal=self.case.is_causal)

        def torch_forward(x: Tensor) -> Tensor:
            options = {"need_weights": False, "attn_mask": self.mask, "is_causal": self.case.is_causal}
            return self.torch_module(x, x, x, **options)[0]

        return [
            *our_pinned(self.device, ours),
            Contender("nn.MultiheadAttention", False, torch_forward),
        ]

    def error(self, inputs: Inputs, outputs: Outputs) -> float:
        exact = copy.deepcopy(self.torch_module).double()
        mask = None if self.mask is None else self.mask.double()
        errors = [0.0 if all_finite(outputs) else math.inf]
        for index in {0, self.case.batch - 1}:
            x = inputs.tensors[0][index : index + 1].detach().double().requires_grad_()
            with torch.enable_grad():
                expected = exact(x, x, x, need_weights=False, attn_mask=mask, is_causal=self.case.is_causal)[0]
            errors.append(relative_error(outputs[0][index : index + 1], expected))
            if self.case.training:
                grad = inputs.grads[0][index : index + 1].double()
                (expected,) = torch.autograd.grad(expected, x, grad)
                errors.append(relative_error(outputs[1][index : index + 1], expected))
        return max(errors)


class Part(Workload):
    """A part of attention, against the shortest way to write it in PyTorch; `exact` is the same in fp64."""

    def exact(self, *tensors: Tensor) -> Outputs:
        """The meaning in plain PyTorch, on any slice of the inputs along the batch or the key heads."""
        raise NotImplementedError

    def slices(self, inputs: Inputs, outputs: Outputs) -> list[tuple[Inputs, Outputs]]:
        """Pairs of inputs and the outputs that belong to them alone: here the first and the last (batch, key head)."""
        preset, pairs = self.case.preset, []
        group = preset.num_heads // preset.num_kv_heads

        def cut(tensor: Tensor, batch: int, head: int) -> Tensor:
            width = group if tensor.shape[1] == preset.num_heads else 1
            return tensor[batch : batch + 1, head * width : (head + 1) * width]

        for batch, head in {(0, 0), (self.case.batch - 1, preset.num_kv_heads - 1)}:
            tensors, grads, results = (
                tuple(cut(tensor, batch, head) for tensor in whole) for whole in (inputs.tensors, inputs.grads, outputs)
            )
            pairs.append((Inputs(tensors, grads), results))
        return pairs

    def error(self, inputs: Inputs, outputs: Outputs) -> float:
        errors = [0.0 if all_finite(outputs) else math.inf]
        for given, got in self.slices(inputs, outputs):
            leaves = tuple(tensor.detach().double().requires_grad_() for tensor in given.tensors)
            with torch.enable_grad():
                expected = self.exact(*leaves)
            if self.case.training:
                expected += torch.autograd.grad(expected, leaves, tuple(grad.double() for grad in given.grads))
            errors += [relative_error(*pair) for pair in zip(got, expected, strict=True)]
        return max(errors)


class QkvSplit(Part):
    """Packed projection (B, L, (Hq + 2 Hkv) D) + bias -> query, key, value with the heads outside."""

    def inputs(self) -> Inputs:
        case, preset = self.case, self.case.preset
        width = (preset.num_heads + 2 * preset.num_kv_heads) * preset.head_dim
        query = (case.batch, preset.num_heads, case.length, preset.head_dim)
        key = (case.batch, preset.num_kv_heads, case.length, preset.head_dim)
        return self.with_grads((self.draw(case.batch, case.length, width), self.draw(width)), query, key, key)

    def exact(self, *tensors: Tensor) -> Outputs:
        packed, bias = tensors
        preset = self.case.preset
        heads = (packed + bias).unflatten(-1, (-1, preset.head_dim)).permute(0, 2, 1, 3)
        sizes = (preset.num_heads, preset.num_kv_heads, preset.num_kv_heads)
        return tuple(part.contiguous() for part in heads.split(sizes, dim=1))

    def slices(self, inputs: Inputs, outputs: Outputs) -> list[tuple[Inputs, Outputs]]:
        return [(inputs, outputs)]  # the bias gradient sums over everything

    def contenders(self) -> list[Contender]:
        preset = self.case.preset

        def ours(packed: Tensor, bias: Tensor) -> Outputs:
            return mha_ext.qkv_split(packed, bias, preset.num_heads, preset.num_kv_heads)

        return [*our_pinned(self.device, ours), Contender("torch", False, self.exact)]


class AttentionScores(Part):
    """q k^T / sqrt(D) as a matrix."""

    inputs_hold_scores = True

    def inputs(self) -> Inputs:
        case, preset = self.case, self.case.preset
        query = self.draw(case.batch, preset.num_heads, case.length, preset.head_dim)
        key = self.draw(case.batch, preset.num_kv_heads, case.length, preset.head_dim)
        return self.with_grads((query, key), (case.batch, preset.num_heads, case.length, case.length))

    def exact(self, *tensors: Tensor) -> Outputs:
        query, key = tensors
        rows, columns = grouped_rows(query, key), key.flatten(0, 1).mT
        alpha = 1 / math.sqrt(query.shape[-1])
        unused = rows.new_empty(())  # beta = 0: the product alone, scaled on its way out, in one kernel
        scores = torch.baddbmm(unused, rows, columns, beta=0, alpha=alpha)
        return (scores.view(*query.shape[:-1], key.shape[2]),)

    def contenders(self) -> list[Contender]:
        return [*our_pinned(self.device, mha_ext.attention_scores), Contender("torch", False, self.exact)]


class MaskedSoftmax(Part):
    """Softmax over the last dimension of (B, H, L, L) scores, under the case's mask."""

    inputs_hold_scores = True

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        super().__init__(case, device, seed)
        self.hidden = torch.ones(case.length, case.length, dtype=torch.bool, device=device).triu(1)

    def inputs(self) -> Inputs:
        shape = (self.case.batch, self.case.preset.num_heads, self.case.length, self.case.length)
        return self.with_grads((self.draw(*shape),), shape)

    def exact(self, *tensors: Tensor) -> Outputs:
        (scores,) = tensors
        return (torch.softmax(scores.masked_fill(self.hidden, -math.inf) if self.case.is_causal else scores, -1),)

    def contenders(self) -> list[Contender]:
        def ours(scores: Tensor) -> Any:
            return mha_ext.masked_softmax(scores, is_causal=self.case.is_causal)

        return [*our_pinned(self.device, ours), Contender("torch", False, self.exact)]


class AttentionOutput(Part):
    """weights v."""

    inputs_hold_scores = True

    def inputs(self) -> Inputs:
        case, preset = self.case, self.case.preset
        scores = torch.randn(
            (case.batch, preset.num_heads, case.length, case.length), generator=self.generator, device=self.device
        )
        weights = scores.softmax(-1).to(case.dtype).requires_grad_(case.training)
        value = self.draw(case.batch, preset.num_kv_heads, case.length, preset.head_dim)
        return self.with_grads((weights, value), (case.batch, preset.num_heads, case.length, preset.head_dim))

    def exact(self, *tensors: Tensor) -> Outputs:
        weights, value = tensors
        output = torch.bmm(grouped_rows(weights, value), value.flatten(0, 1))
        return (output.view(*weights.shape[:-1], value.shape[-1]),)

    def contenders(self) -> list[Contender]:
        return [*our_pinned(self.device, mha_ext.attention_output), Contender("torch", False, self.exact)]


WORKLOADS: dict[str, type[Workload]] = {
    "attention": Attention,
    "module": Module,
    "qkv_split": QkvSplit,
    "attention_scores": AttentionScores,
    "masked_softmax": MaskedSoftmax,
    "attention_output": AttentionOutput,
}


def workload_of(case: Case, device: torch.device, seed: int = 0) -> Workload:
    """The workload of a case's kind."""
    return WORKLOADS[case.kind](case, device, seed)


def our_pinned(device: torch.device, forward: Callable[..., Any]) -> list[Contender]:
    """Ours, once per backend, for what takes no `backend` argument."""
    return [
        Contender(
            our_name(name),
            True,
            forward,
            partial(mha_ext.backends.use_backend, name),
            name in HOLD_SCORES,
            reason,
        )
        for name, reason in our_backends(device).items()
    ]


def grouped_rows(query: Tensor, key: Tensor) -> Tensor:
    """(B, Hq, L, X) -> (B Hkv, Hq/Hkv L, X): the query heads of one key head as the rows of one product, no copy."""
    batch, kv_heads = key.shape[:2]
    return query.reshape(batch * kv_heads, -1, query.shape[-1])


def all_finite(tensors: Outputs) -> bool:
    """No NaN, no infinity anywhere."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """||actual - exact|| / ||exact||; inf where shapes differ or something is not finite."""
    if actual.shape != exact.shape:
        return math.inf
    exact = exact.detach().double()
    difference = float((actual.detach().double() - exact).norm())
    error = difference / max(float(exact.norm()), 1e-6 * math.sqrt(exact.numel()), 1e-300)
    return error if math.isfinite(error) else math.inf


def attention_error(case: Case, inputs: Inputs, outputs: Outputs) -> float:
    """`Workload.error` of attention: a few rows of every head, and the first and last key head in full."""
    if not all_finite(outputs):
        return math.inf
    kv_heads, group = case.preset.num_kv_heads, case.preset.num_heads // case.preset.num_kv_heads
    grouped = (case.batch, kv_heads, group, case.length, case.preset.head_dim)
    query, key, value = (tensor.detach() for tensor in inputs.tensors)
    query, key, value = query.view(grouped), key.unsqueeze(2), value.unsqueeze(2)
    grad = inputs.grads[0].view(grouped) if case.training else None
    out = outputs[0].view(grouped)

    rows = torch.linspace(0, case.length - 1, ROWS_CHECKED, device=query.device).long()
    at_rows = None if grad is None else grad[..., rows, :]
    exact = exact_rows(case, query[..., rows, :], key, value, at_rows, rows)
    errors = [relative_error(out[..., rows, :], exact[0])]
    if case.training:
        grad_query = outputs[1].view(grouped)
        errors.append(relative_error(grad_query[..., rows, :], exact[1]))

    for batch, head in {(0, 0), (case.batch - 1, kv_heads - 1)}:
        chunks = []
        for start in range(0, case.length, CHUNK):
            rows = torch.arange(start, min(start + CHUNK, case.length), device=query.device)
            at_rows = None if grad is None else grad[batch, head][..., rows, :]
            chunks.append(
                exact_rows(case, query[batch, head][..., rows, :], key[batch, head], value[batch, head], at_rows, rows)
            )
        errors.append(relative_error(out[batch, head], torch.cat([chunk[0] for chunk in chunks], -2)))
        if case.training:
            exact_grad_query = torch.cat([chunk[1] for chunk in chunks], -2)
            errors.append(relative_error(grad_query[batch, head], exact_grad_query))
            for index in (2, 3):  # of key and value: each chunk of queries adds its share
                total = torch.stack([chunk[index] for chunk in chunks]).sum(0)
                errors.append(relative_error(outputs[index][batch, head], total.sum(0)))
    return max(errors)


def exact_rows(
    case: Case, query: Tensor, key: Tensor, value: Tensor, grad: Tensor | None, rows: Tensor
) -> tuple[Tensor, ...]:
    """Attention of the given query rows in fp64; with `grad` also the gradients of query, key and value.

    query, grad (..., G, R, D), key, value (..., 1, L, D), rows (R,)
    -> out (..., G, R, D) [, grad_query (..., G, R, D), grad_key and grad_value (..., G, L, D) as far as these rows go]
    """
    query, key, value = query.double(), key.double(), value.double()
    scale = 1 / math.sqrt(query.shape[-1])
    scores = scale * query @ key.mT
    if case.is_causal:
        scores.masked_fill_(torch.arange(case.length, device=rows.device) > rows[:, None], -math.inf)
    weights = scores.softmax(-1)
    out = weights @ value
    if grad is None:
        return (out,)
    grad = grad.double()
    grad_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
    return out, scale * grad_scores @ key, scale * grad_scores.mT @ query, weights.mT @ grad
