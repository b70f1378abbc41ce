"""Whether an answer is right: relative errors against fp64 formulas that belong to no contender.

What is too large to compute twice is judged on slices: the first and the last (batch, key head) in full, and a few
query rows of every head of every batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Case

__all__ = ["Masking", "all_finite", "attention_error", "relative_error"]

ROWS_CHECKED = 5  # query rows of every head
CHUNK = 1024  # query rows per fp64 product


def all_finite(tensors: tuple[Tensor, ...]) -> bool:
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


@dataclass(frozen=True)
class Masking:
    """The mask of a case, with the random numbers it may hold."""

    case: Case
    bias: Tensor | None = None  # (1, H, L, L), of the mask `bias`
    keep: Tensor | None = None  # (L, L), of the mask `bool`

    def hidden(self, rows: Tensor) -> Tensor | None:
        """(R, Lk) or (Lk,), True where a query does not see a key; None where these rows see all."""
        case = self.case
        keys = torch.arange(case.length, device=rows.device)
        if case.mask == "causal":
            return keys > rows[:, None]
        if case.mask == "window":
            return (keys > rows[:, None]) | (keys <= rows[:, None] - case.edge)
        if case.mask in ("padding", "lengths"):
            return keys >= case.edge
        return None if self.keep is None else ~self.keep[rows]


def attention_error(
    masking: Masking, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> float:
    """Largest error over outputs and gradients: a few rows of every head, the first and last key head in full."""
    if not all_finite(outputs):
        return math.inf
    case = masking.case
    kv_heads, group = case.preset.num_kv_heads, case.preset.num_heads // case.preset.num_kv_heads
    grouped = (case.batch, kv_heads, group, case.queries, case.preset.head_dim)
    query, key, value = (tensor.detach() for tensor in tensors)
    query, key, value = query.view(grouped), key.unsqueeze(2), value.unsqueeze(2)
    grad = grads[0].view(grouped) if case.training else None
    if outputs[0].shape != tensors[0].shape:
        return math.inf
    out = outputs[0].reshape(grouped)
    bias = None if masking.bias is None else masking.bias.view(kv_heads, group, case.queries, case.length)

    rows = torch.linspace(0, case.queries - 1, min(ROWS_CHECKED, case.queries), device=query.device).long()
    at_rows = None if grad is None else grad[..., rows, :]
    bias_rows = None if bias is None else bias[..., rows, :]
    exact = exact_rows(query[..., rows, :], key, value, at_rows, masking.hidden(rows), bias_rows)
    errors = [relative_error(out[..., rows, :], exact[0])]
    if case.training:
        grad_query = outputs[1].view(grouped)
        errors.append(relative_error(grad_query[..., rows, :], exact[1]))

    for batch, head in {(0, 0), (case.batch - 1, kv_heads - 1)}:
        chunks = []
        for start in range(0, case.queries, CHUNK):
            rows = torch.arange(start, min(start + CHUNK, case.queries), device=query.device)
            at_rows = None if grad is None else grad[batch, head][..., rows, :]
            bias_rows = None if bias is None else bias[head][..., rows, :]
            of_head = (query[batch, head][..., rows, :], key[batch, head], value[batch, head])
            chunks.append(exact_rows(*of_head, at_rows, masking.hidden(rows), bias_rows))
        errors.append(relative_error(out[batch, head], torch.cat([chunk[0] for chunk in chunks], -2)))
        if case.training:
            exact_grad_query = torch.cat([chunk[1] for chunk in chunks], -2)
            errors.append(relative_error(grad_query[batch, head], exact_grad_query))
            for index in (2, 3):  # of key and value: each chunk of queries adds its share
                total = torch.stack([chunk[index] for chunk in chunks]).sum(0)
                errors.append(relative_error(outputs[index][batch, head], total.sum(0)))
    return max(errors)


def exact_rows(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor | None, hidden: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Attention of the given query rows in fp64; with `grad` also the gradients of query, key and value.

    query, grad (..., G, R, D), key, value (..., 1, L, D), hidden (R, L) or (L,), bias (..., G, R, L)
    -> out (..., G, R, D) [, grad_query (..., G, R, D), grad_key and grad_value (..., G, L, D) as far as these rows go]
    """
    query, key, value = query.double(), key.double(), value.double()
    scale = 1 / math.sqrt(query.shape[-1])
    scores = scale * query @ key.mT
    if bias is not None:
        scores += bias
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    weights = scores.softmax(-1)
    out = weights @ value
    if grad is None:
        return (out,)
    grad = grad.double()
    grad_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
    return out, scale * grad_scores @ key, scale * grad_scores.mT @ query, weights.mT @ grad
