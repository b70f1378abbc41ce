"""The yardstick: what plain PyTorch, computing in the dtype of its inputs, gets wrong itself."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from oracle import to_array
from torch import Tensor

FACTOR = 1.5


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool = False,
    scale: float | None = None, window: tuple[int | None, int | None] = (None, None), q_offset: Any = 0,
    key_lengths: Tensor | None = None, alibi_slopes: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, logsumexp and weights, as one would write them in a few lines; every step in query's dtype."""
    dtype, device = query.dtype, query.device
    batch, heads, seqlen_q, head_dim = query.shape
    group, seqlen_kv = heads // key.shape[1], key.shape[2]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (1 / math.sqrt(head_dim) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if isinstance(q_offset, str):
        q_offset = seqlen_kv - seqlen_q
    if isinstance(q_offset, Tensor):
        q_offset = q_offset[:, None, None, None]
    distance = torch.arange(seqlen_kv, device=device) - torch.arange(seqlen_q, device=device)[:, None] - q_offset
    left, right = window
    seen = torch.ones((batch, heads, seqlen_q, seqlen_kv), dtype=torch.bool, device=device)
    if is_causal:
        seen = seen & (distance <= 0)
    if left is not None:
        seen = seen & (distance >= -left)
    if right is not None:
        seen = seen & (distance <= right)
    if key_lengths is not None:
        seen = seen & (torch.arange(seqlen_kv, device=device) < key_lengths[:, None, None, None])
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        seen = seen & (attn_mask != -math.inf)
        scores = scores + attn_mask.to(dtype).masked_fill(attn_mask == -math.inf, 0)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(dtype)[..., None, None] * distance.abs()
    # a column of its own for the sinks, and one far below everything so that no row is empty
    floor = torch.full_like(scores[..., :1], -1e4 if dtype == torch.float16 else -1e30)
    if sinks is not None:
        floor = sinks.to(dtype)[:, None, None].expand(floor.shape)
    scores = torch.cat((scores.masked_fill(~seen, -math.inf), floor), -1)
    weights = torch.softmax(scores, -1)[..., :-1].masked_fill(~seen, 0)
    weights = weights if sinks is not None else weights.masked_fill(~seen.any(-1, keepdim=True), 0)
    lse = torch.logsumexp(scores if sinks is not None else scores[..., :-1], -1)
    return weights @ value, lse, weights


def assert_accurate(
    actual: Tensor, expected: NDArray[Any], plain: Tensor | None, floor: float, name: str = "result"
) -> float:
    """Largest error at most FACTOR times that of plain PyTorch plus `floor` of the largest value expected."""
    ours = to_array(actual)
    assert ours.shape == expected.shape, f"{name}: shape {ours.shape}, expected {expected.shape}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(ours[~finite], expected[~finite], err_msg=f"{name}: not finite")
    if not finite.any():
        return 0.0
    error = np.abs(ours[finite] - expected[finite]).max()
    allowed = floor * np.abs(expected[finite]).max()
    if plain is not None:
        allowed += FACTOR * np.abs(to_array(plain)[finite] - expected[finite]).max()
    assert error <= allowed, f"{name}: largest error {error:.3g}, allowed {allowed:.3g}"
    return float(error)


# One rounding of the largest value in half precision; a few in fp32 and fp64, where plain PyTorch may be lucky.
FLOOR = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 1e-6, torch.float64: 1e-14}
