"""The compiled operators torch.ops.mha_ext.* and their derivatives.

First derivatives are kernels too. Where the backward itself is differentiated (`create_graph=True`) the
products and the QKV split are closed under differentiation; a softmax goes through `reference`, and in a transform
all of them go through plain PyTorch.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from . import (
    fakes,  # noqa: F401  registers them
    reference,
)
from .autocast import without_autocast
from .reference import SoftmaxResult, accumulate_dtype_of
from .score_rule import ScoreRule
from .transforms import active_transform, backward_in_plain_pytorch, is_traced

__all__ = ["attention_output", "attention_scores", "masked_softmax", "qkv_split"]


def graph_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """A leaf for torch.compile, into which it does not look; AOT autograd traces its derivative."""
    leaf: Callable[..., Any] = torch.compiler.allow_in_graph(function)
    return leaf


def call(operator: Callable[..., Any], *arguments: Any) -> Any:
    """The operator below autograd: who calls it has a derivative of its own, and `derivatives` is for others."""
    if torch.compiler.is_compiling() or is_traced():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def unit_stride(x: Tensor) -> Tensor:
    """Kernels take any strides but the last, which is 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


# A compiled graph takes the answer of its tracing, and is traced again when torch's setting changes.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tf32_is_set() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"  # whichever of torch's settings it was set by


def allow_tf32(x: Tensor) -> bool:
    """Whether fp32 products may round their inputs to TF32."""
    return x.dtype == torch.float32 and bool(_tf32_is_set())


# --- the QKV split --------------------------------------------------------------------------------


class QkvSplit(torch.autograd.Function):
    """Whose derivative is `QkvMerge`."""

    @staticmethod
    def forward(packed: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int) -> tuple[Tensor, ...]:
        bias = None if bias is None else bias.contiguous()
        return call(torch.ops.mha_ext.qkv_split, unit_stride(packed), bias, num_heads, num_kv_heads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.has_bias = inputs[1] is not None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if active_transform() is not None:
            grad_packed = torch.cat([grad.transpose(1, 2).flatten(2) for grad in grads], -1)
            grad_bias = grad_packed.sum((0, 1)) if ctx.has_bias else None
            return grad_packed, grad_bias, None, None
        grad_packed, grad_bias = QkvMerge.apply(*grads, ctx.has_bias and ctx.needs_input_grad[1])
        return grad_packed, grad_bias if ctx.needs_input_grad[1] else None, None, None


class QkvMerge(torch.autograd.Function):
    """The transpose of the split, and its derivative is the split again."""

    @staticmethod
    def forward(grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, bias_grad: bool) -> tuple[Tensor, ...]:
        grads = (unit_stride(x) for x in (grad_query, grad_key, grad_value))
        return call(torch.ops.mha_ext.qkv_merge, *grads, bias_grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad_query, grad_key, _, ctx.bias_grad = inputs
        ctx.num_heads, ctx.num_kv_heads = grad_query.shape[1], grad_key.shape[1]

    @staticmethod
    def backward(ctx: Any, grad_packed: Tensor, grad_bias: Tensor) -> tuple[Any, ...]:
        bias = grad_bias if ctx.bias_grad else None
        return *QkvSplit.apply(grad_packed, bias, ctx.num_heads, ctx.num_kv_heads), None


@graph_leaf
def _apply_qkv_split(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return QkvSplit.apply(*arguments)


def qkv_split(packed: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.qkv_split` by one kernel that reads and writes once."""
    return _apply_qkv_split(packed, bias, num_heads, num_kv_heads)


# --- the products ---------------------------------------------------------------------------------


class Matmul(torch.autograd.Function):
    """out[b, h] = alpha * op(a) @ op(b), heads broadcast or summed by index; its own derivative."""

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, alpha: float, num_heads_out: int,
        out_dtype: torch.dtype, allow_tf32: bool,
    ) -> Tensor:  # fmt: skip
        return call(
            torch.ops.mha_ext.matmul,
            unit_stride(a),
            unit_stride(b),
            transpose_a,
            transpose_b,
            alpha,
            num_heads_out,
            out_dtype,
            allow_tf32,
            None,
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
            if active_transform() is not None:
                return _plain_product(x, y, transpose_x, transpose_y, ctx.alpha, like)
            return Matmul.apply(
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


def _plain_product(x: Tensor, y: Tensor, transpose_x: bool, transpose_y: bool, alpha: float, like: Tensor) -> Tensor:
    """`Matmul` in plain PyTorch, with the heads and the dtype of `like`."""
    x, y = x.mT if transpose_x else x, y.mT if transpose_y else y
    heads, compute = max(x.shape[1], y.shape[1]), accumulate_dtype_of(x.dtype)
    x, y = (z.to(compute).repeat_interleave(heads // max(z.shape[1], 1), 1) for z in (x, y))
    products = (alpha * (x @ y)).unflatten(1, (like.shape[1], -1)).sum(2)
    return products.to(like.dtype)


@graph_leaf
def _apply_matmul(*arguments: Any) -> Tensor:
    return Matmul.apply(*arguments)


def attention_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """`reference.attention_scores`, in the accumulation dtype."""
    compute = accumulate_dtype_of(query.dtype)
    return _apply_matmul(query, key, False, True, scale, query.shape[1], compute, allow_tf32(query))


def attention_output(weights: Tensor, value: Tensor) -> Tensor:
    """`reference.attention_output`."""
    return _apply_matmul(weights, value, False, False, 1.0, weights.shape[1], value.dtype, allow_tf32(value))


# --- the masked softmax ---------------------------------------------------------------------------


def kept_rule(ctx: Any, rule: ScoreRule) -> tuple[Tensor | None, ...]:
    """Keep on ctx what is no tensor; the tensors are returned, to be saved for backward."""
    ctx.rule = ScoreRule._make(None if isinstance(field, Tensor) else field for field in rule)
    return tuple(field if isinstance(field, Tensor) else None for field in rule)


def restored_rule(ctx: Any, tensors: Iterable[Tensor | None]) -> ScoreRule:
    """The inverse of `kept_rule`."""
    return ScoreRule._make(field if tensor is None else tensor for field, tensor in zip(ctx.rule, tensors, strict=True))


def rule_tensors(rule: ScoreRule, batch: int, heads: int) -> tuple[Tensor | None, ...]:
    """key_lengths, q_offsets, alibi_slopes and sinks, as operators take them."""
    return (
        None if rule.key_lengths is None else rule.key_lengths.contiguous(),
        rule.q_offset.contiguous() if isinstance(rule.q_offset, Tensor) else None,
        None if rule.alibi_slopes is None else rule.alibi_slopes.expand(batch, heads),
        None if rule.sinks is None else rule.sinks.contiguous(),
    )


def rule_numbers(rule: ScoreRule) -> tuple[int, int, int, float]:
    """q_offset, window_left, window_right and softcap, as operators take them."""
    left, right = rule.window
    return (
        0 if isinstance(rule.q_offset, Tensor) else rule.q_offset,
        -1 if left is None else left,
        -1 if right is None else right,
        rule.softcap or 0.0,
    )


def softmax_forward(
    scores: Tensor,
    rule: ScoreRule,
    dropout_p: float,
    rng_state: Tensor | None,
    dtype: torch.dtype,
    stats: bool,
) -> tuple[Tensor, ...]:
    """weights, dropped (empty without dropout), lse, max_score and entropy (empty unless `stats`)."""
    return call(
        torch.ops.mha_ext.masked_softmax,
        unit_stride(scores),
        None if rule.attn_mask is None else rule.attn_mask.expand(scores.shape),
        *rule_tensors(rule, *scores.shape[:2]),
        rng_state,
        *rule_numbers(rule),
        dropout_p,
        dtype,
        stats,
    )


def softmax_backward(
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
    grad_scores, grad_bias, sink_rows, slope_rows = call(
        torch.ops.mha_ext.masked_softmax_backward,
        None if grad_weights is None else unit_stride(grad_weights),
        None if grad_dropped is None else unit_stride(grad_dropped),
        None if grad_lse is None else grad_lse.contiguous(),
        weights,
        None if rule.softcap is None or scores is None else unit_stride(scores),
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
        return softmax_forward(scores, rule, dropout_p, rng_state, dtype, return_stats)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        scores, attn_mask, alibi_slopes, sinks, rule, dropout_p, rng_state, dtype, _ = inputs
        rule = rule._replace(attn_mask=attn_mask, alibi_slopes=alibi_slopes, sinks=sinks)
        keep_softmax(ctx, scores, rule, dropout_p, rng_state, dtype, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return *softmax_gradients(ctx, grads, ctx.needs_input_grad[:4]), None, None, None, None, None


def keep_softmax(
    ctx: Any,
    scores: Tensor,
    rule: ScoreRule,
    dropout_p: float,
    rng_state: Tensor | None,
    dtype: torch.dtype,
    output: tuple[Tensor, ...],
) -> None:
    """Keep on ctx what a backward needs."""
    weights, _, lse, max_score, entropy = output
    ctx.dropout_p, ctx.dtype = dropout_p, dtype
    ctx.mark_non_differentiable(max_score, entropy)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(scores, rng_state, weights, lse, *kept_rule(ctx, rule))


def softmax_gradients(ctx: Any, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Of what `keep_softmax` kept: the gradients of scores, attn_mask, alibi_slopes and sinks."""
    grad_weights, grad_dropped, grad_lse = grads[:3]
    scores, rng_state, weights, lse, *rule_tensors = ctx.saved_tensors
    if ctx.dropout_p == 0:
        grad_dropped = None
    rule = restored_rule(ctx, rule_tensors)
    if not backward_in_plain_pytorch():
        _, needs_mask, needs_slopes, needs_sinks = needs
        return softmax_backward(
            grad_weights, grad_dropped, grad_lse, weights, scores, lse, rule, ctx.dropout_p, rng_state,
            scores.dtype, (needs_mask, needs_slopes, needs_sinks),
        )  # fmt: skip

    def outputs() -> tuple[Tensor, ...]:
        with without_autocast(scores):
            result = reference.masked_softmax(
                scores.to(accumulate_dtype_of(scores.dtype)), dropout_p=ctx.dropout_p, rng_state=rng_state,
                return_entropy=False, **rule._asdict(),
            )  # fmt: skip
        return result.weights.to(ctx.dtype), result.dropped.to(ctx.dtype), result.lse

    inputs = (scores, rule.attn_mask, rule.alibi_slopes, rule.sinks)
    return plain_gradients(outputs, (grad_weights, grad_dropped, grad_lse), inputs, needs)


def plain_gradients(
    outputs: Callable[[], tuple[Tensor, ...]],
    grads: tuple[Tensor | None, ...],
    inputs: tuple[Tensor | None, ...],
    needs_input_grad: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of what `outputs` computes from the inputs in plain PyTorch, with a graph of their own where wanted."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        results = outputs()
    given = [(output, grad) for output, grad in zip(results, grads, strict=True) if grad is not None]
    wanted = [x for x, needed in zip(inputs, needs_input_grad, strict=False) if needed and x is not None]
    gradients = iter(
        torch.autograd.grad(
            [output for output, _ in given],
            wanted,
            [grad for _, grad in given],
            create_graph=create_graph,
            allow_unused=True,
        )
        if given and wanted
        else [None] * len(wanted)
    )
    return tuple(next(gradients) if needed else None for _, needed in zip(inputs, needs_input_grad, strict=False))


@graph_leaf
def _apply_masked_softmax(*arguments: Any) -> tuple[Tensor, ...]:
    return _MaskedSoftmax.apply(*arguments)


def masked_softmax(
    scores: Tensor, rule: ScoreRule, dropout_p: float, rng_state: Tensor | None, dtype: torch.dtype
) -> SoftmaxResult:
    """`reference.masked_softmax` by one kernel that reads and writes once; weights in `dtype`."""
    weights, dropped, lse, max_score, entropy = _apply_masked_softmax(
        scores, rule.attn_mask, rule.alibi_slopes, rule.sinks, rule, dropout_p, rng_state, dtype, False
    )
    return SoftmaxResult(weights, dropped if dropout_p > 0 else weights, lse, max_score, entropy)
