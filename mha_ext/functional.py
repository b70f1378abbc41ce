"""`attention` and its parts as functions."""

from typing import Any

import torch
from torch import Tensor

from . import backends, fused, nested, ops, reference, unfused
from ._extension import extension
from .autocast import autocast_inputs, without_autocast
from .call import AttentionCall, by_heads, from_heads, make_call, make_varlen_call
from .checks import FLOATING, check_alike, check_bool, check_heads, check_int, check_real, check_shape, check_tensor
from .reference import AttentionResult, SoftmaxResult, accumulate_dtype_of, default_scale
from .score_rule import make_score_rule

__all__ = [
    "attention",
    "attention_output",
    "attention_scores",
    "attention_varlen",
    "masked_softmax",
    "packed_attention",
    "qkv_split",
]

# Elements of a packed projection on the CPU up to which copying its gradients together is cheaper than an operator that
# writes them in place: measured with fp32, equal at 2^17.
PACKED_GRADIENT = 2**16

_direct = None if extension is None else extension.attention_direct


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | str | Tensor = 0,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    return_stats: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | AttentionResult:
    r"""Scaled dot-product attention.

    The positional part is `torch.nn.functional.scaled_dot_product_attention`'s, so this can stand in its
    place::

        score[i, j] = softcap(scale * q_i . k_j) + attn_mask[i, j] - slope_h * |p_i - j|
        p_i         = i + q_offset
        weight      = softmax of the scores over the keys j that query i sees
        output      = dropout(weight) @ value

    Parameters
    ----------
    query : Tensor (B, Hq, Lq, D)
        fp16, bf16, fp32 or fp64; any strides. Also (B, L, D) and (L, D), which have one head; of more than
        four axes all but the last three are batch. Jagged nested tensors (B, Hq, j, D) and (B, j, D), then of
        key and value too, go the way of `attention_varlen`.
    key : Tensor (B, Hkv, Lk, D)
    value : Tensor (B, Hkv, Lk, Dv)
        Hq is a multiple of Hkv: query head h reads key head h // (Hq / Hkv), which is never repeated in
        memory. Batches broadcast: one of size 1, or none beside a tensor of four axes, counts for all.
    attn_mask : Tensor, optional
        Broadcastable to (B, Hq, Lq, Lk), never expanded in memory. bool: True takes part. Floating: added to
        the scores, may have a gradient; -inf hides. A padding mask (B, Lk) goes in as
        `mask[:, None, None, :]`.
    dropout_p : float
        Probability of dropping a weight, applied whenever it is not 0 (pass 0 in evaluation). The draw
        depends on the state of torch's generator and on (b, h, i, j) alone, not on the backend.
    is_causal : bool
        Keep j <= p_i. `attn_mask` may be given as well: a key is seen where both let it.
    scale : float, optional
        1 / sqrt(D) by default.
    enable_gqa : bool
        Accepted so that calls of torch's function run unchanged; Hq != Hkv needs no permission here.
    window : (left, right), optional
        Keep p_i - left <= j <= p_i + right; None on a side: unlimited.
    q_offset : int, "end" or int tensor (B,)
        Where the first query stands among the keys. "end" means Lk - Lq: the last query sees the last key, as
        with a cache. For Lq = 2, Lk = 5 and is_causal::

            q_offset=0      1 0 0 0 0        q_offset="end"   1 1 1 1 0
                            1 1 0 0 0                         1 1 1 1 1

        and for Lq = 5, Lk = 2, where the first rows of "end" see nothing::

            q_offset=0      1 0              q_offset="end"   0 0
                            1 1                               0 0
                            1 1                               0 0
                            1 1                               1 0
                            1 1                               1 1
    key_lengths : int tensor (B,), optional
        Keep j < length. "end" above still means Lk - Lq: for caches of different lengths pass
        `q_offset=key_lengths - Lq`.
    alibi_slopes : Tensor (Hq,) or (B, Hq), optional
        Slopes of the distance penalty (Press et al., 2022); may have a gradient.
    softcap : float, optional
        c > 0: scores pass through c * tanh(score / c) before anything is added.
    sinks : Tensor (Hq,), optional
        One more score per head that joins the denominator and no output; may have a gradient.
    return_lse, return_weights, return_stats : bool
        Also return the logsumexp (natural, sinks included), the weights (before dropout), or per row the
        largest visible score and the entropy of the weights in nats. Statistics carry no gradient.
    deterministic : bool, optional
        Ask for bitwise repeatable gradients; None follows `torch.use_deterministic_algorithms`. Every present
        backend is deterministic.
    backend : str, optional
        A name from `mha_ext.backends.BACKENDS`; by default the first that takes the call.

    Returns
    -------
    Tensor (B, Hq, Lq, Dv), or AttentionResult(output, lse, weights, max_score, entropy) when more was
    asked for, None where it was not. logsumexp and
    statistics are (B, Hq, Lq) in fp32 (fp64 for fp64); weights (B, Hq, Lq, Lk) in query's dtype. A query that
    sees no key gets output and weights 0, logsumexp -inf (with a sink: the sink) and gradients 0. What
    `key_lengths`, or a mask broadcast over the queries, hides from all query heads of a key head is never used:
    NaN there changes nothing. Half
    precision accumulates in fp32; fp32 follows `torch.get_float32_matmul_precision()` on a GPU. Under
    autocast, inputs are cast to its dtype.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came, before anything is computed.

    Examples
    --------
    >>> import torch, mha_ext
    >>> q, k, v = torch.randn(3, 2, 12, 128, 64).unbind()
    >>> mha_ext.attention(q, k, v, is_causal=True).shape
    torch.Size([2, 12, 128, 64])
    >>> mha_ext.attention(q, k, v, return_weights=True).weights.shape
    torch.Size([2, 12, 128, 128])

    Source: Vaswani et al., Attention is all you need, 2017.
    """
    # Without an operator, whose dispatch takes longer than a small call's arithmetic: csrc/api/cpu/direct.cpp.
    if _direct is not None and not torch.compiler.is_compiling() and backends.undecided(backend):
        output: Tensor | None = _direct(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, q_offset, key_lengths,
            alibi_slopes, softcap, sinks, return_lse, return_weights, return_stats, deterministic,
        )  # fmt: skip
        if output is not None:
            return output
    call = make_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window=window,
        q_offset=q_offset, key_lengths=key_lengths, alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks,
        return_lse=return_lse, return_weights=return_weights, return_stats=return_stats,
        deterministic=deterministic,
    )  # fmt: skip
    return computed(call, backends.choose(call, backend))


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | str | Tensor = 0,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | AttentionResult:
    """`attention` of B sequences of different lengths, packed one behind the other, without padding.

    Parameters
    ----------
    query : Tensor (total_q, Hq, D)
        All sequences' queries; any strides.
    key : Tensor (total_k, Hkv, D)
    value : Tensor (total_k, Hkv, Dv)
    cu_seqlens_q, cu_seqlens_k : int tensor (B + 1,)
        Sequence b owns the rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1: the running sum of the lengths, from 0 to the
        total. A length may be 0. int32 is taken as it is. On a GPU the values are not checked (that would wait for
        it): no kernel reads or writes outside the tensors, and rows that no sequence owns get output and gradients 0.
    q_offset : int, "end" or int tensor (B,)
        As in `attention`, within each sequence: "end" is its length of keys less its length of queries.
    alibi_slopes : Tensor (Hq,) or (B, Hq), optional
    dropout_p, is_causal, scale, window, softcap, sinks, return_lse, return_stats, deterministic, backend
        As in `attention`. The longest length need not be given. (`torch.compile` sees one graph on the fused kernels;
        plain PyTorch pads to the longest sequence, whose length a graph does not know.)

    Returns
    -------
    Tensor (total_q, Hq, Dv), or AttentionResult when more was asked for; what it says of a row is (total_q, Hq).

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.

    Examples
    --------
    >>> import torch, mha_ext
    >>> q, k, v = torch.randn(3, 100, 8, 64).unbind()
    >>> cu_seqlens = torch.tensor([0, 30, 30, 100], dtype=torch.int32)
    >>> mha_ext.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, is_causal=True).shape
    torch.Size([100, 8, 64])
    """
    call = make_varlen_call(
        query, key, value, cu_seqlens_q, cu_seqlens_k, dropout_p, is_causal, scale, window=window, q_offset=q_offset,
        alibi_slopes=alibi_slopes, softcap=softcap, sinks=sinks, return_lse=return_lse, return_stats=return_stats,
        deterministic=deterministic,
    )  # fmt: skip
    return computed(call, backends.choose(call, backend))


def packed_attention(
    packed: Tensor, num_heads: int, num_kv_heads: int, *, backend: str | None = None, **arguments: Any
) -> Tensor | AttentionResult:
    """`attention` of the parts of a packed projection (B, L, (Hq + 2 Hkv) D), with its other arguments.

    The columns are those of `qkv_split`. The fused kernels read the parts where they lie, and write their gradients
    into one, unless that would take longer than to copy them there.
    """
    if _put_together_by_autograd(packed, backend):
        return attention(*fused.unpacked(packed, num_heads, num_kv_heads), backend=backend, **arguments)
    (packed,) = autocast_inputs(packed)
    call = make_call(*fused.unpacked(packed, num_heads, num_kv_heads), **arguments)
    name = backends.choose(call, backend)
    if name in ("fused", "cpu"):
        settings = (num_heads, num_kv_heads, call.rule, call.dropout_p, call.scale, call.return_stats)
        return _present(call, fused.attention_packed(packed, *settings, on_cpu=name == "cpu"))
    return computed(call, name)


def computed(call: AttentionCall, backend: str) -> Tensor | AttentionResult:
    """What was asked for, by the backend that takes the call."""
    return _present(call, _compute(call, backend))


def _put_together_by_autograd(packed: Tensor, backend: str | None) -> bool:
    """Whether the gradients of the parts, if there are any, may as well be put together by autograd."""
    if torch.compiler.is_compiling():
        return False
    if not fused.wants_grad(packed):
        return True
    few = packed.is_cpu and packed.numel() <= PACKED_GRADIENT
    return few and _direct is not None and backends.undecided(backend)


def _compute(call: AttentionCall, backend: str) -> AttentionResult:
    settings = (call.rule, call.dropout_p, call.scale, call.return_stats)
    if backend in ("fused", "cpu"):
        return fused.attention(call.query, call.key, call.value, *settings, call.sequences, on_cpu=backend == "cpu")
    with without_autocast(call.query):
        if backend == "unfused":
            return unfused.attention(call.query, call.key, call.value, *settings)
        return _plain(call)


def _plain(call: AttentionCall) -> AttentionResult:
    """By `reference`."""
    arguments: dict[str, Any] = {
        "dropout_p": call.dropout_p, "scale": call.scale, "return_entropy": call.return_stats, **call.rule._asdict()
    }  # fmt: skip
    if call.sequences is None:
        return reference.attention(call.query, call.key, call.value, **arguments)
    del arguments["attn_mask"], arguments["key_lengths"]
    query, key, value = map(from_heads, (call.query, call.key, call.value))
    result = reference.attention_varlen(query, key, value, *call.sequences, **arguments)
    return AttentionResult._make(None if x is None else by_heads(x) for x in result)


def _present(call: AttentionCall, result: AttentionResult) -> Tensor | AttentionResult:
    """What was asked for, with the axes that query came with."""

    def shaped(x: Tensor | None, wanted: bool) -> Tensor | None:
        if not wanted or x is None:
            return None
        if call.jagged is not None:
            return nested.jagged(from_heads(x), *call.jagged)
        if call.sequences is not None:
            return from_heads(x)
        return x if len(call.leading) == 2 else x.reshape(*call.leading, *x.shape[2:])

    output = shaped(result.output, True)
    assert output is not None
    if not (call.return_lse or call.return_weights or call.return_stats):
        return output
    return AttentionResult(
        output,
        shaped(result.lse, call.return_lse),
        shaped(None if result.weights is None else result.weights.contiguous(), call.return_weights),  # rows are padded
        shaped(result.max_score, call.return_stats),
        shaped(result.entropy, call.return_stats),
    )


def qkv_split(
    packed: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the bias to a packed QKV projection and cut it into heads, in one pass over memory.

    Parameters
    ----------
    packed : Tensor (B, L, (Hq + 2 Hkv) D)
        Columns are all query heads, then all key heads, then all value heads, D each.
    bias : Tensor ((Hq + 2 Hkv) D), optional
        Of packed's dtype.
    num_heads, num_kv_heads : int
        Hq, and Hkv (Hq by default).

    Returns
    -------
    query (B, Hq, L, D), key and value (B, Hkv, L, D), contiguous.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    check_tensor("packed", packed, dims=(3,))
    if isinstance(bias, Tensor):
        packed, bias = autocast_inputs(packed, bias)
    else:
        (packed,) = autocast_inputs(packed)
    heads = check_int("num_heads", num_heads, low=1)
    heads_kv = heads if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads, low=1)
    if heads % heads_kv:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {heads}, got {heads_kv}")
    if packed.shape[-1] % (heads + 2 * heads_kv):
        raise ValueError(
            f"packed: expected a last dimension that is a multiple of num_heads + 2 * num_kv_heads = "
            f"{heads + 2 * heads_kv}, got shape {tuple(packed.shape)}"
        )
    if bias is not None:
        check_tensor("bias", bias)
        check_shape("bias", bias, packed.shape[-1:], "((Hq + 2 Hkv) D,)")
        check_alike("bias", bias, "packed", packed)
    implementation = ops if backends.parts_use_kernels(packed) else reference
    return implementation.qkv_split(packed, bias, heads, heads_kv)


def attention_scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """scale * query @ key^T, in the dtype that a softmax should see.

    Parameters
    ----------
    query : Tensor (B, Hq, Lq, D)
    key : Tensor (B, Hkv, Lk, D)
        Hq is a multiple of Hkv; query head h reads key head h // (Hq / Hkv).
    scale : float, optional
        1 / sqrt(D) by default.

    Returns
    -------
    Tensor (B, Hq, Lq, Lk) in fp32 (fp64 for fp64), so that half inputs do not overflow.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    check_tensor("query", query, dims=(4,))
    check_tensor("key", key, dims=(4,))
    query, key = autocast_inputs(query, key)
    check_alike("key", key, "query", query)
    batch, heads, _, head_dim = query.shape
    check_shape("key", key, (batch, key.shape[1], key.shape[2], head_dim), "(B, Hkv, Lk, D)")
    check_heads(heads, key.shape[1])
    scale = default_scale(head_dim) if scale is None else check_real("scale", scale)
    if backends.parts_use_kernels(query):
        return ops.attention_scores(query, key, scale)
    compute = accumulate_dtype_of(query.dtype)
    with without_autocast(query):
        return reference.attention_scores(query.to(compute), key.to(compute), scale)


def attention_output(weights: Tensor, value: Tensor) -> Tensor:
    """weights @ value, accumulated in fp32 (fp64).

    Parameters
    ----------
    weights : Tensor (B, Hq, Lq, Lk)
    value : Tensor (B, Hkv, Lk, Dv)
        Of weights' dtype. Hq is a multiple of Hkv; query head h reads value head h // (Hq / Hkv).

    Returns
    -------
    Tensor (B, Hq, Lq, Dv) in value's dtype.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    check_tensor("weights", weights, dims=(4,))
    check_tensor("value", value, dims=(4,))
    weights, value = autocast_inputs(weights, value)
    check_alike("value", value, "weights", weights)
    batch, heads, _, seqlen_kv = weights.shape
    check_shape("value", value, (batch, value.shape[1], seqlen_kv, value.shape[3]), "(B, Hkv, Lk, Dv)")
    check_heads(heads, value.shape[1], "weights", "value")
    if backends.parts_use_kernels(weights):
        return ops.attention_output(weights, value)
    compute = accumulate_dtype_of(value.dtype)
    with without_autocast(weights):
        return reference.attention_output(weights.to(compute), value.to(compute)).to(value.dtype)


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    key_lengths: Tensor | None,
) -> Tensor:
    """The weights of `attention` (B, Hq, Lq, Lk) after dropout, of query and key whose shapes and dtypes fit."""
    if backends.being_explained():  # as the call that this is a part of
        call = make_call(query, key, key, attn_mask, is_causal=is_causal, key_lengths=key_lengths, return_weights=True)
        backends.choose(call)
    if dropout_p > 0 or backends.parts_use_kernels(query):
        scores = attention_scores(query, key)
        weights = masked_softmax(scores, attn_mask, dropout_p, is_causal, key_lengths=key_lengths, dtype=query.dtype)
        assert isinstance(weights, Tensor)
        return weights
    batch, heads, seqlen_q, _ = query.shape
    rule = make_score_rule(
        (batch, heads, seqlen_q, key.shape[2]), query, attn_mask, is_causal, None, 0, key_lengths, None, None, None
    )
    compute = accumulate_dtype_of(query.dtype)
    with without_autocast(query):
        scores = reference.attention_scores(query.to(compute), key.to(compute))
        weights = reference.visible_softmax(scores, rule.attn_mask, window=rule.window, key_lengths=rule.key_lengths)
    return weights.to(query.dtype)


def masked_softmax(
    scores: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | str | Tensor = 0,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax over the keys that each query sees, by the rule of `attention`, with dropout.

    Parameters
    ----------
    scores : Tensor (B, H, Lq, Lk)
        Already scaled. What is hidden may be NaN.
    dtype : torch.dtype, optional
        Of the weights: scores' dtype by default. The softmax itself is computed in fp32 (fp64 for fp64).
    return_lse : bool
        Also return the logsumexp (B, H, Lq).
    attn_mask, dropout_p, is_causal, window, q_offset, key_lengths, alibi_slopes, softcap, sinks
        As in `attention`.

    Returns
    -------
    weights (B, H, Lq, Lk) after dropout, or (weights, logsumexp). A row that sees no key is 0, its logsumexp
    -inf (with a sink: the sink).

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    """
    check_tensor("scores", scores, dims=(4,))
    dtype = scores.dtype if dtype is None else dtype
    compute = accumulate_dtype_of(scores.dtype)
    if dtype not in FLOATING or (dtype != scores.dtype and accumulate_dtype_of(dtype) != compute):
        raise TypeError(f"dtype: expected {scores.dtype} or another floating dtype of its precision, got {dtype}")
    dropout_p = check_real("dropout_p", dropout_p, low=0, high=1)
    check_bool("return_lse", return_lse)
    batch, heads, seqlen_q, seqlen_kv = scores.shape
    rule = make_score_rule(
        (batch, heads, seqlen_q, seqlen_kv), scores, attn_mask, is_causal, window, q_offset, key_lengths,
        alibi_slopes, softcap, sinks,
    )  # fmt: skip
    rng_state = reference.draw_rng_state(scores.device) if dropout_p > 0 else None
    result: SoftmaxResult
    if backends.parts_use_kernels(scores):
        result = ops.masked_softmax(scores, rule, dropout_p, rng_state, dtype)
    else:
        arguments: dict[str, Any] = rule._asdict()
        result = reference.masked_softmax(
            scores.to(compute), dropout_p=dropout_p, rng_state=rng_state, return_entropy=False, **arguments
        )  # fmt: skip
    weights = result.dropped.to(dtype).contiguous()
    return (weights, result.lse) if return_lse else weights
