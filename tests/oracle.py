"""An independent answer: attention by its definition, row by row, in fp64 NumPy and Python integers.

Nothing of mha_ext is used here. A row is one query of one head: the keys that it sees are listed one by one,
and its softmax and its gradients are written out.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]


class Expected(NamedTuple):
    output: Array
    lse: Array
    weights: Array
    max_score: Array
    entropy: Array


def to_array(x: Any) -> Array:
    """Any tensor as NumPy: bool and int as they are, floating in fp64 (NumPy has no bf16)."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        return (x.double() if x.is_floating_point() else x).numpy()
    return np.asarray(x)


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **rule: Any) -> Expected:
    """query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), and the arguments of `mha_ext`."""
    return _run(query, key, value, attn_mask, None, None, None, **rule)[0]


def gradients(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    grad_output: Any = None,
    grad_lse: Any = None,
    grad_weights: Any = None,
    **rule: Any,
) -> dict[str, Array]:
    """Gradients of query, key, value, attn_mask, alibi_slopes and sinks; broadcast axes are summed."""
    return _run(query, key, value, attn_mask, grad_output, grad_lse, grad_weights, **rule)[1]


def _run(
    query: Any, key: Any, value: Any, attn_mask: Any, grad_output: Any, grad_lse: Any, grad_weights: Any, *,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    window: tuple[int | None, int | None] | None = None, q_offset: Any = 0, key_lengths: Any = None,
    alibi_slopes: Any = None, softcap: float | None = None, sinks: Any = None, rng_state: Any = None,
) -> tuple[Expected, dict[str, Array]]:  # fmt: skip
    q, k, v = to_array(query), to_array(key), to_array(value)
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    shape = (batch, heads, seqlen_q, seqlen_kv)
    group = heads // heads_kv if heads_kv else 1
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    left, right = window or (None, None)
    mask = None if attn_mask is None else np.broadcast_to(to_array(attn_mask), shape)
    slopes = None if alibi_slopes is None else np.broadcast_to(to_array(alibi_slopes), (batch, heads))
    sink = None if sinks is None else to_array(sinks)
    lengths = None if key_lengths is None else to_array(key_lengths)
    if isinstance(q_offset, str):
        q_offset = seqlen_kv - seqlen_q
    offsets = np.broadcast_to(to_array(q_offset), (batch,))
    d_out = None if grad_output is None else to_array(grad_output)
    d_lse = None if grad_lse is None else to_array(grad_lse)
    d_weights = None if grad_weights is None else to_array(grad_weights)

    result = Expected(
        np.zeros((batch, heads, seqlen_q, head_dim_v)),
        np.full(shape[:3], -np.inf),
        np.zeros(shape),
        np.full(shape[:3], -np.inf),
        np.zeros(shape[:3]),
    )
    d_query, d_key, d_value, d_scores = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(shape)
    d_sinks, d_slopes = np.zeros(heads), np.zeros((batch, heads))

    for b, h, i in np.ndindex(batch, heads, seqlen_q):
        position, g = i + int(offsets[b]), h // group
        sees = []
        for j in range(seqlen_kv):
            if is_causal and j > position:
                continue
            if left is not None and j < position - left:
                continue
            if right is not None and j > position + right:
                continue
            if lengths is not None and j >= lengths[b]:
                continue
            if mask is not None and (not mask[b, h, i, j] if mask.dtype == bool else mask[b, h, i, j] == -np.inf):
                continue
            sees.append(j)
        if sink is not None:
            result.lse[b, h, i] = sink[h]
        if not sees:
            if sink is not None and d_lse is not None:  # the sink is all that the row has
                d_sinks[h] += d_lse[b, h, i]
            continue

        distance = np.abs(position - np.array(sees))
        raw = k[b, g, sees] @ q[b, h, i] * scale
        score = raw if softcap is None else softcap * np.tanh(raw / softcap)
        if mask is not None and mask.dtype != bool:
            score = score + mask[b, h, i, sees]
        if slopes is not None:
            score = score - slopes[b, h] * distance
        top = score.max() if sink is None else max(score.max(), sink[h])
        total = np.exp(score - top).sum() + (0 if sink is None else np.exp(sink[h] - top))
        weight = np.exp(score - top) / total
        keep = np.ones(len(sees))
        if dropout_p > 0:
            keep = np.array([kept(b * heads + h, i, j, dropout_p, rng_state) for j in sees], dtype=np.float64)
            keep = keep / (1 - dropout_p) if dropout_p < 1 else keep * 0
        result.lse[b, h, i] = top + math.log(total)
        result.weights[b, h, i, sees] = weight
        result.max_score[b, h, i] = score.max()
        result.entropy[b, h, i] = -sum(w * math.log(w) for w in weight if w > 0)
        result.output[b, h, i] = (weight * keep) @ v[b, g, sees]

        d_weight = np.zeros(len(sees))
        if d_out is not None:
            d_value[b, g, sees] += np.outer(weight * keep, d_out[b, h, i])
            d_weight = d_weight + keep * (v[b, g, sees] @ d_out[b, h, i])
        if d_weights is not None:
            d_weight = d_weight + d_weights[b, h, i, sees]
        change = (0 if d_lse is None else d_lse[b, h, i]) - weight @ d_weight
        d_score = weight * (d_weight + change)
        d_scores[b, h, i, sees] = d_score
        d_slopes[b, h] -= d_score @ distance
        if sink is not None:
            d_sinks[h] += math.exp(sink[h] - result.lse[b, h, i]) * change
        d_raw = d_score if softcap is None else d_score * (1 - np.tanh(raw / softcap) ** 2)
        d_query[b, h, i] = scale * d_raw @ k[b, g, sees]
        d_key[b, g, sees] += scale * np.outer(d_raw, q[b, h, i])

    grads = {"query": d_query, "key": d_key, "value": d_value}
    if mask is not None and mask.dtype != bool:
        grads["attn_mask"] = _sum_to(d_scores, to_array(attn_mask).shape)
    if slopes is not None:
        grads["alibi_slopes"] = _sum_to(d_slopes, to_array(alibi_slopes).shape)
    if sink is not None:
        grads["sinks"] = d_sinks
    return result, grads


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of what was broadcast from this shape."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return x.sum(axes, keepdims=True)


# --- philox, with Python's integers -----------------------------------------------------------------


def philox4x32(counter: Sequence[int], key: Sequence[int], rounds: int) -> tuple[int, int, int, int]:
    """Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), section 3.3."""
    a, b, c, d = counter
    key0, key1 = key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * a, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return a, b, c, d


def dropout_word(head: int, i: int, j: int, rng_state: Any) -> int:
    """The 32 bits that decide on weight (i, j) of head b * Hq + h."""
    seed, offset = (int(x) % 2**64 for x in rng_state)
    counter = ((j // 16) * 8 + j % 8, (i // 16) * 8 + i % 8, head, offset % 2**32)
    return philox4x32(counter, (seed % 2**32, seed // 2**32), 7)[2 * (i // 8 % 2) + j // 8 % 2]


def kept(head: int, i: int, j: int, dropout_p: float, rng_state: Any) -> bool:
    return dropout_word(head, i, j, rng_state) >= math.floor(dropout_p * 2**32)
