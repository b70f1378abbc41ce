"""One attention call: its arguments checked, and in the one form that every backend takes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import nested
from .autocast import autocast_inputs
from .checks import check_alike, check_bool, check_heads, check_real, check_shape, check_tensor
from .reference import default_scale
from .score_rule import ScoreRule, make_score_rule


class Sequences(NamedTuple):
    """Where the sequences of a packed batch begin and end, int32 (B + 1) each."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


class AttentionCall(NamedTuple):
    """Checked arguments of `mha_ext.attention`; tensors are (batch, heads, length, head dim).

    Of `mha_ext.attention_varlen` where there are sequences: then the batch is 1 and the length is that of all of them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rule: ScoreRule
    dropout_p: float
    scale: float
    return_lse: bool
    return_weights: bool
    return_stats: bool
    leading: torch.Size  # query's axes before (length, head dim), to be given back to the results
    sequences: Sequences | None = None
    jagged: tuple[Tensor, int] | None = None  # query's offsets and number of axes, where it came as a nested tensor


def make_call(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
    *,
    window: Any = None,
    q_offset: Any = 0,
    key_lengths: Any = None,
    alibi_slopes: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    return_lse: Any = False,
    return_weights: Any = False,
    return_stats: Any = False,
    deterministic: Any = None,
) -> AttentionCall:
    """Refuse what `mha_ext.attention` does not take, cast under autocast, and bring shapes to four axes."""
    if isinstance(query, Tensor) and query.is_nested:
        nested.refuse(attn_mask, key_lengths, return_weights)
        packed = nested.packed(query, key, value)
        return make_varlen_call(
            *packed, dropout_p, is_causal, scale, window=window, q_offset=q_offset, alibi_slopes=alibi_slopes,
            softcap=softcap, sinks=sinks, return_lse=return_lse, return_stats=return_stats,
            deterministic=deterministic,
        )._replace(jagged=(packed[3], query.dim()))  # fmt: skip
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() < 2:
            raise ValueError(f"{name}: expected at least 2 dimensions (length, head dim), got shape {tuple(x.shape)}")
    check_bool("enable_gqa", enable_gqa)
    check_bool("return_weights", return_weights)
    _check_flags(return_lse, return_stats, deterministic)
    query, key, value = _alike(query, key, value)
    kept = -3 if query.dim() > 3 else -2
    alike = query.dim() == key.dim() == value.dim()
    if not (alike and query.shape[:kept] == key.shape[:kept] == value.shape[:kept]):
        query, key, value = _of_one_batch(query, key, value)

    leading = query.shape[:-2]
    if query.dim() != 4:
        query, key, value, attn_mask = _four_axes(query, key, value, attn_mask)
    batch, heads, seqlen_q, head_dim = query.shape
    check_shape("key", key, (batch, key.shape[1], key.shape[2], head_dim), "(B, Hkv, Lk, D)")
    check_shape("value", value, (batch, key.shape[1], key.shape[2], value.shape[3]), "(B, Hkv, Lk, Dv)")
    check_heads(heads, key.shape[1])
    rule = make_score_rule(
        (batch, heads, seqlen_q, key.shape[2]), query, attn_mask, is_causal, window, q_offset, key_lengths,
        alibi_slopes, softcap, sinks,
    )  # fmt: skip
    return AttentionCall(
        query,
        key,
        value,
        rule,
        check_real("dropout_p", dropout_p, low=0, high=1),
        default_scale(head_dim) if scale is None else check_real("scale", scale),
        return_lse,
        return_weights,
        return_stats,
        leading,
    )


def make_varlen_call(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    *,
    window: Any = None,
    q_offset: Any = 0,
    alibi_slopes: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    return_lse: Any = False,
    return_stats: Any = False,
    deterministic: Any = None,
) -> AttentionCall:
    """Refuse what `mha_ext.attention_varlen` does not take, and see the packed batch as one of (1, heads, total, D)."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, dims=(3,))
    _check_flags(return_lse, return_stats, deterministic)
    query, key, value = _alike(query, key, value)
    _, heads, head_dim = query.shape
    check_shape("key", key, (key.shape[0], key.shape[1], head_dim), "(total_k, Hkv, D)")
    check_shape("value", value, (key.shape[0], key.shape[1], value.shape[2]), "(total_k, Hkv, Dv)")
    check_heads(heads, key.shape[1])

    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, x, dims=(1,), dtypes=(torch.int32, torch.int64))
        check_alike(name, x, "query", query, dtype=False)
        if x.shape[0] == 0:
            raise ValueError(f"{name}: expected B + 1 elements, of which the first is 0, got none")
        if torch._C._functorch.is_batchedtensor(x):
            raise ValueError(
                f"{name}: expected the same sequences for every example of vmap, got a batch of them; pad them, and "
                f"batch the key_lengths of mha_ext.attention"
            )
    check_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "as cu_seqlens_q, (B + 1,)")
    # Their values only where that is free: a GPU would have to be waited for, and its kernels clamp to the tensors.
    if cu_seqlens_q.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_sequences("cu_seqlens_q", cu_seqlens_q, query.shape[0])
        _check_sequences("cu_seqlens_k", cu_seqlens_k, key.shape[0])
    sequences = Sequences(*(x.to(torch.int32).contiguous() for x in (cu_seqlens_q, cu_seqlens_k)))
    if isinstance(q_offset, str) and q_offset == "end":
        q_offset = cu_seqlens_k.diff() - cu_seqlens_q.diff()
    rule = make_score_rule(
        (cu_seqlens_q.shape[0] - 1, heads, query.shape[0], key.shape[0]), query, None, is_causal, window, q_offset,
        None, alibi_slopes, softcap, sinks,
    )  # fmt: skip
    return AttentionCall(
        by_heads(query),
        by_heads(key),
        by_heads(value),
        rule,
        check_real("dropout_p", dropout_p, low=0, high=1),
        default_scale(head_dim) if scale is None else check_real("scale", scale),
        return_lse,
        False,
        return_stats,
        query.shape[:-1],
        sequences,
    )


def _check_flags(return_lse: Any, return_stats: Any, deterministic: Any) -> None:
    check_bool("return_lse", return_lse)
    check_bool("return_stats", return_stats)
    if deterministic is not None:
        check_bool("deterministic", deterministic)


def _alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three, cast under autocast, of one dtype and device."""
    query, key, value = autocast_inputs(query, key, value)
    check_alike("key", key, "query", query)
    check_alike("value", value, "query", query)
    return query, key, value


def by_heads(x: Tensor) -> Tensor:
    """(total, H, ...) -> (1, H, total, ...), a view."""
    return x.transpose(0, 1)[None]


def from_heads(x: Tensor) -> Tensor:
    """(1, H, total, ...) -> (total, H, ...), a view."""
    return x[0].transpose(0, 1)


def _check_sequences(name: str, cu_seqlens: Tensor, total: int) -> None:
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != total or (cu_seqlens.diff() < 0).any():
        raise ValueError(
            f"{name}: expected the running sum of the lengths, from 0 to {total} and never falling, "
            f"got {cu_seqlens.tolist()}"
        )


def _of_one_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three with the same axes before the heads, if any: missing ones and sizes of 1 are expanded, in no memory."""
    dims = max(x.dim() for x in (query, key, value))
    kept = 3 if dims > 3 else 2
    query, key, value = (x[(None,) * (dims - x.dim())] for x in (query, key, value))
    batch = query.shape[:-kept]
    for name, x in (("key", key), ("value", value)):
        try:
            batch = torch.broadcast_shapes(batch, x.shape[:-kept])
        except RuntimeError as error:
            raise ValueError(
                f"{name}: expected a batch that broadcasts with query's {tuple(query.shape)}, got {tuple(x.shape)}"
            ) from error
    query, key, value = (x.expand(*batch, *x.shape[-kept:]) for x in (query, key, value))
    return query, key, value


def _four_axes(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """(L, D) and (B, L, D) have one head; of more than four axes all but the last three are batch."""
    leading = query.shape[:-2]
    if len(leading) == 0:
        return query[None, None], key[None, None], value[None, None], attn_mask
    if len(leading) == 1:
        if isinstance(attn_mask, Tensor) and attn_mask.dim() == 3:
            attn_mask = attn_mask[:, None]
        return query[:, None], key[:, None], value[:, None], attn_mask
    if isinstance(attn_mask, Tensor) and attn_mask.dim() > 3:
        try:
            attn_mask = attn_mask.expand(*leading[:-1], *attn_mask.shape[-3:]).flatten(0, -4)
        except RuntimeError as error:
            raise ValueError(
                f"attn_mask: expected a shape that broadcasts to "
                f"{(*leading, query.shape[-2], key.shape[-2])}, got {tuple(attn_mask.shape)}"
            ) from error
    return query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4), attn_mask
