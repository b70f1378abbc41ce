"""Gradients of attention on the CPU kernels, on every instruction set that this machine runs."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from accuracy import FLOOR, assert_accurate, plain_attention
from cases import CASES, COMBINED_CASES, RULE_CASES, SHAPES, Case, Shape, leaves, make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_fused_property import FEATURES, SETS_THE_MASK, calls, check, packed_calls
from torch import Tensor

import mha_ext
from mha_ext._extension import extension

if extension is None:
    pytest.skip("no extension, and so no kernels for the CPU", allow_module_level=True)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

# Head dimensions on both sides of a vector and of a micro-kernel; lengths on both sides of a tile and of a run of keys.
WIDTHS = [
    Case(f"d{head_dim}_{head_dim_v}", Shape(1, 2, 1, 9, 70, head_dim, head_dim_v), ("causal_end",))
    for head_dim, head_dim_v in (
        (1, 1), (15, 17), (16, 32), (31, 33), (40, 40), (64, 64), (96, 80), (100, 60), (128, 128), (192, 128),
        (256, 256), (250, 8),
    )
]  # fmt: skip
LENGTHS = [
    Case(f"lq{seqlen_q}_lk{seqlen_kv}", Shape(1, 3, 1, seqlen_q, seqlen_kv, 32, 32), ("causal_end",))
    for seqlen_q, seqlen_kv in ((1, 200), (5, 95), (17, 64), (63, 97), (65, 129), (129, 64), (70, 420), (200, 7))
]
RULES = [
    Case(name, Shape(2, 4, 2, 75, 210, 24, 20), rules)
    for name, rules in (
        ("long_bool", ("bool_mask", "causal_end")), ("long_padding", ("key_padding", "causal")),
        ("long_bias", ("bias_hides", "softcap")), ("long_window", ("window", "alibi", "sinks")),
        ("long_lengths", ("lengths", "alibi_by_batch")), ("long_head_bias", ("bias_by_head", "window_left")),
        ("long_any_bias", ("bias",)),
    )
]  # fmt: skip
GROUPS = [
    Case("decode_of_a_group", Shape(2, 8, 1, 1, 300, 64, 64), ("causal_end", "lengths")),
    Case("group_of_8", Shape(2, 8, 1, 5, 67, 64, 64), ("causal_end", "lengths", "sinks")),
    Case("group_of_8_long", Shape(1, 8, 1, 33, 40, 64, 64), ("causal_end", "bias_by_head")),
    Case("groups_of_3", Shape(1, 6, 2, 3, 130, 40, 24), ("window_left", "alibi")),
]


def identical(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN would not be, and is expected nowhere."""
    return a.shape == b.shape and torch.equal(a, b)


def gradients(inputs: dict[str, Any], **options: Any) -> list[Tensor]:
    """Of everything that can have one, for a loss that weighs each output and logsumexp differently."""
    copies = {name: x.detach() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    wanted = leaves(copies)
    result = mha_ext.attention(**copies, **options, return_lse=True)
    generator = torch.Generator().manual_seed(3)
    grad_output, grad_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (result.output, result.lse))
    grad_lse = grad_lse.masked_fill(result.lse.detach() == -math.inf, 0)  # such a row has no derivative
    return list(torch.autograd.grad((result.output, result.lse), list(wanted.values()), (grad_output, grad_lse)))


@pytest.mark.parametrize("case", [*CASES, *WIDTHS, *LENGTHS, *RULES, *GROUPS], ids=lambda case: case.name)
@every_dtype
def test_gradients_follow_the_definition(target: str, case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    wanted = leaves(inputs)
    result = mha_ext.attention(**inputs, return_lse=True)
    plain_output, plain_lse, _ = plain_attention(**inputs)
    generator = torch.Generator().manual_seed(1)
    grad_output, grad_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (result.output, result.lse))
    grad_lse[result.lse.detach() == -math.inf] = 0  # such a row has no derivative
    exact = oracle.gradients(**inputs, grad_output=grad_output, grad_lse=grad_lse)
    computed = torch.autograd.grad((result.output, result.lse), list(wanted.values()), (grad_output, grad_lse))
    plain = torch.autograd.grad(
        (plain_output, plain_lse), list(wanted.values()), (grad_output, grad_lse.to(plain_lse.dtype))
    )
    for name, ours, yardstick in zip(wanted, computed, plain, strict=True):
        assert ours.dtype == wanted[name].dtype
        assert_accurate(ours, exact[name], yardstick.nan_to_num(0.0), FLOOR[dtype], f"gradient of {name}")


@pytest.mark.parametrize("case", [*RULE_CASES, *COMBINED_CASES], ids=lambda case: case.name)
def test_a_row_that_sees_nothing_has_no_gradient(target: str, case: Case) -> None:
    inputs = make_inputs(case, torch.float32)
    inputs["attn_mask"] = torch.ones(case.shape.scores, dtype=torch.bool)
    inputs["attn_mask"][0, 0, -1] = False
    grads = gradients(inputs)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0, 0, -1].any()


@pytest.mark.parametrize("mask_dtype", ["same", torch.float32], ids=str)
@every_dtype
def test_a_row_of_the_dtypes_minimum_is_uniform(target: str, dtype: torch.dtype, mask_dtype: Any) -> None:
    """Where the logsumexp alone would have lost log n."""
    mask_dtype = dtype if mask_dtype == "same" else mask_dtype
    shape = SHAPES["gqa"]
    inputs = make_inputs(Case("", shape), dtype)
    inputs["query"].zero_()
    mask = torch.zeros(shape.scores[2:], dtype=mask_dtype)
    mask[0] = torch.finfo(mask_dtype).min
    for ours, expected in zip(gradients({**inputs, "attn_mask": mask})[:3], gradients(inputs), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("number", [math.nan, math.inf, "max"])
@every_dtype
@pytest.mark.parametrize("seqlen_q", [1, 9, 70])
@pytest.mark.parametrize("rule", ["lengths", "key_padding", "padding_bias", "padding_by_head", "causal", "softcap"])
def test_hidden_keys_change_nothing(target: str, rule: str, seqlen_q: int, dtype: torch.dtype, number: Any) -> None:
    """Bit for bit, whatever number stands there."""
    shape = Shape(2, 6, 2, seqlen_q, 110, 16, 24)
    rules = {"lengths": (rule,), "key_padding": (rule,), "causal": (rule,), "softcap": (rule, "key_padding")}
    inputs = make_inputs(Case("", shape, rules.get(rule, ())), dtype)
    hidden = torch.zeros((shape.batch, shape.heads_kv, shape.seqlen_kv), dtype=torch.bool)
    if rule == "lengths":
        hidden |= torch.arange(shape.seqlen_kv) >= inputs["key_lengths"][:, None, None]
    elif rule in ("key_padding", "softcap"):
        hidden |= ~inputs["attn_mask"][:, 0, 0, None]
    elif rule == "padding_bias":
        hidden[0, :, 3:5] = hidden[1, :, 0] = True
        inputs["attn_mask"] = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -math.inf)[:, :1, None]
    elif rule == "causal":  # beyond every query
        hidden[:, :, shape.seqlen_q :] = True
    else:
        hidden[:, 0, 2] = hidden[1, 1, 4:] = True
        inputs["attn_mask"] = ~hidden.repeat_interleave(shape.heads // shape.heads_kv, 1)[:, :, None]
    results = []
    for x in (0.5, torch.finfo(dtype).max if number == "max" else number):
        changed = {name: inputs[name].masked_fill(hidden[..., None], x) for name in ("key", "value")}
        results.append(gradients({**inputs, **changed}))
    for grads in results:
        assert not any(grad.masked_select(hidden[..., None]).any() for grad in grads[1:3])
    assert all(identical(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("seqlen_q", [1, 6, 40])
@pytest.mark.parametrize("factor", [30.0, 1e4])
def test_weights_of_large_scores_stay_weights(target: str, factor: float, seqlen_q: int) -> None:
    """The backward computes them again: relative to a shift that must be of the same rounding."""
    query, key, value = (torch.randn(1, 2, length, 16) for length in (seqlen_q, 40, 40))
    inputs = {"query": query * factor, "key": key * factor, "value": value}
    wanted = leaves(inputs)
    grad_output = torch.randn(1, 2, seqlen_q, 16)
    (grad_value,) = torch.autograd.grad(mha_ext.attention(**inputs), wanted["value"], grad_output)
    assert_accurate(grad_value, oracle.gradients(**inputs, grad_output=grad_output)["value"], None, 1e-5, "value")


def test_a_row_of_nan_leaves_hidden_keys_alone(target: str) -> None:
    """NaN in the gradients where plain PyTorch has it, and nowhere else."""
    inputs = make_inputs(Case("", Shape(1, 1, 1, 40, 40, 16, 16)), torch.float32)
    inputs["attn_mask"] = torch.zeros(40, 40)
    inputs["attn_mask"][2, 0] = math.nan
    gradients = []
    for backend in ("cpu", "reference"):
        wanted = leaves({name: x.detach().clone() for name, x in inputs.items()})
        output = mha_ext.attention(**wanted, is_causal=True, backend=backend)
        gradients.append(torch.autograd.grad(output.sum(), list(wanted.values())))
    for ours, expected in zip(*gradients, strict=True):
        assert torch.equal(ours.isnan(), expected.isnan())


@pytest.mark.parametrize("case", COMBINED_CASES[:2], ids=lambda case: case.name)
@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
@every_dtype
def test_dropout_with_everything_else(
    target: str, monkeypatch: pytest.MonkeyPatch, dropout_p: float, case: Case, dtype: torch.dtype
) -> None:
    inputs = make_inputs(case, dtype)
    wanted = leaves(inputs)
    rng_state = torch.tensor([123456789012345, 987654321])
    monkeypatch.setattr(mha_ext.reference, "draw_rng_state", lambda device: rng_state)
    output = mha_ext.attention(**inputs, dropout_p=dropout_p)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    computed = torch.autograd.grad(output, list(wanted.values()), grad)
    exact = oracle.gradients(**inputs, grad_output=grad, dropout_p=dropout_p, rng_state=rng_state)
    floor = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    largest = max(np.abs(x).max() for x in exact.values())
    for name, ours in zip(wanted, computed, strict=True):
        error = np.abs(oracle.to_array(ours) - exact[name]).max()
        assert error <= floor * largest, f"gradient of {name}: {error:.3g}"


# --- layouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [24, 64])
@every_dtype
def test_strides_change_no_bit(target: str, dtype: torch.dtype, head_dim: int) -> None:
    """Rows outside of heads, gaps, odd offsets, expanded axes, against contiguous tensors."""
    shape = Shape(2, 4, 2, 33, 100, head_dim, head_dim)
    inputs = make_inputs(Case("", shape, ("causal_end", "bias_by_head")), dtype)
    inputs["key"] = inputs["key"][:1].expand_as(inputs["key"])
    expected = gradients({name: x.contiguous() if isinstance(x, Tensor) else x for name, x in inputs.items()})

    def rows_outside(x: Tensor) -> Tensor:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)

    def unaligned(x: Tensor) -> Tensor:
        memory = x.new_full((*x.shape[:-1], x.shape[-1] + 3), math.nan)
        memory[..., 1:-2] = x
        return memory[..., 1:-2]

    def every_second(x: Tensor) -> Tensor:
        memory = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
        memory[..., ::2] = x
        return memory[..., ::2]

    for layout in (lambda x: x, rows_outside, unaligned, every_second):
        changed = {name: layout(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        assert all(identical(a, b) for a, b in zip(gradients(changed), expected, strict=True))


@every_dtype
def test_grad_outputs_of_any_layout(target: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("", Shape(2, 4, 2, 5, 6, 8, 8)), dtype)
    wanted = leaves(inputs)
    output = mha_ext.attention(**inputs)
    grad = torch.randn(output.shape).to(dtype)
    layouts = (grad, grad.mT.contiguous().mT, torch.stack((grad, torch.full_like(grad, math.nan)), -1)[..., 0])
    results = [torch.autograd.grad(output, list(wanted.values()), g, retain_graph=True) for g in layouts]
    assert all(identical(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    ones = torch.autograd.grad(output.sum(), list(wanted.values()), retain_graph=True)  # expanded from one element
    expected = torch.autograd.grad(output, list(wanted.values()), torch.ones_like(output))
    assert all(identical(a, b) for a, b in zip(ones, expected, strict=True))


def test_gradients_lie_in_memory_as_inputs_do(target: str) -> None:
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(mha_ext.attention(*[x.transpose(1, 2)] * 3).sum(), x)
    assert grad.is_contiguous()


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_kv"),
    [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (0, 0, 0, 0), (2, 2, 3, 0), (2, 2, 0, 0)],
)
@pytest.mark.parametrize("rule", ["plain", "causal_end", "bias", "bias_by_head", "alibi", "sinks"])
@every_dtype
def test_empty_axes(
    target: str, batch: int, heads: int, seqlen_q: int, seqlen_kv: int, rule: str, dtype: torch.dtype
) -> None:
    shape = Shape(batch, heads, heads, seqlen_q, seqlen_kv, 8, 16)
    inputs = make_inputs(Case("", shape, () if rule == "plain" else (rule,)), dtype)
    wanted = leaves(inputs)
    grads = torch.autograd.grad(mha_ext.attention(**inputs).sum(), list(wanted.values()))
    assert all(not grad.any() and grad.shape == x.shape for grad, x in zip(grads, wanted.values(), strict=True))


def test_sinks_of_rows_without_a_key(target: str) -> None:
    """The logsumexp is the sink, and so is the gradient."""
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 0, 8)
    sinks = torch.randn(3, requires_grad=True)
    lse = mha_ext.attention(query, key, key, sinks=sinks, return_lse=True).lse
    (grad,) = torch.autograd.grad(lse.sum(), sinks)
    assert identical(grad, torch.full((3,), 10.0))


@pytest.mark.parametrize(
    "mask_shape",
    [(), (11,), (9, 1), (9, 11), (1, 11), (6, 1, 1), (6, 9, 11), (2, 1, 1, 11), (2, 6, 9, 1), (2, 1, 9, 11),
     (2, 6, 1, 11), (1, 6, 1, 11)],
)  # fmt: skip
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_gradient_of_a_mask_is_summed_to_its_shape(
    target: str, mask_shape: tuple[int, ...], mask_dtype: torch.dtype
) -> None:
    """Everything equals what the mask written out gets."""
    inputs = make_inputs(Case("", SHAPES["gqa"]), torch.float32)
    mask = torch.randn(mask_shape).to(mask_dtype)
    ours = gradients({**inputs, "attn_mask": mask})
    assert ours[3].dtype == mask_dtype
    assert ours[3].shape == mask_shape
    written_out = mask.expand(SHAPES["gqa"].scores).float().contiguous()
    expected = gradients({**inputs, "attn_mask": written_out})
    expected[3] = expected[3].sum_to_size(mask_shape)
    for a, b in zip(ours, expected, strict=True):
        tolerance = 1e-5 if a.dtype == torch.float32 else float(torch.finfo(mask_dtype).eps)
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)])
@every_dtype
def test_packed_sequences(target: str, heads: tuple[int, int], is_causal: bool, dtype: torch.dtype) -> None:
    """Of rows that no sequence owns the gradient is zero."""
    cu_q = torch.tensor([0, 1, 1, 71, 75, 76], dtype=torch.int32)
    cu_k = torch.tensor([0, 130, 140, 440, 440, 450], dtype=torch.int32)
    tensors = [
        torch.randn(n, h, d).to(dtype) for n, h, d in ((76, heads[0], 24), (450, heads[1], 24), (450, heads[1], 20))
    ]
    slopes, sinks = torch.rand(5, heads[0]), torch.randn(heads[0])
    results = []
    for backend in ("cpu", "reference"):
        leaf = [x.clone().requires_grad_() for x in (*tensors, slopes, sinks)]
        result = mha_ext.attention_varlen(
            *leaf[:3], cu_q, cu_k, is_causal=is_causal, q_offset="end", alibi_slopes=leaf[3], sinks=leaf[4],
            backend=backend, return_lse=True,
        )  # fmt: skip
        results.append(torch.autograd.grad(result.output.square().sum() + result.lse.sum(), leaf))
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
    assert not results[0][1][130:140].any()  # keys of a sequence without queries


# --- threads, and what surrounds the kernels -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rules"),
    [
        (Shape(2, 8, 2, 150, 150, 64, 64), ("causal_end",)),
        (Shape(1, 1, 1, 130, 900, 40, 32), ("causal_end", "alibi", "sinks")),
        (Shape(5, 4, 2, 70, 200, 16, 16), ("bias_hides",)),
        (Shape(3, 4, 4, 70, 90, 16, 16), ("bias_by_head", "lengths")),
    ],
    ids=str,
)
@every_dtype
def test_threads_and_runs_change_no_bit(
    target: str, threads: Callable[[int], None], shape: Shape, rules: tuple[str, ...], dtype: torch.dtype
) -> None:
    inputs = make_inputs(Case("", shape, rules), dtype)
    results = []
    threads(1)
    wanted = leaves(inputs)
    output = mha_ext.attention(**inputs)
    grad = torch.randn(output.shape).to(dtype)
    for count in (1, 2, 2, 3):
        threads(count)
        results.append(torch.autograd.grad(output, list(wanted.values()), grad, retain_graph=True))
    assert all(identical(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_the_backward_can_be_differentiated(target: str) -> None:
    """By plain PyTorch, which takes over."""
    inputs = make_inputs(Case("", Shape(1, 2, 1, 5, 6, 8, 8), ("bias", "softcap")), torch.float32)
    results = []
    for backend in ("cpu", "reference"):
        wanted = leaves({name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in inputs.items()})
        output = mha_ext.attention(**{**inputs, **wanted}, backend=backend)
        first = torch.autograd.grad(output.square().sum(), list(wanted.values()), create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in first), list(wanted.values())))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("which", range(6), ids=["query", "key", "value", "attn_mask", "alibi_slopes", "sinks"])
def test_each_input_alone_may_ask_for_a_gradient(target: str, which: int) -> None:
    """And gets the one that it gets when all ask."""
    case = Case("", Shape(2, 2, 1, 9, 12, 8, 8), ("bias_by_head", "alibi", "sinks"))
    inputs = make_inputs(case, torch.float32)
    every = leaves({name: x.clone() for name, x in inputs.items()})
    all_grads = torch.autograd.grad(mha_ext.attention(**every).square().sum(), list(every.values()))
    name = list(every)[which]
    one = {**inputs, name: inputs[name].clone().requires_grad_()}
    (grad,) = torch.autograd.grad(mha_ext.attention(**one).square().sum(), one[name])
    assert identical(grad, all_grads[which])


@every_dtype
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_a_module_trains(target: str, dtype: torch.dtype, num_kv_heads: int) -> None:
    """Its packed projection is read and differentiated in place."""
    mha = mha_ext.MultiHeadAttention(32, 4, num_kv_heads=num_kv_heads, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    x = torch.randn(2, 20, 32, generator=generator).to(dtype).requires_grad_()
    wanted, lengths = (x, *mha.parameters()), torch.tensor([20, 13])
    results = []
    for backend in ("cpu", "reference"):
        output = mha(x, is_causal=True, key_lengths=lengths, backend=backend)
        results.append((output, *torch.autograd.grad(output.square().sum(), wanted)))
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance * float(expected.detach().abs().max()))


# --- any call ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_any_features_together(target: str, threads: Callable[[int], None], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(list(FEATURES)), max_size=6, unique=True))
    masks = [name for name in chosen if name in SETS_THE_MASK]
    features = tuple(name for name in chosen if name not in masks[1:])
    threads(data.draw(st.integers(1, 2)))
    check(data.draw(calls(features, data.draw(st.sampled_from(DTYPES)))), "cpu")


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data())
def test_any_features_of_packed_sequences(target: str, threads: Callable[[int], None], data: st.DataObject) -> None:
    names = [name for name in FEATURES if name not in (*SETS_THE_MASK, "lengths")]
    features = tuple(data.draw(st.lists(st.sampled_from(names), max_size=4, unique=True)))
    threads(data.draw(st.integers(1, 2)))
    check(data.draw(packed_calls(features, data.draw(st.sampled_from(DTYPES)))), "cpu", packed=True)


# --- the operator -----------------------------------------------------------------------------------------


def operator_arguments(packed: bool, extras: bool) -> tuple[Any, ...]:
    """Of a forward by the operator as well, with everything that has a gradient or with nothing of it."""
    heads, heads_kv, length, head_dim = 4, 2, 5, 8
    memory = torch.randn(2, length, heads + 2 * heads_kv, head_dim).transpose(1, 2)
    query, key, value = memory.split((heads, heads_kv, heads_kv), 1)
    mask = torch.randn(1, heads, 1, length) if extras else None
    slopes, sinks = (torch.randn(2, heads), torch.randn(heads)) if extras else (None, None)
    rule = (mask, None, None, slopes, sinks, None, None, None, 0, -1, 0, 0.0, 0.0, 0.5, False)
    output, lse, row_stats, _, _ = torch.ops.mha_ext.attention_forward_cpu(query, key, value, *rule, True, False)
    grad_lse = torch.randn_like(lse) if extras else None
    grads = (torch.randn_like(output), grad_lse)
    return *grads, query, key, value, output, lse, row_stats, *rule, packed, *itertools.repeat(extras, 3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_the_operator_keeps_its_promises(packed: bool, extras: bool) -> None:
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = operator_arguments(packed, extras)
    torch.library.opcheck(torch.ops.mha_ext.attention_backward_cpu.default, arguments, test_utils=utilities)


@pytest.mark.parametrize(
    ("index", "change", "error", "message"),
    [
        (0, lambda x: x[:, :, :3], ValueError, "grad_output: expected shape"),
        (0, lambda x: x.double(), TypeError, "grad_output: expected dtype Float, got Double"),
        (1, lambda x: torch.zeros(2, 4, 4), ValueError, "grad_lse: expected shape"),
        (5, lambda x: x.mT.contiguous().mT, ValueError, "output: expected a last axis of stride 1"),
        (7, lambda x: torch.zeros(0), ValueError, "row_stats: expected shape"),
        (24, lambda x: True, ValueError, "attn_mask: expected a floating tensor when mask_grad is true, got None"),
        (25, lambda x: True, ValueError, "alibi_slopes: expected a tensor when slopes_grad is true"),
        (26, lambda x: True, ValueError, "sinks: expected a tensor when sinks_grad is true"),
    ],
)  # fmt: skip
def test_the_operator_checks_its_arguments(
    index: int, change: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    arguments = list(operator_arguments(False, False))
    arguments[index] = change(arguments[index])
    with pytest.raises(error, match=message):
        torch.ops.mha_ext.attention_backward_cpu(*arguments)
