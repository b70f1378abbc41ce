"""Jagged nested tensors: a batch of sequences of different lengths that torch keeps packed."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["as_jagged", "jagged", "packed", "refuse"]


def refuse(attn_mask: Any, key_lengths: Any, return_weights: Any) -> None:
    """Refuse what has no meaning, or no form, for sequences of different lengths."""
    if attn_mask is not None:
        raise ValueError("attn_mask: expected None with nested tensors (is_causal, window and q_offset go), got a mask")
    if key_lengths is not None:
        raise ValueError("key_lengths: expected None with nested tensors, which know their lengths, got a tensor")
    if return_weights:
        raise ValueError("return_weights: expected False with nested tensors, got True; pad them to see the weights")


def packed(query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `attention_varlen` for jagged query, key and value."""
    dims = query.dim()
    q, offsets_q = _packed("query", query, dims)
    k, offsets_k = _packed("key", key, dims)
    v, offsets_v = _packed("value", value, dims)
    for name, offsets, like, offsets_like in (
        ("key", offsets_k, "query", offsets_q),
        ("value", offsets_v, "key", offsets_k),
    ):
        if offsets.shape != offsets_like.shape:
            raise ValueError(
                f"{name}: expected as many sequences as {like}, {len(offsets_like) - 1}, got {len(offsets) - 1}"
            )
    if offsets_v is not offsets_k:
        same = (offsets_v == offsets_k).all()
        message = "value: expected sequences of the lengths of key's, got others"
        if same.device.type == "cpu" and not same:
            raise ValueError(message)
        torch._assert_async(same, message)  # a GPU is not waited for
    return q, k, v, offsets_q, offsets_k


def as_jagged(name: str, x: Any, layout: torch.layout) -> Any:
    """A nested tensor of this layout (B, j, E) in layout torch.jagged."""
    if not isinstance(x, Tensor) or not x.is_nested or x.layout != layout:
        raise TypeError(f"{name}: expected a nested tensor of layout {layout} as query, got {_kind(x)}")
    if layout == torch.jagged:
        return x
    sequences = list(x.unbind())
    if not sequences:
        raise ValueError(f"{name}: expected at least one sequence in a nested tensor of layout {layout}, got none")
    return torch.nested.as_nested_tensor(sequences, layout=torch.jagged)


def jagged(x: Tensor, offsets: Tensor, dims: int) -> Tensor:
    """(total, H, ...) -> (B, H, j, ...), or of queries without an axis of heads (dims = 3) (B, j, ...)."""
    if dims == 3:
        return torch.nested.nested_tensor_from_jagged(x[:, 0].contiguous(), offsets)
    return torch.nested.nested_tensor_from_jagged(x.contiguous(), offsets).transpose(1, 2)


def _packed(name: str, x: Any, dims: int) -> tuple[Tensor, Tensor]:
    """The packed values (total, H, D) of a jagged tensor, and its offsets (B + 1,)."""
    like = "" if name == "query" else ", as query"
    if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged:
        raise TypeError(f"{name}: expected a nested tensor of layout torch.jagged{like}, got {_kind(x)}")
    if x.dim() != dims or dims not in (3, 4):
        raise ValueError(f"{name}: expected (B, H, j, D) or (B, j, D), of as many axes as query, got {x.dim()} axes")
    by_row: Any = x if dims == 3 else x.transpose(1, 2)  # (B, j, H, D)
    if by_row._ragged_idx != 1 or by_row.lengths() is not None:
        raise ValueError(f"{name}: expected jagged sequences one behind the other along axis {dims - 2}, got {x.shape}")
    values = by_row.values()
    return values[:, None] if dims == 3 else values, by_row.offsets()


def _kind(x: Any) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"layout {x.layout}" if x.is_nested else "a tensor that is not nested"
