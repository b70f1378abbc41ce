"""The parts of attention, each against the shortest way to write it in PyTorch."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mha_ext
from benchmarks.cases import Case
from benchmarks.contenders import Contender, Inputs, Outputs, Workload, ours_per_backend
from benchmarks.judgement import all_finite, relative_error

__all__ = ["PARTS"]


class Part(Workload):
    """A part of attention, against the shortest way to write it in PyTorch; `exact` is the same in fp64."""

    def exact(self, *tensors: Tensor) -> Outputs:
        """The meaning in plain PyTorch, on any slice of the inputs along the batch or the key heads."""
        raise NotImplementedError

    def ours(self, forward: Callable[..., Any]) -> list[Contender]:
        """Once per backend that has the parts: on a CPU plain PyTorch alone has them."""
        if self.device.type == "cpu":
            pinned = partial(mha_ext.backends.use_backend, "reference")
            return [Contender("ours-reference", True, forward, pinned, holds_scores=True)]
        return ours_per_backend(self.device, forward)

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

        return [*self.ours(ours), Contender("torch", False, self.exact)]


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
        return [*self.ours(mha_ext.attention_scores), Contender("torch", False, self.exact)]


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

        return [*self.ours(ours), Contender("torch", False, self.exact)]


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
        return [*self.ours(mha_ext.attention_output), Contender("torch", False, self.exact)]


PARTS: dict[str, type[Workload]] = {
    "qkv_split": QkvSplit,
    "attention_scores": AttentionScores,
    "masked_softmax": MaskedSoftmax,
    "attention_output": AttentionOutput,
}


def grouped_rows(query: Tensor, key: Tensor) -> Tensor:
    """(B, Hq, L, X) -> (B Hkv, Hq/Hkv L, X): the query heads of one key head as the rows of one product, no copy."""
    batch, kv_heads = key.shape[:2]
    return query.reshape(batch * kv_heads, -1, query.shape[-1])
