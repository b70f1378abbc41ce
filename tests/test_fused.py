"""Fused attention means what DESIGN says: values and gradients by the definition, through the public face."""

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from accuracy import FLOOR, assert_accurate, plain_attention
from cases import CASES, COMBINED_CASES, RULE_CASES, SHAPES, Case, Shape, leaves, make_inputs
from torch import Tensor

import mha_ext

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

# Head dimensions on both sides of every tile width, lengths on both sides of a tile.
WIDTHS = [
    Case(f"d{head_dim}_{head_dim_v}", Shape(1, 2, 1, 9, 70, head_dim, head_dim_v), ("causal_end",))
    for head_dim, head_dim_v in (
        (1, 1), (17, 17), (16, 32), (32, 16), (40, 40), (64, 64), (80, 80), (96, 96), (100, 60), (128, 128),
        (160, 160), (192, 128), (128, 192), (256, 256), (250, 8),
    )
]  # fmt: skip
LENGTHS = [
    Case(f"lq{seqlen_q}_lk{seqlen_kv}", Shape(1, 3, 1, seqlen_q, seqlen_kv, 32, 32), ("causal_end",))
    for seqlen_q, seqlen_kv in ((1, 200), (7, 64), (63, 65), (64, 63), (65, 129), (129, 64), (129, 200), (200, 7))
]
GROUPS = [
    Case("public_report_31", Shape(1, 2, 2, 12, 12, 128, 128)),  # shorter than every tile
    Case("group_of_8", Shape(2, 8, 1, 5, 67, 64, 64), ("causal_end", "lengths")),
    Case("group_of_8_long", Shape(1, 8, 1, 33, 40, 64, 64), ("causal_end",)),
    Case("groups_of_3", Shape(1, 6, 2, 3, 130, 40, 24), ("window_left",)),
]
ALL_CASES = [*CASES, *WIDTHS, *LENGTHS, *GROUPS]


def identical(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN would not be, and is expected nowhere."""
    return a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
@every_dtype
def test_values_and_gradients_follow_the_definition(fused_anywhere: str, case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype, fused_anywhere)
    wanted = leaves(inputs)
    result = mha_ext.attention(**inputs, return_lse=True, return_stats=True)
    expected = oracle.attention(**inputs)
    plain_output, plain_lse, _ = plain_attention(**inputs)
    assert result.output.dtype == dtype
    assert result.weights is None
    assert_accurate(result.output, expected.output, plain_output, FLOOR[dtype], "output")
    for name in ("lse", "max_score", "entropy"):
        statistic = getattr(result, name)
        assert statistic.dtype == torch.float32
        finite = getattr(expected, name)[np.isfinite(getattr(expected, name))]
        scale = max(1.0, np.abs(finite).max(initial=0.0))
        assert_accurate(statistic / scale, getattr(expected, name) / scale, None, 4e-6, name)

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
        assert ours.shape == wanted[name].shape
        assert_accurate(ours, exact[name], yardstick.nan_to_num(0.0), FLOOR[dtype], f"gradient of {name}")


@pytest.mark.parametrize("case", [*RULE_CASES, *COMBINED_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_that_sees_nothing_is_exactly_zero(fused_anywhere: str, case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype, fused_anywhere)
    inputs["attn_mask"] = torch.ones(case.shape.scores, dtype=torch.bool, device=fused_anywhere)
    inputs["attn_mask"][0, 0, -1] = False
    wanted = leaves(inputs)
    result = mha_ext.attention(**inputs, return_lse=True, return_stats=True)
    assert not result.output[0, 0, -1].any()
    assert result.max_score[0, 0, -1] == -math.inf
    assert result.entropy[0, 0, -1] == 0
    assert result.lse[0, 0, -1] == (inputs["sinks"][0] if "sinks" in inputs else -math.inf)
    grads = torch.autograd.grad(result.output.sum(), list(wanted.values()))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0, 0, -1].any()


@pytest.mark.parametrize("mask_dtype", ["same", torch.float32], ids=str)
@every_dtype
def test_a_row_of_the_dtypes_minimum_is_uniform(fused_anywhere: str, dtype: torch.dtype, mask_dtype: Any) -> None:
    """Forward and backward, where the logsumexp alone would have lost log n."""
    mask_dtype = dtype if mask_dtype == "same" else mask_dtype
    shape = SHAPES["gqa"]
    inputs = make_inputs(Case("", shape), dtype, fused_anywhere)
    inputs["query"].zero_()
    mask = torch.zeros(shape.scores[2:], dtype=mask_dtype, device=fused_anywhere)
    mask[0] = torch.finfo(mask_dtype).min
    results = []
    for attn_mask in (None, mask):
        wanted = leaves({name: x.detach().clone() for name, x in inputs.items()})
        output = mha_ext.attention(**wanted, attn_mask=attn_mask)
        results.append((output, *torch.autograd.grad(output.square().sum(), list(wanted.values()))))
    for ours, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("number", [math.nan, math.inf, "max"])
@every_dtype
@pytest.mark.parametrize("rule", ["lengths", "key_padding", "padding_bias", "padding_by_head", "causal"])
def test_hidden_keys_change_nothing(fused_anywhere: str, rule: str, dtype: torch.dtype, number: Any) -> None:
    """Bit for bit, forward and backward, whatever number stands there."""
    shape = Shape(2, 6, 2, 9, 75, 16, 24)
    rules = (rule,) if rule in ("lengths", "key_padding", "causal") else ()
    inputs = make_inputs(Case("", shape, rules), dtype, fused_anywhere)
    hidden = torch.zeros((shape.batch, shape.heads_kv, shape.seqlen_kv), dtype=torch.bool, device=fused_anywhere)
    if rule == "lengths":
        hidden |= torch.arange(shape.seqlen_kv, device=fused_anywhere) >= inputs["key_lengths"][:, None, None]
    elif rule == "key_padding":
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
        changed = {**{name: x.detach() if isinstance(x, Tensor) else x for name, x in inputs.items()}, **changed}
        wanted = leaves(changed)
        result = mha_ext.attention(**changed, return_lse=True, return_stats=True)
        loss = result.output.sum() + result.lse.masked_fill(result.lse == -math.inf, 0).sum()
        kept = [x for x in result if x is not None]
        results.append((*kept, *torch.autograd.grad(loss, list(wanted.values()))))
    assert all(identical(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@every_dtype
def test_a_number_that_is_not_finite_reaches_who_sees_it(
    fused_anywhere: str, dtype: torch.dtype, number: float
) -> None:
    """Its row, where it is a query's; of a key or value every row that sees it, and none of another tile.

    (Within a tile, a value that is not finite reaches rows that do not see it: 0 * NaN is NaN. Of masks that differ by
    query no more is promised.)
    """
    shape = Shape(1, 1, 1, 200, 200, 16, 16)
    for where in ("query", "key", "value"):
        inputs = make_inputs(Case("", shape), dtype, fused_anywhere)
        inputs[where][0, 0, 150] = number
        output = mha_ext.attention(**inputs, is_causal=True)[0, 0]
        rows = torch.arange(shape.seqlen_q, device=fused_anywhere)
        touched = rows == 150 if where == "query" else rows >= 150
        assert output[rows != 150 if where == "query" else rows < 128].isfinite().all()
        if where != "key" or math.isnan(number):  # a key of infinities has scores of both signs
            assert not output[touched].isfinite().any()


def test_dropout_draws_what_the_reference_draws(fused_anywhere: str) -> None:
    """With one value row a key, the output shows each weight."""
    shape = Shape(2, 2, 1, 40, 72, 16, 72)
    inputs = make_inputs(Case("", shape), torch.float32, fused_anywhere)
    inputs["value"] = torch.eye(72, device=fused_anywhere).expand(2, 1, 72, 72).contiguous()
    torch.manual_seed(7)
    ours = mha_ext.attention(**inputs, dropout_p=0.4)
    torch.manual_seed(7)
    expected = mha_ext.attention(**inputs, dropout_p=0.4, backend="reference")
    assert identical(ours == 0, expected == 0)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", COMBINED_CASES[:2], ids=lambda case: case.name)
@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
@every_dtype
def test_dropout_with_everything_else(
    fused_anywhere: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dropout_p: float, case: Case
) -> None:
    inputs = make_inputs(case, dtype, fused_anywhere)
    wanted = leaves(inputs)
    rng_state = torch.tensor([123456789012345, 987654321], device=fused_anywhere)
    monkeypatch.setattr(mha_ext.reference, "draw_rng_state", lambda device: rng_state)
    output = mha_ext.attention(**inputs, dropout_p=dropout_p)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    computed = torch.autograd.grad(output, list(wanted.values()), grad)
    exact = oracle.gradients(**inputs, grad_output=grad, dropout_p=dropout_p, rng_state=rng_state)
    expected = oracle.attention(**inputs, dropout_p=dropout_p, rng_state=rng_state)
    floor = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert_accurate(output, expected.output, None, floor, "output")
    largest = max(np.abs(x).max() for x in exact.values())
    for name, ours in zip(wanted, computed, strict=True):
        error = np.abs(oracle.to_array(ours) - exact[name]).max()
        assert error <= floor * largest, f"gradient of {name}: {error:.3g}"


# --- layouts ------------------------------------------------------------------------------------------


@every_dtype
def test_strides_change_no_bit(fused_anywhere: str, dtype: torch.dtype) -> None:
    """Rows outside of heads, gaps, odd offsets and expanded axes, against contiguous tensors."""
    shape = Shape(2, 4, 2, 33, 40, 24, 24)
    inputs = make_inputs(Case("", shape, ("causal_end",)), dtype, fused_anywhere)
    expected_wanted = leaves({name: x.clone() for name, x in inputs.items() if isinstance(x, Tensor)})
    expected = mha_ext.attention(**{**inputs, **expected_wanted})
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(expected)
    expected_grads = torch.autograd.grad(expected, list(expected_wanted.values()), grad)

    def rows_outside(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def unaligned(x: Tensor) -> Tensor:
        memory = x.new_zeros(*x.shape[:3], x.shape[3] + 3)
        memory[..., 1:-2] = x
        return memory[..., 1:-2]

    def every_second(x: Tensor) -> Tensor:
        memory = x.new_zeros(*x.shape[:3], 2 * x.shape[3])
        memory[..., ::2] = x
        return memory[..., ::2]

    for layout in (rows_outside, unaligned, every_second):
        changed = {name: layout(x.detach()) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        wanted = leaves(changed)
        output = mha_ext.attention(**changed)
        assert identical(output, expected)
        grads = torch.autograd.grad(output, list(wanted.values()), layout(grad))
        assert all(identical(a, b) for a, b in zip(grads, expected_grads, strict=True))


def test_the_output_lies_in_memory_as_query_does(fused_anywhere: str) -> None:
    """So that the next projection reads it in place."""
    x = torch.randn(2, 5, 3, 8, device=fused_anywhere, dtype=torch.float16)
    assert mha_ext.attention(x, x, x).is_contiguous()
    assert mha_ext.attention(*[x.transpose(1, 2)] * 3).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_kv"),
    [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (0, 0, 0, 0), (2, 2, 3, 0), (2, 2, 0, 0)],
)
@pytest.mark.parametrize("rule", ["plain", "causal_end", "bias", "bool_mask", "alibi", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_empty_axes(
    fused_anywhere: str, batch: int, heads: int, seqlen_q: int, seqlen_kv: int, rule: str, dtype: torch.dtype
) -> None:
    shape = Shape(batch, heads, heads, seqlen_q, seqlen_kv, 8, 16)
    if rule == "bool_mask" and seqlen_q == 0:
        return
    inputs = make_inputs(Case("", shape, () if rule == "plain" else (rule,)), dtype, fused_anywhere)
    wanted = leaves(inputs)
    result = mha_ext.attention(**inputs, return_lse=True, return_stats=True)
    assert result.output.shape == (batch, heads, seqlen_q, 16)
    assert result.lse.shape == result.max_score.shape == result.entropy.shape == shape.scores[:3]
    assert not result.output.any()
    if seqlen_kv == 0:
        nothing = inputs["sinks"][:, None].expand(result.lse.shape) if rule == "sinks" else -math.inf
        assert (result.lse == nothing).all()
    grads = torch.autograd.grad(result.output.sum(), list(wanted.values()))
    assert all(not grad.any() and grad.shape == x.shape for grad, x in zip(grads, wanted.values(), strict=True))


@pytest.mark.parametrize(
    "mask_shape",
    [(), (11,), (9, 1), (9, 11), (1, 11), (6, 1, 1), (6, 9, 11), (2, 1, 1, 11), (2, 6, 9, 1), (2, 1, 9, 11),
     (2, 6, 1, 11), (1, 6, 1, 11)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_mask_broadcasts(fused_anywhere: str, mask_shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    """Values and gradients equal those of the mask written out; its own gradient is summed to its shape."""
    inputs = make_inputs(Case("", SHAPES["gqa"]), dtype, fused_anywhere)
    mask = torch.randn(mask_shape, device=fused_anywhere).to(dtype)
    mask = mask > -0.5 if kind == "bool" else mask
    results = []
    for attn_mask in (mask, mask.expand(SHAPES["gqa"].scores).contiguous()):
        wanted = leaves({**{name: x.detach() for name, x in inputs.items()}, "attn_mask": attn_mask.clone()})
        output = mha_ext.attention(**{**inputs, "attn_mask": attn_mask, **wanted})
        grads = dict(zip(wanted, torch.autograd.grad(output.square().sum(), list(wanted.values())), strict=True))
        results.append((output, grads))
    (output, grads), (expected, expected_grads) = results
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(output, expected, rtol=0, atol=tolerance)
    if "attn_mask" in grads:
        expected_grads["attn_mask"] = expected_grads["attn_mask"].float().sum_to_size(mask.shape).to(dtype)
    for name, grad in grads.items():
        largest = max(1.0, float(expected_grads[name].abs().max()))
        torch.testing.assert_close(grad, expected_grads[name], rtol=0, atol=4 * tolerance * largest, msg=name)


# --- what surrounds the kernels -------------------------------------------------------------------------


def test_every_run_gives_the_same_bits(fused_anywhere: str) -> None:
    inputs = make_inputs(Case("", Shape(1, 4, 2, 150, 200, 32, 32), ("causal_end",)), torch.float16, fused_anywhere)
    wanted = leaves(inputs)
    runs = []
    for _ in range(3):
        output = mha_ext.attention(**inputs)
        runs.append((output, *torch.autograd.grad(output.square().sum(), list(wanted.values()))))
    assert all(identical(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_the_backward_can_be_differentiated(fused_anywhere: str) -> None:
    """By plain PyTorch, which takes over."""
    inputs = make_inputs(Case("", Shape(1, 2, 1, 5, 6, 8, 8), ("bias", "softcap")), torch.float32, fused_anywhere)
    results = []
    for backend in (None, "reference"):
        wanted = leaves({name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in inputs.items()})
        output = mha_ext.attention(**{**inputs, **wanted}, backend=backend)
        first = torch.autograd.grad(output.square().sum(), list(wanted.values()), create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in first), list(wanted.values())))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("which", range(6), ids=["query", "key", "value", "attn_mask", "alibi_slopes", "sinks"])
def test_each_input_alone_may_ask_for_a_gradient(fused_anywhere: str, which: int) -> None:
    """And gets the one that it gets when all ask."""
    case = Case("", Shape(2, 2, 1, 9, 12, 8, 8), ("bias_by_head", "alibi", "sinks"))
    inputs = make_inputs(case, torch.float32, fused_anywhere)
    every = leaves({name: x.clone() for name, x in inputs.items()})
    all_grads = torch.autograd.grad(mha_ext.attention(**every).square().sum(), list(every.values()))
    name = list(every)[which]
    one = {**inputs, name: inputs[name].clone().requires_grad_()}
    (grad,) = torch.autograd.grad(mha_ext.attention(**one).square().sum(), one[name])
    assert identical(grad, all_grads[which])


def test_lengths_of_one_item_do_not_reach_another(fused_anywhere: str) -> None:
    """Each item of a batch gets the bits that it gets alone."""
    shape = Shape(3, 2, 2, 20, 90, 16, 16)
    inputs = make_inputs(Case("", shape, ("lengths", "causal_end")), torch.float16, fused_anywhere)
    together = mha_ext.attention(**inputs)
    for b in range(3):
        alone = {name: x[b : b + 1] if isinstance(x, Tensor) else x for name, x in inputs.items()}
        assert identical(mha_ext.attention(**alone)[0], together[b])
