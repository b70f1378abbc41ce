"""One attention call: its arguments checked, and in the one form that every backend takes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autocast import autocast_inputs
from .checks import check_alike, check_bool, check_heads, check_real, check_shape, check_tensor
from .reference import default_scale
from .score_rule import ScoreRule, make_score_rule


class AttentionCall(NamedTuple):
    """Checked arguments of `mha_ext.attention`; tensors are (batch, heads, length, head dim)."""

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
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() < 2:
            raise ValueError(f"{name}: expected at least 2 dimensions (length, head dim), got shape {tuple(x.shape)}")
    check_bool("enable_gqa", enable_gqa)
    check_bool("return_lse", return_lse)
    check_bool("return_weights", return_weights)
    check_bool("return_stats", return_stats)
    if deterministic is not None:
        check_bool("deterministic", deterministic)

    query, key, value = autocast_inputs(query, key, value)
    for name, x in (("key", key), ("value", value)):
        check_alike(name, x, "query", query)
        if x.dim() != query.dim():
            raise ValueError(f"{name}: expected {query.dim()} dimensions as query, got shape {tuple(x.shape)}")

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


def _four_axes(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """(L, D) and (B, L, D) have one head; of more than four axes all but the last three are batch."""
    leading = query.shape[:-2]
    for name, x in (("key", key), ("value", value)):
        kept = max(len(leading) - 1, 0) if len(leading) > 2 else len(leading)
        check_shape(name, x, (*leading[:kept], *x.shape[kept:]), "query's leading dimensions")
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
