"""Derivatives of the operators themselves, for whoever calls them directly: exported and traced programs.

`mha_ext`'s own functions have theirs in an `autograd.Function`, which is faster, and call the operators below autograd
(`ops.call`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import fused, ops
from ._extension import extension
from .call import Sequences
from .score_rule import ScoreRule


def _rule(
    attn_mask: Tensor | None, key_lengths: Tensor | None, q_offsets: Tensor | None, alibi_slopes: Tensor | None,
    sinks: Tensor | None, q_offset: int, window_left: int, window_right: int, softcap: float,
) -> ScoreRule:  # fmt: skip
    """The inverse of `ops.rule_tensors` and `ops.rule_numbers`."""
    window = (None if window_left < 0 else window_left, None if window_right < 0 else window_right)
    offset = q_offset if q_offsets is None else q_offsets
    return ScoreRule(attn_mask, window, offset, key_lengths, alibi_slopes, softcap or None, sinks)


def _keep_attention(on_cpu: bool) -> Callable[..., None]:
    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        query, key, value, attn_mask, key_lengths, q_offsets, alibi_slopes, sinks, rng_state, *rest = inputs
        cu_seqlens_q, cu_seqlens_k, q_offset, left, right, softcap, dropout_p, scale, tf32, for_backward, stats = rest
        ctx.kept = for_backward
        if not for_backward:
            return
        rule = _rule(attn_mask, key_lengths, q_offsets, alibi_slopes, sinks, q_offset, left, right, softcap)
        sequences = None if cu_seqlens_q is None else Sequences(cu_seqlens_q, cu_seqlens_k)
        settings = fused.Settings(dropout_p, scale, tf32, stats, on_cpu)
        fused.keep(ctx, (query, key, value), rule, rng_state, sequences, settings, output)

    return keep


def _attention_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.kept:
        raise RuntimeError(
            "mha_ext: this graph was exported or traced without gradients, and keeps nothing for a backward; "
            "trace it with gradients enabled and a parameter or input that requires one"
        )
    needs = ctx.needs_input_grad
    gradients = fused.gradients(ctx, 3, fused.first_three, False, (*needs[:4], needs[6], needs[7]), grads)
    query, key, value, mask, slopes, sinks = gradients
    return query, key, value, mask, None, None, slopes, sinks, *(None,) * 12


def _keep_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, attn_mask, key_lengths, q_offsets, alibi_slopes, sinks, rng_state, *numbers, dropout_p, dtype, _ = inputs
    rule = _rule(attn_mask, key_lengths, q_offsets, alibi_slopes, sinks, *numbers)
    ops.keep_softmax(ctx, scores, rule, dropout_p, rng_state, dtype, output)


def _softmax_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    scores, mask, slopes, sinks = ops.softmax_gradients(ctx, grads, (needs[0], needs[1], needs[4], needs[5]))
    return scores, mask, None, None, slopes, sinks, *(None,) * 8


def _keep_matmul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, k_lengths = inputs
    if k_lengths is not None:
        raise RuntimeError("mha_ext::matmul: expected k_lengths None where a gradient is wanted")
    ops.Matmul.setup_context(ctx, tuple(operands), output)


def _refused(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise RuntimeError(
        "mha_ext: the operators of a backward have no derivative; differentiate the forward twice (create_graph=True)"
    )


def _register(name: str, backward: Callable[..., Any], keep: Callable[..., None] | None = None) -> None:
    torch.library.register_autograd(f"mha_ext::{name}", backward, setup_context=keep)


if extension is not None:
    for on_cpu, suffix in ((False, ""), (True, "_cpu")):
        _register(f"attention_forward{suffix}", _attention_backward, _keep_attention(on_cpu))
        _register(f"attention_backward{suffix}", _refused)
    _register("masked_softmax", _softmax_backward, _keep_softmax)
    _register("masked_softmax_backward", _refused)
    _register("matmul", lambda ctx, grad: (*ops.Matmul.backward(ctx, grad), None), _keep_matmul)
    _register("qkv_split", ops.QkvSplit.backward, ops.QkvSplit.setup_context)
    _register("qkv_merge", ops.QkvMerge.backward, ops.QkvMerge.setup_context)
