"""Attention by the three kernels: scores, masked softmax, output; the backward by the same kernels."""

import math
from typing import Any

import torch
from torch import Tensor

from . import reference
from .autocast import without_autocast
from .ops import (
    allow_tf32,
    call,
    graph_leaf,
    kept_rule,
    plain_gradients,
    restored_rule,
    softmax_backward,
    softmax_forward,
    unit_stride,
)
from .reference import AttentionResult, accumulate_dtype_of
from .score_rule import ScoreRule
from .transforms import backward_in_plain_pytorch


def _product(
    x: Tensor,
    y: Tensor,
    transpose_x: bool,
    transpose_y: bool,
    alpha: float,
    heads: int,
    dtype: torch.dtype,
    tf32: bool,
    k_lengths: Tensor | None = None,
) -> Tensor:
    operands = (unit_stride(x), unit_stride(y), transpose_x, transpose_y, alpha, heads, dtype, tf32, k_lengths)
    return call(torch.ops.mha_ext.matmul, *operands)


class _UnfusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, alibi_slopes: Tensor | None,
        sinks: Tensor | None, rule: ScoreRule, dropout_p: float, scale: float, rng_state: Tensor | None,
        return_stats: bool, allow_tf32: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        heads, dtype, compute = query.shape[1], query.dtype, accumulate_dtype_of(query.dtype)
        rule = rule._replace(attn_mask=attn_mask, alibi_slopes=alibi_slopes, sinks=sinks)
        scores = _product(query, key, False, True, scale, heads, compute, allow_tf32)
        weights, dropped, *rows = softmax_forward(scores, rule, dropout_p, rng_state, dtype, return_stats)
        probabilities = dropped if dropout_p > 0 else weights
        output = _product(probabilities, value, False, False, 1.0, heads, dtype, allow_tf32, rule.key_lengths)
        scores = scores.new_empty(0) if rule.softcap is None else scores
        return output, weights, dropped, *rows, scores

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        query, key, value, attn_mask, alibi_slopes, sinks, rule, *rest = inputs
        ctx.dropout_p, ctx.scale, rng_state, _, ctx.allow_tf32 = rest
        _, weights, dropped, lse, max_score, entropy, scores = output
        ctx.mark_non_differentiable(dropped, max_score, entropy, scores)
        ctx.set_materialize_grads(False)
        rule_tensors = kept_rule(ctx, rule._replace(attn_mask=attn_mask, alibi_slopes=alibi_slopes, sinks=sinks))
        ctx.save_for_backward(query, key, value, rng_state, lse, weights, dropped, scores, *rule_tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output, grad_weights, _, grad_lse = grads[:4]
        query, key, value, rng_state, lse, weights, dropped, scores, *rule_tensors = ctx.saved_tensors
        rule = restored_rule(ctx, rule_tensors)
        if backward_in_plain_pytorch():

            def outputs() -> tuple[Tensor, ...]:
                with without_autocast(query):
                    result = reference.attention(
                        query, key, value, dropout_p=ctx.dropout_p, scale=ctx.scale, rng_state=rng_state,
                        return_entropy=False, **rule._asdict(),
                    )  # fmt: skip
                return result.output, result.lse, result.weights  # type: ignore[return-value]

            gradients = plain_gradients(
                outputs,
                (grad_output, grad_lse, grad_weights),
                (query, key, value, rule.attn_mask, rule.alibi_slopes, rule.sinks),
                ctx.needs_input_grad,
            )
            return *gradients, None, None, None, None, None, None

        heads, heads_kv, dtype, compute = query.shape[1], key.shape[1], query.dtype, lse.dtype
        tf32, dropout = ctx.allow_tf32, ctx.dropout_p > 0
        needs_query, needs_key, needs_value, *needs_rule = ctx.needs_input_grad[:6]
        grad_query = grad_key = grad_value = grad_probabilities = None
        if grad_output is not None:
            if needs_value:
                probabilities = dropped if dropout else weights
                grad_value = _product(probabilities, grad_output, True, False, 1.0, heads_kv, dtype, tf32)
            grad_probabilities = _product(grad_output, value, False, True, 1.0, heads, compute, tf32)
        if not dropout and grad_probabilities is not None:  # the returned weights are those that made the output
            grad_weights = grad_probabilities if grad_weights is None else grad_probabilities + grad_weights
            grad_probabilities = None
        grad_scores, *grad_rule = softmax_backward(
            grad_weights, grad_probabilities, grad_lse, weights, scores, lse, rule, ctx.dropout_p, rng_state,
            dtype, tuple(needs_rule),
        )  # fmt: skip
        if needs_query:
            grad_query = _product(grad_scores, key, False, False, ctx.scale, heads, dtype, tf32, rule.key_lengths)
        if needs_key:
            grad_key = _product(grad_scores, query, True, False, ctx.scale, heads_kv, dtype, tf32)
        return grad_query, grad_key, grad_value, *grad_rule, None, None, None, None, None, None


@graph_leaf
def _apply(*arguments: Any) -> tuple[Tensor, ...]:
    output, weights, _, lse, max_score, entropy, _ = _UnfusedAttention.apply(*arguments)
    return output, lse, weights, max_score, entropy


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: ScoreRule,
    dropout_p: float,
    scale: float,
    return_stats: bool,
) -> AttentionResult:
    """`reference.attention` by kernels for scores, masked softmax and output."""
    hidden = _hidden_keys(rule.attn_mask, key)
    if hidden is not None:  # 0 * NaN is NaN, so what is hidden from every query leaves the products
        key, value = _without(key, hidden), _without(value, hidden)
    if rule.key_lengths is not None:  # beyond which the products read nothing
        rule = rule._replace(key_lengths=rule.key_lengths.contiguous())
    rng_state = reference.draw_rng_state(query.device) if dropout_p > 0 else None
    arguments = (rule, dropout_p, scale, rng_state, return_stats, allow_tf32(query))
    output, lse, weights, max_score, entropy = _apply(
        query, key, value, rule.attn_mask, rule.alibi_slopes, rule.sinks, *arguments
    )
    return AttentionResult(output, lse, weights, max_score, entropy)


def _hidden_keys(attn_mask: Tensor | None, key: Tensor) -> Tensor | None:
    """(B or 1, Hkv or 1, Lk, 1): True for keys that a mask broadcast over the queries hides; None: no such mask."""
    if attn_mask is None or attn_mask.shape[2] == 0 or (attn_mask.shape[2] > 1 and attn_mask.stride(2) != 0):
        return None
    mask = attn_mask[:, :, 0].expand(-1, -1, key.shape[2])
    hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
    if hidden.shape[1] > 1:  # hidden from all query heads that read a key head
        hidden = hidden.unflatten(1, (key.shape[1], -1)).all(2)
    return hidden[..., None]


def _without(x: Tensor, hidden: Tensor) -> Tensor:
    """Zeros in place of hidden rows; heads that are one in memory stay so."""
    one = x[:, :1] if x.stride(1) == 0 and hidden.shape[1] == 1 else x
    return one.masked_fill(hidden, 0).expand(x.shape)
