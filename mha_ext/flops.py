"""What `torch.utils.flop_counter.FlopCounterMode` counts for the operators: two per multiplication, of products alone.

As for torch's own attention nothing is taken off for what a mask hides, and a backward without the weights in memory
computes the scores again: five products.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from ._extension import extension


def _pairs(query: Tensor, key: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> int:
    """Of a query head's rows and a key, over the batch and the heads."""
    batch, heads, seqlen_q, _ = query.shape
    lengths: Iterator[tuple[int, int]] = iter([(seqlen_q, key.shape[2])])
    if cu_seqlens_q is not None and cu_seqlens_k is not None and not isinstance(cu_seqlens_q, FakeTensor):
        lengths = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)
    return batch * heads * sum(length_q * length_k for length_q, length_k in lengths)


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> int:
    cu_seqlens_q, cu_seqlens_k = rest[6:8]
    return 2 * _pairs(query, key, cu_seqlens_q, cu_seqlens_k) * (query.shape[3] + value.shape[3])


def _backward(
    grad_output: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any
) -> int:
    cu_seqlens_q, cu_seqlens_k = rest[9:11]
    pairs = _pairs(query, key, cu_seqlens_q, cu_seqlens_k)
    return 2 * pairs * (3 * query.shape[3] + 2 * value.shape[3])


def _matmul(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, *_: Any, **__: Any) -> int:
    rows, inner = a.shape[2:] if not transpose_a else a.shape[:1:-1]
    return 2 * a.shape[0] * max(a.shape[1], b.shape[1]) * rows * inner * b.shape[2 if transpose_b else 3]


if extension is not None:
    operators = torch.ops.mha_ext
    register_flop_formula([operators.attention_forward, operators.attention_forward_cpu], get_raw=True)(_forward)
    register_flop_formula([operators.attention_backward, operators.attention_backward_cpu], get_raw=True)(_backward)
    register_flop_formula([operators.matmul], get_raw=True)(_matmul)
