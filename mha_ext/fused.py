"""Attention by the fused kernels of the GPU or the CPU: no matrix of Lq x Lk is ever in memory, forward or backward.

Saved for backward are the inputs, the output and three numbers a row. Where the backward itself is differentiated
(`create_graph=True`, or a transform), `reference` takes over.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .autocast import without_autocast
from .call import Sequences, by_heads, from_heads
from .ops import (
    allow_tf32,
    call,
    graph_leaf,
    kept_rule,
    plain_gradients,
    restored_rule,
    rule_numbers,
    rule_tensors,
    unit_stride,
)
from .reference import AttentionResult
from .score_rule import ScoreRule
from .transforms import backward_in_plain_pytorch, is_traced

__all__ = ["attention", "attention_packed", "unpacked", "wants_grad"]

MAX_HEAD_DIM = 256  # as kMaxFusedHeadDim in csrc/kernels/attention.h


class Settings(NamedTuple):
    """What a call has besides tensors."""

    dropout_p: float
    scale: float
    allow_tf32: bool
    return_stats: bool
    on_cpu: bool  # by the kernels of csrc/cpu


class Saved(NamedTuple):
    """What a backward reads besides the gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor
    row_stats: Tensor
    rng_state: Tensor | None
    sequences: Sequences | None
    rule: ScoreRule
    settings: Settings


def _operands(
    query: Tensor, rule: ScoreRule, rng_state: Tensor | None, sequences: Sequences | None, settings: Settings
) -> tuple[Any, ...]:
    """The arguments that both operators share, after their tensors."""
    batch = query.shape[0] if sequences is None else sequences.cu_seqlens_q.shape[0] - 1
    return (
        rule.attn_mask,
        *rule_tensors(rule, batch, query.shape[1]),
        rng_state,
        *(sequences or (None, None)),
        *rule_numbers(rule),
        settings.dropout_p,
        settings.scale,
        settings.allow_tf32,
    )


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: ScoreRule,
    rng_state: Tensor | None,
    sequences: Sequences | None,
    settings: Settings,
    for_backward: bool,
) -> tuple[Tensor, ...]:
    """output, lse, row_stats (empty unless for_backward), max_score and entropy (empty unless asked for)."""
    return call(
        torch.ops.mha_ext.attention_forward_cpu if settings.on_cpu else torch.ops.mha_ext.attention_forward,
        unit_stride(query),
        unit_stride(key),
        unit_stride(value),
        *_operands(query, rule, rng_state, sequences, settings),
        for_backward,
        settings.return_stats,
    )


def _backward(
    saved: Saved, grad_output: Tensor | None, grad_lse: Tensor | None, packed: bool, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key and value (or of all three packed), attn_mask, alibi_slopes and sinks."""
    rule = saved.rule
    needs_mask, needs_slopes, needs_sinks = needs
    grad_output = torch.zeros_like(saved.output) if grad_output is None else unit_stride(grad_output)
    operators = torch.ops.mha_ext
    query, key, value, grad_mask, grad_slopes, grad_sinks = call(
        operators.attention_backward_cpu if saved.settings.on_cpu else operators.attention_backward,
        grad_output,
        None if grad_lse is None else grad_lse.contiguous(),
        unit_stride(saved.query),
        unit_stride(saved.key),
        unit_stride(saved.value),
        saved.output,
        saved.lse,
        saved.row_stats,
        *_operands(saved.query, rule, saved.rng_state, saved.sequences, saved.settings),
        packed,
        needs_mask,
        needs_slopes,
        needs_sinks,
    )
    if needs_slopes and rule.alibi_slopes is not None:
        grad_slopes = grad_slopes.sum_to_size(rule.alibi_slopes.shape)
    gradients = (query,) if packed else (query, key, value)
    optional = zip((grad_mask, grad_slopes, grad_sinks), needs, strict=True)
    return *gradients, *(gradient if needed else None for gradient, needed in optional)


def _plain_outputs(saved: Saved) -> tuple[Tensor, Tensor]:
    """Output and lse in plain PyTorch."""
    arguments: dict[str, Any] = saved.rule._asdict()
    arguments.update(dropout_p=saved.settings.dropout_p, scale=saved.settings.scale, rng_state=saved.rng_state)
    arguments["return_entropy"] = False
    inputs = (saved.query, saved.key, saved.value)
    with without_autocast(saved.query):
        if saved.sequences is None:
            result = reference.attention(*inputs, **arguments)
        else:
            del arguments["attn_mask"], arguments["key_lengths"]
            query, key, value = map(from_heads, inputs)
            result = reference.attention_varlen(query, key, value, *saved.sequences, **arguments)
    output, lse = result.output, result.lse
    assert lse is not None
    return (output, lse) if saved.sequences is None else (by_heads(output), by_heads(lse))


def _differentiable(
    saved: Saved, inputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """What `_backward` returns, by plain PyTorch."""
    rule = saved.rule
    wanted = (*inputs, rule.attn_mask, rule.alibi_slopes, rule.sinks)
    return plain_gradients(lambda: _plain_outputs(saved), grads[:2], wanted, needs)


def differentiable_direct(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, key_lengths: Tensor | None, q_offset: int,
    window_left: int, window_right: int, softcap: float, scale: float, grad_output: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`_differentiable` of a call that went the short way (csrc/api/cpu/direct_gradient.cpp)."""
    window = (None if window_left < 0 else window_left, None if window_right < 0 else window_right)
    mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
    rule = ScoreRule(mask, window, q_offset, key_lengths, None, softcap or None, None)
    settings = Settings(0.0, scale, False, False, True)
    saved = Saved(query, key, value, query, query, query, None, None, rule, settings)  # its rows are not read
    return _differentiable(saved, (query, key, value), (grad_output, None), (*needs, False, False, False))


# Without setup_context, for which torch binds the arguments to forward's signature in every call: longer than a small
# attention takes. Transforms, which would need it, go to plain PyTorch.
class _FusedAttention(torch.autograd.Function):
    """query, key, value (B, H, L, D), or (1, H, total, D) with sequences."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, alibi_slopes: Tensor | None,
        sinks: Tensor | None, rule: ScoreRule, rng_state: Tensor | None, sequences: Sequences | None,
        settings: Settings,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rule = _with_tensors(rule, attn_mask, alibi_slopes, sinks)
        outputs = _forward(query, key, value, rule, rng_state, sequences, settings, True)
        keep(ctx, (query, key, value), rule, rng_state, sequences, settings, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return *gradients(ctx, 3, first_three, False, ctx.needs_input_grad, grads), None, None, None, None


class _PackedAttention(torch.autograd.Function):
    """packed (B, L, (Hq + 2 Hkv) D), whose gradient is written in place of three that would be added up."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, attn_mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
        heads: int, heads_kv: int, rule: ScoreRule, rng_state: Tensor | None, settings: Settings,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rule = _with_tensors(rule, attn_mask, alibi_slopes, sinks)
        outputs = _forward(*unpacked(packed, heads, heads_kv), rule, rng_state, None, settings, True)
        ctx.heads, ctx.heads_kv = heads, heads_kv
        keep(ctx, (packed,), rule, rng_state, None, settings, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        def parts(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
            return unpacked(inputs[0], ctx.heads, ctx.heads_kv)

        return *gradients(ctx, 1, parts, True, ctx.needs_input_grad, grads), None, None, None, None, None


def gradients(
    ctx: Any,
    count: int,
    parts: Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor]],
    packed: bool,
    needs: tuple[bool, ...],
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """Of what `keep` kept: the gradients of its `count` inputs, attn_mask, alibi_slopes and sinks."""
    in_plain_pytorch = backward_in_plain_pytorch()
    with torch.set_grad_enabled(in_plain_pytorch):  # the parts of a packed input belong to the graph
        inputs, saved = _restored(ctx, count, parts)
    if in_plain_pytorch:
        return _differentiable(saved, inputs, grads, needs)
    needs_mask, needs_slopes, needs_sinks = needs[count : count + 3]
    return _backward(saved, grads[0], grads[1], packed, (needs_mask, needs_slopes, needs_sinks))


def first_three(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value of a call that is not packed."""
    query, key, value = inputs
    return query, key, value


def unpacked(packed: Tensor, heads: int, heads_kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """packed (B, L, (Hq + 2 Hkv) D) -> views query (B, Hq, L, D), key and value (B, Hkv, L, D)."""
    batch, seqlen, columns = packed.shape
    all_heads = heads + 2 * heads_kv
    by_heads = packed.view(batch, seqlen, all_heads, columns // all_heads).transpose(1, 2)
    query, key, value = by_heads.split_with_sizes((heads, heads_kv, heads_kv), 1)
    return query, key, value


def _with_tensors(
    rule: ScoreRule, attn_mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None
) -> ScoreRule:
    """The rule with the tensors that autograd has seen, which are others while a graph is traced."""
    if attn_mask is None and alibi_slopes is None and sinks is None:
        return rule
    return rule._replace(attn_mask=attn_mask, alibi_slopes=alibi_slopes, sinks=sinks)


def keep(
    ctx: Any,
    inputs: tuple[Tensor, ...],
    rule: ScoreRule,
    rng_state: Tensor | None,
    sequences: Sequences | None,
    settings: Settings,
    outputs: tuple[Tensor, ...],
) -> None:
    """Keep on ctx what a backward needs."""
    output, lse, row_stats, max_score, entropy = outputs
    ctx.mark_non_differentiable(row_stats, max_score, entropy)
    ctx.set_materialize_grads(False)
    ctx.settings = settings
    kept = kept_rule(ctx, rule)
    ctx.save_for_backward(*inputs, output, lse, row_stats, rng_state, *(sequences or (None, None)), *kept)


def _restored(
    ctx: Any, count: int, parts: Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor]]
) -> tuple[tuple[Tensor, ...], Saved]:
    """The inverse of `keep`: the inputs, of which query, key and value are `parts`, and what was saved with them."""
    tensors = ctx.saved_tensors  # asked for once: a checkpoint refuses a second time
    inputs = tensors[:count]
    output, lse, row_stats, rng_state, cu_seqlens_q, cu_seqlens_k, *kept = tensors[count:]
    sequences = None if cu_seqlens_q is None else Sequences(cu_seqlens_q, cu_seqlens_k)
    rule = restored_rule(ctx, kept)
    query, key, value = parts(inputs)
    return inputs, Saved(query, key, value, output, lse, row_stats, rng_state, sequences, rule, ctx.settings)


@graph_leaf
def _apply(*arguments: Any) -> tuple[Tensor, ...]:
    return _FusedAttention.apply(*arguments)


@graph_leaf
def _apply_packed(*arguments: Any) -> tuple[Tensor, ...]:
    return _PackedAttention.apply(*arguments)


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether a backward will follow."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def _settings(
    like: Tensor, dropout_p: float, scale: float, return_stats: bool, on_cpu: bool
) -> tuple[Tensor | None, Settings]:
    rng_state = reference.draw_rng_state(like.device) if dropout_p > 0 else None
    return rng_state, Settings(dropout_p, scale, not on_cpu and allow_tf32(like), return_stats, on_cpu)


def _result(outputs: tuple[Tensor, ...]) -> AttentionResult:
    output, lse, _, max_score, entropy = outputs
    return AttentionResult(output, lse, None, max_score, entropy)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: ScoreRule,
    dropout_p: float,
    scale: float,
    return_stats: bool,
    sequences: Sequences | None = None,
    *,
    on_cpu: bool = False,
) -> AttentionResult:
    """`reference.attention` without weights, by one kernel forward and a few backward."""
    rng_state, settings = _settings(query, dropout_p, scale, return_stats, on_cpu)
    differentiable = wants_grad(query, key, value, rule.attn_mask, rule.alibi_slopes, rule.sinks)
    if not differentiable or is_traced():
        return _result(_forward(query, key, value, rule, rng_state, sequences, settings, is_traced()))
    return _result(
        _apply(
            query, key, value, rule.attn_mask, rule.alibi_slopes, rule.sinks, rule, rng_state, sequences, settings
        )
    )  # fmt: skip


def attention_packed(
    packed: Tensor,
    heads: int,
    heads_kv: int,
    rule: ScoreRule,
    dropout_p: float,
    scale: float,
    return_stats: bool,
    *,
    on_cpu: bool = False,
) -> AttentionResult:
    """`attention` of the parts of a packed projection (B, L, (Hq + 2 Hkv) D), read and differentiated in place."""
    rng_state, settings = _settings(packed, dropout_p, scale, return_stats, on_cpu)
    differentiable = wants_grad(packed, rule.attn_mask, rule.alibi_slopes, rule.sinks)
    if not differentiable or is_traced():
        query, key, value = unpacked(packed, heads, heads_kv)
        return _result(_forward(query, key, value, rule, rng_state, None, settings, is_traced()))
    return _result(
        _apply_packed(
            packed, rule.attn_mask, rule.alibi_slopes, rule.sinks, heads, heads_kv, rule, rng_state, settings
        )
    )  # fmt: skip
