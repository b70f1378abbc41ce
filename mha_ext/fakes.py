"""Shapes, dtypes and strides of what the operators return, for torch.compile and torch.export."""

import torch
from torch import Tensor

from ._extension import extension
from .reference import accumulate_dtype_of


def _empty_aligned_rows(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows are padded to 8 elements in memory, as in csrc/api/parts.cpp."""
    _, heads, rows, length = like.shape
    pitch = (length + 7) // 8 * 8
    return like.new_empty_strided(like.shape, (heads * rows * pitch, rows * pitch, pitch, 1), dtype=dtype)


def _fake_qkv_split(packed: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int) -> tuple[Tensor, ...]:
    batch, seqlen, columns = packed.shape
    head_dim = columns // (num_heads + 2 * num_kv_heads)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return tuple(packed.new_empty((batch, h, seqlen, head_dim)) for h in heads)


def _fake_qkv_merge(grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, bias_grad: bool) -> tuple[Tensor, Tensor]:
    batch, heads, seqlen, head_dim = grad_query.shape
    columns = (heads + 2 * grad_key.shape[1]) * head_dim
    return grad_query.new_empty((batch, seqlen, columns)), grad_query.new_empty((columns if bias_grad else 0,))


def _fake_matmul(
    a: Tensor,
    b: Tensor,
    transpose_a: bool,
    transpose_b: bool,
    alpha: float,
    num_heads_out: int,
    out_dtype: torch.dtype,
    allow_tf32: bool,
    k_lengths: Tensor | None,
) -> Tensor:
    rows, cols = a.shape[3 if transpose_a else 2], b.shape[2 if transpose_b else 3]
    return a.new_empty((a.shape[0], num_heads_out, rows, cols), dtype=out_dtype)


def _fake_masked_softmax(
    scores: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    q_offsets: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    q_offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    out_dtype: torch.dtype,
    return_stats: bool,
) -> tuple[Tensor, ...]:
    rows, compute = scores.shape[:3], accumulate_dtype_of(scores.dtype)
    stats = rows if return_stats else (0,)
    return (
        _empty_aligned_rows(scores, out_dtype),
        _empty_aligned_rows(scores, out_dtype) if dropout_p > 0 else scores.new_empty((0,), dtype=out_dtype),
        scores.new_empty(rows, dtype=compute),
        scores.new_empty(stats, dtype=compute),
        scores.new_empty(stats, dtype=compute),
    )


def _fake_masked_softmax_backward(
    grad_weights: Tensor | None,
    grad_dropped: Tensor | None,
    grad_lse: Tensor | None,
    weights: Tensor,
    scores: Tensor | None,
    lse: Tensor,
    q_offsets: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    q_offset: int,
    softcap: float,
    dropout_p: float,
    grad_dtype: torch.dtype,
    bias_grad: bool,
    sink_grad: bool,
    slope_grad: bool,
) -> tuple[Tensor, ...]:
    empty = (0,)
    return (
        _empty_aligned_rows(weights, grad_dtype),
        _empty_aligned_rows(weights, grad_dtype)
        if bias_grad and softcap
        else weights.new_empty((0,), dtype=grad_dtype),
        lse.new_empty(lse.shape if sink_grad else empty),
        lse.new_empty(lse.shape if slope_grad else empty),
    )


def _empty_like_layout(model: Tensor, cols: int) -> Tensor:
    """As in csrc/api/attention.cpp: rows outside of heads in memory, or heads outside of rows, as model has them."""
    batch, heads, rows, _ = model.shape
    if model.stride(1) < model.stride(2):
        return model.new_empty((batch, rows, heads, cols)).transpose(1, 2)
    return model.new_empty((batch, heads, rows, cols))


def _fake_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    q_offsets: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    scale: float,
    allow_tf32: bool,
    for_backward: bool,
    return_stats: bool,
) -> tuple[Tensor, ...]:
    rows = query.shape[:3]
    shapes = (rows, (*rows, 2) if for_backward else (0,), *(rows if return_stats else (0,) for _ in range(2)))
    return _empty_like_layout(query, value.shape[3]), *(query.new_empty(x, dtype=torch.float32) for x in shapes)


def _fake_attention_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    row_stats: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    q_offsets: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    scale: float,
    allow_tf32: bool,
    packed: bool,
    mask_grad: bool,
    slopes_grad: bool,
    sinks_grad: bool,
) -> tuple[Tensor, ...]:
    batch, heads, seqlen_q, head_dim = query.shape
    gradients: tuple[Tensor, ...]
    if packed:
        columns = (heads + 2 * key.shape[1]) * head_dim
        gradients = (query.new_empty((batch, seqlen_q, columns)), query.new_empty(0), query.new_empty(0))
    else:
        gradients = tuple(_empty_like_layout(x, x.shape[3]) for x in (query, key, value))
    return (
        *gradients,
        torch.empty_like(attn_mask, memory_format=torch.contiguous_format)
        if mask_grad and attn_mask is not None
        else lse.new_empty(0),
        lse.new_empty(alibi_slopes.shape) if slopes_grad and alibi_slopes is not None else lse.new_empty(0),
        lse.new_empty(heads if sinks_grad else 0),
    )


if extension is not None:
    for suffix in ("", "_cpu"):
        torch.library.register_fake(f"mha_ext::attention_forward{suffix}")(_fake_attention_forward)
        torch.library.register_fake(f"mha_ext::attention_backward{suffix}")(_fake_attention_backward)
    torch.library.register_fake("mha_ext::qkv_split")(_fake_qkv_split)
    torch.library.register_fake("mha_ext::qkv_merge")(_fake_qkv_merge)
    torch.library.register_fake("mha_ext::matmul")(_fake_matmul)
    torch.library.register_fake("mha_ext::masked_softmax")(_fake_masked_softmax)
    torch.library.register_fake("mha_ext::masked_softmax_backward")(_fake_masked_softmax_backward)
