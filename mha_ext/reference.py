"""What every attention call means, in plain PyTorch.

    score[i, j] = softcap(scale * q_i . k_j) + bias[i, j] - slope_h * |p_i - j|        p_i = i + q_offset
    weight      = softmax over the keys j that query i sees (a sink joins the denominator)
    output      = dropout(weight) @ value

This is the fallback where there is no kernel and the oracle of the tests: it runs on every device and is
differentiable to any order. It checks nothing; `mha_ext.attention` does, and then calls it with the same
names.

Where keys are hidden, a hidden NaN or infinity changes nothing, forward or backward. A query that *sees* a
key or value with a non-finite number in it gets NaN.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "AttentionResult",
    "SoftmaxResult",
    "attention",
    "attention_output",
    "attention_scores",
    "attention_varlen",
    "draw_rng_state",
    "dropout_keep",
    "masked_softmax",
    "qkv_split",
]


class AttentionResult(NamedTuple):
    """What `attention` returns when more than the output was asked for; what was not asked for is None."""

    output: Tensor  # (B, Hq, Lq, Dv)
    lse: Tensor | None = None  # (B, Hq, Lq) natural logarithm of the softmax denominator, sinks included
    weights: Tensor | None = None  # (B, Hq, Lq, Lk) before dropout
    max_score: Tensor | None = None  # (B, Hq, Lq) largest score that the query sees
    entropy: Tensor | None = None  # (B, Hq, Lq) -sum_j weight log weight, in nats


class SoftmaxResult(NamedTuple):
    """What a masked softmax yields for scores (B, H, Lq, Lk)."""

    weights: Tensor  # (B, H, Lq, Lk)
    dropped: Tensor  # (B, H, Lq, Lk) after dropout
    lse: Tensor  # (B, H, Lq)
    max_score: Tensor  # (B, H, Lq)
    entropy: Tensor | None  # (B, H, Lq), where asked for


def default_scale(head_dim: int) -> float:
    """1 / sqrt(D)."""
    return 1 / math.sqrt(head_dim) if head_dim else 1.0


def accumulate_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """fp64 accumulates in fp64, everything else in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Tensor = 0,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rng_state: Tensor | None = None,
    return_entropy: bool = True,
    accumulate_dtype: torch.dtype | None = None,
) -> AttentionResult:
    """query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv) -> everything `attention` can return.

    Computes in `accumulate_dtype` (by default fp32, fp64 for fp64) and rounds output and weights to query's
    dtype once.
    """
    compute = accumulate_dtype or accumulate_dtype_of(query.dtype)
    q, k, v = query.to(compute), key.to(compute), value.to(compute)
    group = query.shape[1] // max(key.shape[1], 1)
    rule: dict[str, Any] = {"window": window, "q_offset": q_offset, "key_lengths": key_lengths}
    visible = visibility(query.shape[2], key.shape[2], query.device, attn_mask, is_causal=is_causal, **rule)
    if visible is not None:  # 0 * NaN is NaN: what may be hidden must be finite, and is judged where it is seen
        bad_key, bad_value = (~x.isfinite().all(-1) for x in (k, v))
        k, v = k.masked_fill(bad_key[..., None], 0), v.masked_fill(bad_value[..., None], 0)

    scores = attention_scores(q, k, scale)
    if visible is not None:
        scores = scores.masked_fill(bad_key.repeat_interleave(group, 1)[:, :, None, :], math.nan)
    softmax = masked_softmax(
        scores, attn_mask, dropout_p, is_causal, **rule, alibi_slopes=alibi_slopes, softcap=softcap,
        sinks=sinks, rng_state=rng_state, return_entropy=return_entropy,
    )  # fmt: skip
    output = attention_output(softmax.dropped, v)
    if visible is not None:
        sees_bad = (visible & bad_value.repeat_interleave(group, 1)[:, :, None, :]).any(-1, keepdim=True)
        output = output.masked_fill(sees_bad, math.nan)
    return AttentionResult(
        output.to(query.dtype),
        softmax.lse,
        softmax.weights.to(query.dtype),
        softmax.max_score,
        softmax.entropy,
    )


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
    scale: float | None = None,
    **rule: Any,
) -> AttentionResult:
    """query (total_q, Hq, D), key (total_k, Hkv, D), value (total_k, Hkv, Dv) -> output (total_q, Hq, Dv).

    Sequence b owns the rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1. Computed as a batch of padded sequences;
    `rule` is the rest of `attention`'s arguments, and what is said of a row is (total_q, Hq).
    """
    starts_q, lengths_q = cu_seqlens_q[:-1], cu_seqlens_q.diff()
    starts_k, lengths_k = cu_seqlens_k[:-1], cu_seqlens_k.diff()

    def padded(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        """(total, H, D) -> (B, H, longest, D); rows beyond a sequence are zeros."""
        i = torch.arange(int(lengths.max()) if lengths.numel() else 0, device=x.device)
        rows = torch.where(i < lengths[:, None], starts[:, None] + i, x.shape[0])
        return torch.cat((x, x.new_zeros(1, *x.shape[1:])))[rows].transpose(1, 2)

    q = padded(query, starts_q, lengths_q)
    k, v = (padded(x, starts_k, lengths_k) for x in (key, value))
    result = attention(q, k, v, dropout_p=dropout_p, scale=scale, key_lengths=lengths_k.to(torch.int64), **rule)
    sequence = torch.repeat_interleave(torch.arange(lengths_q.numel(), device=query.device), lengths_q)
    row = torch.arange(query.shape[0], device=query.device) - starts_q[sequence]

    def packed(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.transpose(1, 2)[sequence, row]

    output = packed(result.output)
    assert output is not None
    return AttentionResult(output, packed(result.lse), None, packed(result.max_score), packed(result.entropy))


def qkv_split(packed: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """packed (B, L, (Hq + 2 Hkv) D) + bias -> query (B, Hq, L, D), key and value (B, Hkv, L, D)."""
    packed = packed if bias is None else packed + bias
    heads = packed.unflatten(-1, (num_heads + 2 * num_kv_heads, -1)).transpose(1, 2)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return query.contiguous(), key.contiguous(), value.contiguous()


def attention_scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """scale * query @ key^T (B, Hq, Lq, Lk). Query heads of one key head are rows of one product: no copies."""
    batch, num_heads, seqlen_q, head_dim = query.shape
    num_heads_kv, seqlen_kv = key.shape[1:3]
    scale = default_scale(head_dim) if scale is None else scale
    rows = num_heads // max(num_heads_kv, 1) * seqlen_q
    scores = (query * scale).reshape(batch, num_heads_kv, rows, head_dim) @ key.mT
    return scores.reshape(batch, num_heads, seqlen_q, seqlen_kv)


def attention_output(weights: Tensor, value: Tensor) -> Tensor:
    """weights (B, Hq, Lq, Lk) @ value (B, Hkv, Lk, Dv): (B, Hq, Lq, Dv)."""
    batch, num_heads, seqlen_q, seqlen_kv = weights.shape
    num_heads_kv, head_dim = value.shape[1], value.shape[3]
    rows = num_heads // max(num_heads_kv, 1) * seqlen_q
    return (weights.reshape(batch, num_heads_kv, rows, seqlen_kv) @ value).reshape(batch, num_heads, seqlen_q, head_dim)


def masked_softmax(
    scores: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Tensor = 0,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rng_state: Tensor | None = None,
    return_entropy: bool = True,
) -> SoftmaxResult:
    """scores (B, H, Lq, Lk), in the dtype to compute in -> weights, dropped weights and row statistics."""
    seqlen_q, seqlen_kv = scores.shape[-2:]
    visible = visibility(
        seqlen_q, seqlen_kv, scores.device, attn_mask, is_causal=is_causal, window=window, q_offset=q_offset,
        key_lengths=key_lengths,
    )  # fmt: skip
    if softcap is not None:
        if visible is not None:  # tanh's derivative at a hidden NaN is NaN
            scores = scores.masked_fill(~visible, 0)
        scores = softcap * torch.tanh(scores / softcap)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.masked_fill(attn_mask == -math.inf, 0).to(scores.dtype)
    if alibi_slopes is not None:
        distance = relative_position(seqlen_q, seqlen_kv, scores.device, q_offset).abs()
        scores = scores - alibi_slopes.to(scores.dtype)[..., None, None] * distance
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)

    # The maximum cancels in exact arithmetic, so no gradient flows through it.
    max_score = scores.detach().amax(-1) if seqlen_kv else scores.new_full(scores.shape[:-1], -math.inf)
    shift = max_score if sinks is None else torch.maximum(max_score, sinks.detach().to(scores.dtype)[:, None])
    shift = shift.masked_fill(shift == -math.inf, 0)
    exponentials = torch.exp(scores - shift[..., None])
    total = exponentials.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.to(scores.dtype)[:, None] - shift)
    empty = total == 0  # sees no key
    total = total.masked_fill(empty, 1)
    weights = exponentials / total[..., None]
    if visible is not None:
        weights = weights.masked_fill(~visible, 0)  # in a NaN row too
    lse = (shift + torch.log(total)).masked_fill(empty, -math.inf)
    entropy = torch.special.entr(weights.detach()).sum(-1) if return_entropy else None

    dropped = weights
    if dropout_p > 0:
        rng_state = draw_rng_state(scores.device) if rng_state is None else rng_state
        keep = dropout_keep(scores.shape, dropout_p, rng_state)
        dropped = (weights * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)).masked_fill(~keep, 0)
    return SoftmaxResult(weights, dropped, lse, max_score, entropy)


def visible_softmax(
    scores: Tensor,
    attn_mask: Tensor | None = None,
    *,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """The weights of `masked_softmax` alone, where only masks take part: by torch's softmax, in fewer steps."""
    seqlen_q, seqlen_kv = scores.shape[-2:]
    visible = visibility(
        seqlen_q, seqlen_kv, scores.device, attn_mask, is_causal=False, window=window, q_offset=0,
        key_lengths=key_lengths,
    )  # fmt: skip
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.masked_fill(attn_mask == -math.inf, 0).to(scores.dtype)
    if visible is None:
        return torch.softmax(scores, -1)
    hidden = ~visible
    # A row that sees no key is NaN in between; nothing of it is seen, and so no gradient either.
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1).masked_fill(hidden, 0)


def relative_position(seqlen_q: int, seqlen_kv: int, device: torch.device, q_offset: int | Tensor) -> Tensor:
    """j - p_i: (Lq, Lk), or (B, 1, Lq, Lk) where q_offset differs by batch."""
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.to(device)[:, None, None, None]
    position_q = torch.arange(seqlen_q, device=device)[:, None] + q_offset
    return torch.arange(seqlen_kv, device=device) - position_q


def visibility(
    seqlen_q: int,
    seqlen_kv: int,
    device: torch.device,
    attn_mask: Tensor | None,
    *,
    is_causal: bool,
    window: tuple[int | None, int | None] | None,
    q_offset: int | Tensor,
    key_lengths: Tensor | None,
) -> Tensor | None:
    """Which key j each query i sees, broadcastable to (B, Hq, Lq, Lk); None: all."""
    rules = []
    left, right = window or (None, None)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if left is not None or right is not None:
        distance = relative_position(seqlen_q, seqlen_kv, device, q_offset)
        if left is not None:
            rules.append(distance >= -left)
        if right is not None:
            rules.append(distance <= right)
    if key_lengths is not None:
        rules.append(torch.arange(seqlen_kv, device=device) < key_lengths.to(device)[:, None, None, None])
    if attn_mask is not None:
        rules.append(attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf)
    if not rules:
        return None
    visible = rules[0]
    for rule in rules[1:]:
        visible = visible & rule
    return visible


def draw_rng_state(device: torch.device) -> Tensor:
    """(2,) int64: a philox seed and offset from torch's generator of this device; no host synchronisation."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def dropout_keep(shape: tuple[int, ...] | torch.Size, dropout_p: float, rng_state: Tensor) -> Tensor:
    """(B, H, Lq, Lk) bool: which weights dropout keeps, the same bits as in csrc/attention/dropout.h.

    One philox4x32-7 call serves the four weights (i, j), (i, j + 8), (i + 8, j), (i + 8, j + 8)
    (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
    """
    batch, heads, seqlen_q, seqlen_kv = shape
    low = 0xFFFFFFFF
    seed, offset = rng_state.unbind()
    i = torch.arange(seqlen_q, device=rng_state.device)[:, None]
    j = torch.arange(seqlen_kv, device=rng_state.device)
    head = torch.arange(batch * heads, device=rng_state.device).reshape(batch, heads, 1, 1)
    c0, c1, c2, c3 = (j >> 4) * 8 + (j & 7), (i >> 4) * 8 + (i & 7), head, offset & low
    key0, key1 = seed & low, (seed >> 32) & low
    for _ in range(7):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wrap modulo 2^64
        c0, c1 = ((product1 >> 32) & low) ^ c1 ^ key0, product1 & low
        c2, c3 = ((product0 >> 32) & low) ^ c3 ^ key1, product0 & low
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    odd_row, odd_col = ((i >> 3) & 1).bool(), ((j >> 3) & 1).bool()
    word = torch.where(odd_row, torch.where(odd_col, c3, c2), torch.where(odd_col, c1, c0))
    threshold = int(dropout_p * 2**32)
    return (word >= threshold).expand(shape)
