"""Which scores a query sees and what is added to them, checked and in one form for every backend."""

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import (
    FAR,
    FLOATING,
    check_alike,
    check_bool,
    check_int,
    check_real,
    check_shape,
    check_tensor,
    describe,
)
from .reference import accumulate_dtype_of

INTEGERS = (torch.int32, torch.int64)


class ScoreRule(NamedTuple):
    """The fields are keyword arguments of `reference.attention` and `reference.masked_softmax`."""

    attn_mask: Tensor | None  # 4-D, broadcastable to (B, H, Lq, Lk), bool or floating
    window: tuple[int | None, int | None]  # a causal call has right = 0
    q_offset: int | Tensor  # int, or int64 (B,)
    key_lengths: Tensor | None  # int64 (B,)
    alibi_slopes: Tensor | None  # (B or 1, H), accumulation dtype
    softcap: float | None
    sinks: Tensor | None  # (H,), accumulation dtype


def make_score_rule(
    shape: tuple[int, int, int, int],
    like: Tensor,
    attn_mask: Any,
    is_causal: Any,
    window: Any,
    q_offset: Any,
    key_lengths: Any,
    alibi_slopes: Any,
    softcap: Any,
    sinks: Any,
) -> ScoreRule:
    """Check the arguments of a call with scores (B, H, Lq, Lk) on `like`'s device, and normalise them."""
    batch, heads, seqlen_q, seqlen_kv = shape
    compute = accumulate_dtype_of(like.dtype)
    if attn_mask is not None:
        attn_mask = _mask(shape, like, attn_mask, compute)
    left, right = _window(window)
    if check_bool("is_causal", is_causal):
        right = 0 if right is None else min(right, 0)
    q_offset = _q_offset(q_offset, batch, seqlen_kv - seqlen_q, like)
    if key_lengths is not None:
        check_tensor("key_lengths", key_lengths, dtypes=INTEGERS)
        check_shape("key_lengths", key_lengths, (batch,), "(B,)")
        check_alike("key_lengths", key_lengths, "query", like, dtype=False)
        key_lengths = key_lengths.to(torch.int64)
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, dims=(1, 2))
        check_alike("alibi_slopes", alibi_slopes, "query", like, dtype=False)
        if alibi_slopes.dim() == 1:
            check_shape("alibi_slopes", alibi_slopes, (heads,), "(Hq,)")
            alibi_slopes = alibi_slopes[None]
        else:
            check_shape("alibi_slopes", alibi_slopes, (batch, heads), "(B, Hq)")
        alibi_slopes = alibi_slopes.to(compute)
    if softcap is not None:
        softcap = check_real("softcap", softcap, above=0)
    if sinks is not None:
        check_tensor("sinks", sinks)
        check_shape("sinks", sinks, (heads,), "(Hq,)")
        check_alike("sinks", sinks, "query", like, dtype=False)
        sinks = sinks.to(compute)
    return ScoreRule(attn_mask, (left, right), q_offset, key_lengths, alibi_slopes, softcap, sinks)


def _mask(shape: tuple[int, int, int, int], like: Tensor, attn_mask: Any, compute: torch.dtype) -> Tensor:
    check_tensor("attn_mask", attn_mask, dtypes=(torch.bool, *FLOATING))
    check_alike("attn_mask", attn_mask, "query", like, dtype=False)
    fits = attn_mask.dim() <= 4 and all(
        size in (1, wanted) for size, wanted in zip(reversed(attn_mask.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to (B, Hq, Lq, Lk) = {shape}, got {tuple(attn_mask.shape)}"
        )
    mask: Tensor = attn_mask[(None,) * (4 - attn_mask.dim())]
    if mask.dtype == torch.float64 and compute == torch.float32:  # finite must not round to -inf, which hides
        low = torch.finfo(torch.float32).min
        with_gradient = low + (mask - mask.detach())
        mask = torch.where((mask < low) & (mask != -math.inf), with_gradient, mask).to(compute)
    return mask


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: expected a pair (left, right) of ints or None, got {describe(window)}")
    if any(isinstance(side, int) and side < 0 for side in window):
        raise ValueError(f"window: expected ints >= 0, or None for an unlimited side, got {window}")
    left, right = (
        None if side is None else min(check_int("window", side, low=0, high=sys.maxsize), 2 * FAR) for side in window
    )
    return left, right


def _q_offset(q_offset: Any, batch: int, end: int, like: Tensor) -> int | Tensor:
    if isinstance(q_offset, str):
        if q_offset != "end":
            raise ValueError(f'q_offset: expected an int, "end" or an int tensor (B,), got {q_offset!r}')
        return end
    if isinstance(q_offset, Tensor):
        check_tensor("q_offset", q_offset, dtypes=INTEGERS)
        check_shape("q_offset", q_offset, (batch,), "(B,)")
        check_alike("q_offset", q_offset, "query", like, dtype=False)
        return q_offset.to(torch.int64)
    return check_int("q_offset", q_offset)
