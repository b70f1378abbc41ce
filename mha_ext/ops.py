"""The compiled operators torch.ops.mha_ext.*: their fakes for torch.compile, and their derivatives.

First derivatives are kernels too. Where the backward itself is differentiated (`create_graph=True`) the
products and the QKV split are closed under differentiation; a softmax goes through `reference`.
"""

from typing import Any

import torch
from torch import Tensor

from . import reference
from ._extension import extension
from .reference import AttentionResult, SoftmaxResult, accumulate_dtype_of
from .score_rule import ScoreRule

__all__ = ["attention_output", "attention_scores", "masked_softmax", "qkv_split", "unfused_attention"]


def _unit_stride(x: Tensor) -> Tensor:
    """Kernels take any strides but the last, which is 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _allow_tf32(x: Tensor) -> bool:
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"


# --- fakes ----------------------------------------------------------------------------------------


def _fake_qkv_split(packed: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int) -> tuple[Tensor, ...]:
    batch, seqlen, columns = packed.shape
    head_dim = columns // (num_heads + 2 * num_kv_heads)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return tuple(packed.new_empty((batch, h, seqlen, head_dim)) for h in heads)


def _fake_qkv_merge(grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, bias_grad: bool) -> tuple[Tensor, Tensor]:
    batch, heads, seqlen, head_dim = grad_query.shape
    columns = (heads + 2 * grad_key.shape[1]) * head_dim
    return grad_query.new_empty((batch, seqlen, columns)), grad_query.new_empty((columns if bias_grad else 0,))


def _fake_matmul(
    a: Tensor,
    b: Tensor,
    transpose_a: bool,
    transpose_b: bool,
    alpha: float,
    num_heads_out: int,
    out_dtype: torch.dtype,
    allow_tf32: bool,
) -> Tensor:
    rows, cols = a.shape[3 if transpose_a else 2], b.shape[2 if transpose_b else 3]
    return a.new_empty((a.shape[0], num_heads_out, rows, cols), dtype=out_dtype)


def _fake_masked_softmax(
    scores: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    q_offsets: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    q_offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    out_dtype: torch.dtype,
    return_stats: bool,
) -> tuple[Tensor, ...]:
    rows, compute = scores.shape[:3], accumulate_dtype_of(scores.dtype)
    stats = rows if return_stats else (0,)
    return (
        scores.new_empty(scores.shape, dtype=out_dtype),
        scores.new_empty(scores.shape if dropout_p > 0 else (0,), dtype=out_dtype),
        scores.new_empty(rows, dtype=compute),
        scores.new_empty(stats, dtype=compute),
        scores.new_empty(stats, dtype=compute),
    )


def _fake_masked_softmax_backward(
    grad_weights: Tensor | None,
    grad_dropped: Tensor | None,
    grad_lse: Tensor | None,
    weights: Tensor,
    scores: Tensor | None,
    lse: Tensor,
    q_offsets: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    q_offset: int,
    softcap: float,
    dropout_p: float,
    grad_dtype: torch.dtype,
    bias_grad: bool,
    sink_grad: bool,
    slope_grad: bool,
) -> tuple[Tensor, ...]:
    empty = (0,)
    return (
        weights.new_empty(weights.shape, dtype=grad_dtype),
        weights.new_empty(weights.shape if bias_grad and softcap else empty, dtype=grad_dtype),
        lse.new_empty(lse.shape if sink_grad else empty),
        lse.new_empty(lse.shape if slope_grad else empty),
    )


if extension is not None:
    torch.library.register_fake("mha_ext::qkv_split")(_fake_qkv_split)
    torch.library.register_fake("mha_ext::qkv_merge")(_fake_qkv_merge)
    torch.library.register_fake("mha_ext::matmul")(_fake_matmul)
    torch.library.register_fake("mha_ext::masked_softmax")(_fake_masked_softmax)
    torch.library.register_fake("mha_ext::masked_softmax_backward")(_fake_masked_softmax_backward)


# --- the QKV split --------------------------------------------------------------------------------


class _QkvSplit(torch.autograd.Function):
    @staticmethod
    def forward(packed: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int) -> tuple[Tensor, ...]:
        bias = None if bias is None else bias.contiguous()
        return torch.ops.mha_ext.qkv_split(_unit_stride(packed), bias, num_heads, num_kv_heads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.has_bias = inputs[1] is not None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_packed, grad_bias = _QkvMerge.apply(*grads, ctx.has_bias and ctx.needs_input_grad[1])
        return grad_packed, grad_bias if ctx.needs_input_grad[1] else None, None, None


class _QkvMerge(torch.autograd.Function):
    """The transpose of the split, and its derivative is the split again."""

    @staticmethod
    def forward(grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, bias_grad: bool) -> tuple[Tensor, ...]:
        grads = (_unit_stride(x) for x in (grad_query, grad_key, grad_value))
        return torch.ops.mha_ext.qkv_merge(*grads, bias_grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad_query, grad_key, _, ctx.bias_grad = inputs
        ctx.num_heads, ctx.num_kv_heads = grad_query.shape[1], grad_key.shape[1]

    @staticmethod
    def backward(ctx: Any, grad_packed: Tensor, grad_bias: Tensor) -> tuple[Any, ...]:
        bias = grad_bias if ctx.bias_grad else None
        return *_QkvSplit.apply(grad_packed, bias, ctx.num_heads, ctx.num_kv_heads), None


def qkv_split(packed: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.qkv_split` by one kernel that reads and writes once."""
    return _QkvSplit.apply(packed, bias, num_heads, num_kv_heads)


# --- the products ---------------------------------------------------------------------------------


class _Matmul(torch.autograd.Function):
    """out[b, h] = alpha * op(a) @ op(b), heads broadcast or summed by index; its own derivative."""

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, alpha: float, num_heads_out: int,
        out_dtype: torch.dtype, allow_tf32: bool,
    ) -> Tensor:  # fmt: skip
        return torch.ops.mha_ext.matmul(
            _unit_stride(a),
            _unit_stride(b),
            transpose_a,
            transpose_b,
            alpha,
            num_heads_out,
            out_dtype,
            allow_tf32,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        a, b, ctx.transpose_a, ctx.transpose_b, ctx.alpha, _, _, ctx.allow_tf32 = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        grad = grad.to(a.dtype)
        transpose_a, transpose_b = ctx.transpose_a, ctx.transpose_b

        def product(x: Tensor, y: Tensor, transpose_x: bool, transpose_y: bool, like: Tensor) -> Tensor:
            return _Matmul.apply(
                x, y, transpose_x, transpose_y, ctx.alpha, like.shape[1], like.dtype, ctx.allow_tf32
            )  # fmt: skip

        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = (
                product(b, grad, transpose_b, True, a) if transpose_a else product(grad, b, False, not transpose_b, a)
            )
        if ctx.needs_input_grad[1]:
            grad_b = (
                product(grad, a, True, transpose_a, b) if transpose_b else product(a, grad, not transpose_a, False, b)
            )
        return grad_a, grad_b, None, None, None, None, None, None


def attention_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """`reference.attention_scores`, in the accumulation dtype."""
    compute = accumulate_dtype_of(query.dtype)
    return _Matmul.apply(query, key, False, True, scale, query.shape[1], compute, _allow_tf32(query))


def attention_output(weights: Tensor, value: Tensor) -> Tensor:
    """`reference.attention_output`."""
    return _Matmul.apply(weights, value, False, False, 1.0, weights.shape[1], value.dtype, _allow_tf32(value))


# --- the masked softmax ---------------------------------------------------------------------------


def _softmax_forward(
    scores: Tensor,
    rule: ScoreRule,
    dropout_p: float,
    rng_state: Tensor | None,
    dtype: torch.dtype,
    stats: bool,
) -> SoftmaxResult:
    batch, heads = scores.shape[:2]
    left, right = rule.window
    per_batch = isinstance(rule.q_offset, Tensor)
    weights, dropped, lse, max_score, entropy = torch.ops.mha_ext.masked_softmax(
        _unit_stride(scores),
        None if rule.attn_mask is None else rule.attn_mask.expand(scores.shape),
        None if rule.key_lengths is None else rule.key_lengths.contiguous(),
        rule.q_offset.contiguous() if isinstance(rule.q_offset, Tensor) else None,
        None if rule.alibi_slopes is None else rule.alibi_slopes.expand(batch, heads),
        None if rule.sinks is None else rule.sinks.contiguous(),
        rng_state,
        0 if per_batch else rule.q_offset,
        -1 if left is None else left,
        -1 if right is None else right,
        rule.softcap or 0.0,
        dropout_p,
        dtype,
        stats,
    )
    return SoftmaxResult(weights, dropped if dropout_p > 0 else weights, lse, max_score, entropy)


def _softmax_backward(
    grad_weights: Tensor | None,
    grad_dropped: Tensor | None,
    grad_lse: Tensor | None,
    weights: Tensor,
    scores: Tensor | None,
    lse: Tensor,
    rule: ScoreRule,
    dropout_p: float,
    rng_state: Tensor | None,
    dtype: torch.dtype,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of scores, attn_mask, alibi_slopes and sinks, the last three where `needs` says so."""
    needs_mask, needs_slopes, needs_sinks = needs
    per_batch = isinstance(rule.q_offset, Tensor)
    grad_scores, grad_bias, sink_rows, slope_rows = torch.ops.mha_ext.masked_softmax_backward(
        None if grad_weights is None else _unit_stride(grad_weights),
        None if grad_dropped is None else _unit_stride(grad_dropped),
        None if grad_lse is None else grad_lse.contiguous(),
        weights,
        None if rule.softcap is None or scores is None else _unit_stride(scores),
        lse,
        rule.q_offset.contiguous() if isinstance(rule.q_offset, Tensor) else None,
        None if rule.sinks is None else rule.sinks.contiguous(),
        rng_state,
        0 if per_batch else rule.q_offset,
        rule.softcap or 0.0,
        dropout_p,
        dtype,
        needs_mask,
        needs_sinks,
        needs_slopes,
    )
    grad_mask = grad_slopes = grad_sinks = None
    if needs_mask and rule.attn_mask is not None:
        grad_bias = grad_scores if rule.softcap is None else grad_bias
        axes = [axis for axis in range(4) if rule.attn_mask.shape[axis] == 1 != grad_bias.shape[axis]]
        if axes:
            grad_bias = grad_bias.sum(axes, keepdim=True, dtype=lse.dtype)
        grad_mask = grad_bias.to(rule.attn_mask.dtype)
    if needs_slopes and rule.alibi_slopes is not None:
        grad_slopes = slope_rows.sum(-1).sum_to_size(rule.alibi_slopes.shape)
    if needs_sinks:
        grad_sinks = sink_rows.sum((0, 2))
    return grad_scores, grad_mask, grad_slopes, grad_sinks


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        scores: Tensor, attn_mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
        rule: ScoreRule, dropout_p: float, rng_state: Tensor | None, dtype: torch.dtype, return_stats: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rule = rule._replace(attn_mask=attn_mask, alibi_slopes=alibi_slopes, sinks=sinks)
        result = _softmax_forward(scores, rule, dropout_p, rng_state, dtype, return_stats)
        dropped = result.dropped if dropout_p > 0 else scores.new_empty(0, dtype=dtype)
        return result.weights, dropped, result.lse, result.max_score, result.entropy

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        scores, attn_mask, alibi_slopes, sinks, rule, ctx.dropout_p, rng_state, ctx.dtype, _ = inputs
        weights, _, lse, max_score, entropy = output
        ctx.mark_non_differentiable(max_score, entropy)
        ctx.set_materialize_grads(False)
        ctx.rule = rule._replace(attn_mask=None, alibi_slopes=None, sinks=None, key_lengths=None, q_offset=0)
        q_offset = rule.q_offset if isinstance(rule.q_offset, Tensor) else None
        ctx.q_offset = None if q_offset is not None else rule.q_offset
        ctx.save_for_backward(
            scores, attn_mask, alibi_slopes, sinks, rule.key_lengths, q_offset, rng_state, weights, lse
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_weights, grad_dropped, grad_lse = grads[:3]
        scores, attn_mask, alibi_slopes, sinks, key_lengths, q_offset, rng_state, weights, lse = ctx.saved_tensors
        if ctx.dropout_p == 0:
            grad_dropped = None
        rule = ctx.rule._replace(
            attn_mask=attn_mask, alibi_slopes=alibi_slopes, sinks=sinks, key_lengths=key_lengths,
            q_offset=ctx.q_offset if q_offset is None else q_offset,
        )  # fmt: skip
        if torch.is_grad_enabled():  # to be differentiated again
            inputs = (scores, attn_mask, alibi_slopes, sinks)
            result = reference.masked_softmax(
                scores.to(accumulate_dtype_of(scores.dtype)), dropout_p=ctx.dropout_p, rng_state=rng_state,
                **rule._asdict(),
            )  # fmt: skip
            outputs = (result.weights.to(ctx.dtype), result.dropped.to(ctx.dtype), result.lse)
            gradients = _differentiable_gradients(
                outputs, (grad_weights, grad_dropped, grad_lse), inputs, ctx.needs_input_grad
            )
        else:
            gradients = _softmax_backward(
                grad_weights, grad_dropped, grad_lse, weights, scores, lse, rule, ctx.dropout_p, rng_state,
                scores.dtype, ctx.needs_input_grad[1:4],
            )  # fmt: skip
        return *gradients, None, None, None, None, None


def _differentiable_gradients(
    outputs: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    inputs: tuple[Tensor | None, ...],
    needs_input_grad: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of plain PyTorch outputs as a graph of their own."""
    given = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    wanted = [x for x, needed in zip(inputs, needs_input_grad, strict=False) if needed and x is not None]
    gradients = iter(
        torch.autograd.grad(
            [output for output, _ in given],
            wanted,
            [grad for _, grad in given],
            create_graph=True,
            allow_unused=True,
        )
        if given and wanted
        else [None] * len(wanted)
    )
    return tuple(next(gradients) if needed else None for _, needed in zip(inputs, needs_input_grad, strict=False))


def masked_softmax(
    scores: Tensor, rule: ScoreRule, dropout_p: float, rng_state: Tensor | None, dtype: torch.dtype
) -> SoftmaxResult:
    """`reference.masked_softmax` by one kernel that reads and writes once; weights in `dtype`."""
    weights, dropped, lse, max_score, entropy = _MaskedSoftmax.apply(
        scores, rule.attn_mask, rule.alibi_slopes, rule.sinks, rule, dropout_p, rng_state, dtype, False
    )
    return SoftmaxResult(weights, dropped if dropout_p > 0 else weights, lse, max_score, entropy)


# --- attention by the three kernels ---------------------------------------------------------------


def _product(
    x: Tensor,
    y: Tensor,
    transpose_x: bool,
    transpose_y: bool,
    alpha: float,
    heads: int,
    dtype: torch.dtype,
    tf32: bool,
) -> Tensor:
    return torch.ops.mha_ext.matmul(
        _unit_stride(x), _unit_stride(y), transpose_x, transpose_y, alpha, heads, dtype, tf32
    )


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
        softmax = _softmax_forward(scores, rule, dropout_p, rng_state, dtype, return_stats)
        output = _product(softmax.dropped, value, False, False, 1.0, heads, dtype, allow_tf32)
        nothing = scores.new_empty(0)
        dropped = softmax.dropped if dropout_p > 0 else nothing
        scores = scores if rule.softcap is not None else nothing
        return output, softmax.lse, softmax.weights, softmax.max_score, softmax.entropy, dropped, scores

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        query, key, value, attn_mask, alibi_slopes, sinks, rule, *rest = inputs
        ctx.dropout_p, ctx.scale, rng_state, _, ctx.allow_tf32 = rest
        _, lse, weights, max_score, entropy, dropped, scores = output
        ctx.mark_non_differentiable(max_score, entropy, dropped, scores)
        ctx.set_materialize_grads(False)
        ctx.rule = rule._replace(attn_mask=None, alibi_slopes=None, sinks=None, key_lengths=None, q_offset=0)
        q_offset = rule.q_offset if isinstance(rule.q_offset, Tensor) else None
        ctx.q_offset = None if q_offset is not None else rule.q_offset
        ctx.save_for_backward(
            query, key, value, attn_mask, alibi_slopes, sinks, rule.key_lengths, q_offset, rng_state, lse,
            weights, dropped, scores,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output, grad_lse, grad_weights = grads[:3]
        query, key, value, attn_mask, alibi_slopes, sinks, key_lengths, q_offset, rng_state, *saved = ctx.saved_tensors
        lse, weights, dropped, scores = saved
        rule = ctx.rule._replace(
            attn_mask=attn_mask, alibi_slopes=alibi_slopes, sinks=sinks, key_lengths=key_lengths,
            q_offset=ctx.q_offset if q_offset is None else q_offset,
        )  # fmt: skip
        if torch.is_grad_enabled():  # to be differentiated again
            result = reference.attention(
                query,
                key,
                value,
                dropout_p=ctx.dropout_p,
                scale=ctx.scale,
                rng_state=rng_state,
                **rule._asdict(),
            )
            gradients = _differentiable_gradients(
                (result.output, result.lse, result.weights),  # type: ignore[arg-type]
                (grad_output, grad_lse, grad_weights),
                (query, key, value, attn_mask, alibi_slopes, sinks),
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
        grad_scores, *grad_rule = _softmax_backward(
            grad_weights, grad_probabilities, grad_lse, weights, scores, lse, rule, ctx.dropout_p, rng_state,
            dtype, tuple(needs_rule),
        )  # fmt: skip
        if needs_query:
            grad_query = _product(grad_scores, key, False, False, ctx.scale, heads, dtype, tf32)
        if needs_key:
            grad_key = _product(grad_scores, query, True, False, ctx.scale, heads_kv, dtype, tf32)
        return grad_query, grad_key, grad_value, *grad_rule, None, None, None, None, None, None


# A leaf for torch.compile, whose derivative AOT autograd traces.
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _apply_unfused_attention(*arguments: Any) -> tuple[Tensor, ...]:
    return _UnfusedAttention.apply(*arguments)[:5]


def unfused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: ScoreRule,
    dropout_p: float,
    scale: float,
    return_stats: bool,
) -> AttentionResult:
    """`reference.attention` by kernels for scores, masked softmax and output."""
    visible = _key_visibility(key, rule)
    if visible is not None:  # 0 * NaN is NaN, so what is hidden from every query leaves the products
        key, value = key.masked_fill(~visible, 0), value.masked_fill(~visible, 0)
    rng_state = reference.draw_rng_state(query.device) if dropout_p > 0 else None
    arguments = (rule, dropout_p, scale, rng_state, return_stats, _allow_tf32(query))
    output, lse, weights, max_score, entropy = _apply_unfused_attention(
        query, key, value, rule.attn_mask, rule.alibi_slopes, rule.sinks, *arguments
    )
    return AttentionResult(output, lse, weights, max_score, entropy)


def _key_visibility(key: Tensor, rule: ScoreRule) -> Tensor | None:
    """(B or 1, Hkv or 1, Lk, 1): False for keys that are hidden from every query alike."""
    visible = None
    if rule.key_lengths is not None:
        visible = torch.arange(key.shape[2], device=key.device) < rule.key_lengths[:, None, None]
    mask = rule.attn_mask
    if mask is not None and (mask.shape[2] == 1 or mask.stride(2) == 0):
        mask = mask[:, :, :1].expand(-1, -1, -1, key.shape[2])
        seen = mask if mask.dtype == torch.bool else mask != -float("inf")
        if seen.shape[1] > 1:  # a key head is hidden when all query heads that read it are blind
            seen = seen.unflatten(1, (key.shape[1], -1)).any(2)
        seen = seen.squeeze(2)
        visible = seen if visible is None else visible & seen
    return None if visible is None else visible[..., None]
