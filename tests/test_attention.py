"""`mha_ext.attention` and its parts mean what DESIGN says, whichever backend computes them."""

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from accuracy import FLOOR, assert_accurate, plain_attention
from cases import CASES, COMBINED_CASES, RULE_CASES, SHAPES, BackendUnderTest, Case, Shape, leaves, make_inputs
from torch import Tensor

import mha_ext

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def identical(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN would not be, and is expected nowhere."""
    return a.shape == b.shape and torch.equal(a, b)


# --- values and gradients by the definition -----------------------------------------------------------


@by_name
@every_dtype
def test_values_follow_the_definition(backend: BackendUnderTest, case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype, backend.device)
    result = mha_ext.attention(**inputs, return_lse=True, return_weights=True, return_stats=True)
    expected = oracle.attention(**inputs)
    plain_output, _, plain_weights = plain_attention(**inputs)
    assert result.output.dtype == result.weights.dtype == dtype
    assert_accurate(result.output, expected.output, plain_output, FLOOR[dtype], "output")
    assert_accurate(result.weights, expected.weights, plain_weights, FLOOR[dtype], "weights")
    for name in ("lse", "max_score", "entropy"):  # computed and kept in fp32 (fp64) even for half inputs
        statistic = getattr(result, name)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        assert statistic.dtype == exact
        finite = getattr(expected, name)[np.isfinite(getattr(expected, name))]
        scale = max(1.0, np.abs(finite).max(initial=0.0))
        assert_accurate(statistic / scale, getattr(expected, name) / scale, None, 4 * FLOOR[exact], name)


@by_name
@every_dtype
def test_gradients_follow_the_definition(backend: BackendUnderTest, case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype, backend.device)
    generator = torch.Generator().manual_seed(1)
    wanted = leaves(inputs)
    result = mha_ext.attention(**inputs, return_lse=True, return_weights=True)
    outputs = (result.output, result.lse, result.weights)
    grads = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    grads[1][result.lse.detach() == -math.inf] = 0  # such a row has no derivative
    given = dict(zip(("grad_output", "grad_lse", "grad_weights"), grads, strict=True))
    expected = oracle.gradients(**inputs, **given)
    computed = torch.autograd.grad(outputs, list(wanted.values()), grads)

    plain_outputs = plain_attention(**inputs)
    plain_grads = [grad.to(x.dtype) for grad, x in zip(grads, plain_outputs, strict=True)]
    plain = torch.autograd.grad(plain_outputs, list(wanted.values()), plain_grads)
    for name, ours, yardstick in zip(wanted, computed, plain, strict=True):
        assert ours.dtype == wanted[name].dtype
        assert_accurate(ours, expected[name], yardstick.nan_to_num(0.0), FLOOR[dtype], f"gradient of {name}")


@pytest.mark.parametrize("case", [*RULE_CASES, *COMBINED_CASES], ids=lambda case: case.name)
def test_a_row_that_sees_nothing_is_exactly_zero(backend: BackendUnderTest, case: Case) -> None:
    inputs = make_inputs(case, torch.float32, backend.device)
    inputs["attn_mask"] = torch.ones(case.shape.scores, dtype=torch.bool, device=backend.device)
    inputs["attn_mask"][0, 0, -1] = False
    wanted = leaves(inputs)
    result = mha_ext.attention(**inputs, return_lse=True, return_weights=True, return_stats=True)
    assert not result.output[0, 0, -1].any()
    assert not result.weights[0, 0, -1].any()
    assert result.max_score[0, 0, -1] == -math.inf
    assert result.entropy[0, 0, -1] == 0
    assert result.lse[0, 0, -1] == (inputs["sinks"][0] if "sinks" in inputs else -math.inf)
    grads = torch.autograd.grad(result.output.sum() + result.weights.square().sum(), list(wanted.values()))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0, 0, -1].any()


def test_all_rows_empty_give_zeros_and_zero_gradients(backend: BackendUnderTest) -> None:
    inputs = make_inputs(Case("", SHAPES["gqa"], ("bias",)), torch.float32, backend.device)
    inputs["attn_mask"] = torch.full_like(inputs["attn_mask"], -math.inf)
    wanted = leaves(inputs)
    result = mha_ext.attention(**inputs, return_lse=True)
    assert not result.output.any()
    assert (result.lse == -math.inf).all()
    assert not any(g.any() for g in torch.autograd.grad(result.output.sum(), list(wanted.values())))


@every_dtype
def test_a_row_of_the_dtypes_minimum_is_uniform(backend: BackendUnderTest, dtype: torch.dtype) -> None:
    """All other scores vanish beside the minimum of fp32; below fp32 it is a constant, which changes nothing."""
    inputs = make_inputs(Case("", SHAPES["gqa"]), dtype, backend.device)
    inputs["query"].zero_()
    expected = mha_ext.attention(**inputs)
    mask = torch.zeros(SHAPES["gqa"].scores[2:], dtype=dtype, device=backend.device)
    mask[0] = torch.finfo(dtype).min
    output = mha_ext.attention(**inputs, attn_mask=mask)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scores_vanish_beside_the_minimum(backend: BackendUnderTest, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("", SHAPES["gqa"]), dtype, backend.device)
    mask = torch.full(SHAPES["gqa"].scores[2:], torch.finfo(dtype).min, dtype=dtype, device=backend.device)
    result = mha_ext.attention(**inputs, attn_mask=mask, return_weights=True)
    uniform = torch.full_like(result.weights, 1 / SHAPES["gqa"].seqlen_kv)
    torch.testing.assert_close(result.weights, uniform, rtol=1e-6, atol=0)


# --- positions ----------------------------------------------------------------------------------------

TOP_LEFT = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
BOTTOM_RIGHT = [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
BOTTOM_RIGHT_TALL = [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv", "arguments", "sees"),
    [
        (2, 5, {"is_causal": True}, TOP_LEFT),
        (2, 5, {"is_causal": True, "q_offset": "end"}, BOTTOM_RIGHT),
        (5, 2, {"is_causal": True, "q_offset": "end"}, BOTTOM_RIGHT_TALL),
        (2, 5, {"is_causal": True, "q_offset": 3}, BOTTOM_RIGHT),
        (2, 5, {"is_causal": True, "q_offset": torch.tensor([3])}, BOTTOM_RIGHT),
        (2, 5, {"is_causal": True, "q_offset": torch.tensor([3], dtype=torch.int32)}, BOTTOM_RIGHT),
        (2, 5, {"is_causal": True, "q_offset": -1}, [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]),
        (2, 5, {"window": (None, 0)}, TOP_LEFT),
        (2, 5, {"window": (0, 0), "q_offset": "end"}, [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]),
        (2, 5, {"window": (1, 2)}, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),
        (2, 5, {"window": [1, None], "q_offset": 2}, [[0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
        (2, 5, {"window": (1, 2), "is_causal": True}, [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]),
        (2, 5, {"window": (None, None)}, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        (2, 5, {"key_lengths": torch.tensor([2])}, [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]),
        (2, 5, {"key_lengths": torch.tensor([9], dtype=torch.int32)}, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        (2, 5, {"key_lengths": torch.tensor([2]), "is_causal": True}, [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]),
    ],
    ids=lambda x: ",".join(map(str, x)) if isinstance(x, dict) else None,
)  # fmt: skip
def test_who_sees_whom(
    backend: BackendUnderTest, seqlen_q: int, seqlen_kv: int, arguments: dict[str, Any], sees: list[list[int]]
) -> None:
    """The seen set itself, read from the weights of equal scores."""
    arguments = {k: v.to(backend.device, copy=True) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    query = torch.zeros(1, 1, seqlen_q, 4, device=backend.device)
    key = torch.zeros(1, 1, seqlen_kv, 4, device=backend.device)
    result = mha_ext.attention(query, key, key, **arguments, return_weights=True)
    seen = torch.tensor(sees, dtype=torch.float32)
    uniform = seen / seen.sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(result.weights[0, 0].cpu(), uniform)


# --- what is hidden is not used -------------------------------------------------------------------------


def _with_numbers(inputs: dict[str, Any], hidden: Tensor, number: float) -> dict[str, Any]:
    """The same call with this number wherever key and value are hidden (B, Hkv, Lk)."""
    changed = {name: inputs[name].masked_fill(hidden[..., None], number) for name in ("key", "value")}
    return {**inputs, **changed}


PADDING = {
    "lengths": ("lengths",),
    "lengths_softcap": ("lengths", "softcap"),
    "key_padding": ("key_padding",),
    "padding_bias": (),
    "padding_by_head": (),
}


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rule", PADDING)
def test_hidden_keys_change_nothing(backend: BackendUnderTest, rule: str, dtype: torch.dtype, number: str) -> None:
    """Bit for bit, forward and backward, whatever number stands there."""
    shape = SHAPES["gqa"]
    inputs = make_inputs(Case("", shape, PADDING[rule]), dtype, backend.device)
    hidden = torch.zeros((shape.batch, shape.heads_kv, shape.seqlen_kv), dtype=torch.bool, device=backend.device)
    if "lengths" in PADDING[rule]:
        hidden |= torch.arange(shape.seqlen_kv, device=backend.device) >= inputs["key_lengths"][:, None, None]
    elif rule == "key_padding":
        hidden |= ~inputs["attn_mask"][:, 0, 0, None]
    elif rule == "padding_bias":
        hidden[0, :, 3:5] = hidden[1, :, 0] = True
        inputs["attn_mask"] = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -math.inf)[:, :1, None]
    else:
        hidden[:, 0, 2] = hidden[1, 1, 4:] = True
        inputs["attn_mask"] = ~hidden.repeat_interleave(shape.heads // shape.heads_kv, 1)[:, :, None]
    assert hidden.any()

    results = []
    for x in (0.5, torch.finfo(dtype).max if number == "max" else float(number)):
        changed = _with_numbers(inputs, hidden, x)
        wanted = leaves(changed)
        result = mha_ext.attention(**changed, return_lse=True, return_weights=True, return_stats=True)
        loss = result.output.sum() + result.lse.masked_fill(result.lse == -math.inf, 0).sum() + result.weights.amax()
        results.append((*result, *torch.autograd.grad(loss, list(wanted.values()))))
    assert all(identical(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("rule", ["bool_mask", "bias_hides", "causal", "window", "causal_offsets"])
def test_the_reference_never_uses_what_one_query_does_not_see(rule: str, where: str, number: float) -> None:
    """Also where another query sees it: that other one, and it alone, gets no finite number."""
    shape = SHAPES["gqa"]
    inputs = make_inputs(Case("", shape, (rule,)), torch.float64)
    weights = mha_ext.attention(**inputs, return_weights=True, backend="reference").weights
    bad = torch.zeros((shape.batch, shape.heads_kv, shape.seqlen_kv), dtype=torch.bool)
    bad[:, 0, 4] = True
    sees_bad = (weights[:, : shape.heads // shape.heads_kv, :, 4] > 0).flatten()
    assert sees_bad.any()
    assert not sees_bad.all()
    outputs, grads = [], []
    for x in (0.5, number):
        changed = {**inputs, where: _with_numbers(inputs, bad, x)[where]}
        changed["query"].requires_grad_()
        output = mha_ext.attention(**changed, backend="reference")
        outputs.append(output[:, : shape.heads // shape.heads_kv].flatten(0, 2))
        rows = torch.autograd.grad(output.sum(), changed["query"])[0]
        grads.append(rows[:, : shape.heads // shape.heads_kv].flatten(0, 2))
    assert identical(outputs[0][~sees_bad], outputs[1][~sees_bad])
    assert identical(grads[0][~sees_bad], grads[1][~sees_bad])
    assert not outputs[1][sees_bad].isfinite().any()


def test_hidden_numbers_in_a_bias_change_nothing(backend: BackendUnderTest) -> None:
    """A bias may hold anything where another rule hides the key."""
    inputs = make_inputs(Case("", SHAPES["gqa"], ("bias", "lengths", "causal")), torch.float32, backend.device)
    shape = SHAPES["gqa"]
    column, row = torch.arange(shape.seqlen_kv), torch.arange(shape.seqlen_q)[:, None]
    hidden = ((column >= inputs["key_lengths"].cpu()[:, None, None, None]) | (column > row)).to(backend.device)
    results = []
    for x in (0.0, math.nan, math.inf):
        changed = {**inputs, "attn_mask": inputs["attn_mask"].masked_fill(hidden, x)}
        wanted = leaves({name: x.detach() if isinstance(x, Tensor) else x for name, x in changed.items()})
        output = mha_ext.attention(**{**changed, **wanted})
        results.append((output, *torch.autograd.grad(output.square().sum(), list(wanted.values()))))
    assert all(identical(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_masked_softmax_never_reads_hidden_scores(backend: BackendUnderTest) -> None:
    scores = torch.randn(2, 3, 5, 7, device=backend.device)
    mask = torch.rand(5, 7, device=backend.device) > 0.5
    results = []
    for number in (0.0, math.nan, math.inf):
        x = scores.masked_fill(~mask, number).requires_grad_()
        weights, lse = mha_ext.masked_softmax(x, mask, softcap=2.0, return_lse=True)
        loss = weights.square().sum() + lse.masked_fill(lse == -math.inf, 0).sum()
        results.append((weights, lse, *torch.autograd.grad(loss, x)))
    assert all(identical(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# --- shapes and strides ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_kv"),
    [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (0, 0, 0, 0), (2, 2, 3, 0), (2, 2, 0, 0)],
)
@pytest.mark.parametrize("rule", ["plain", "causal_end", "bias", "lengths", "alibi", "sinks"])
def test_empty_axes(
    backend: BackendUnderTest, batch: int, heads: int, seqlen_q: int, seqlen_kv: int, rule: str
) -> None:
    shape = Shape(batch, heads, heads, seqlen_q, seqlen_kv, 8, 16)
    inputs = make_inputs(
        Case("", shape, () if rule in ("plain", "lengths") else (rule,)), torch.float32, backend.device
    )
    if rule == "lengths":
        inputs["key_lengths"] = torch.zeros(batch, dtype=torch.int64, device=backend.device)
    wanted = leaves(inputs)
    result = mha_ext.attention(**inputs, return_lse=True, return_weights=True, return_stats=True)
    assert result.output.shape == (batch, heads, seqlen_q, 16)
    assert result.weights.shape == shape.scores
    assert result.lse.shape == result.max_score.shape == result.entropy.shape == shape.scores[:3]
    assert not result.output.any()
    if seqlen_kv == 0:
        nothing = inputs["sinks"][:, None].expand(result.lse.shape) if rule == "sinks" else -math.inf
        assert (result.lse == nothing).all()
    grads = torch.autograd.grad(result.output.sum() + result.weights.sum(), list(wanted.values()))
    assert all(not grad.any() and grad.shape == x.shape for grad, x in zip(grads, wanted.values(), strict=True))


@pytest.mark.parametrize("lead", [(), (3,), (2, 4), (2, 3, 4), (1, 2, 2, 4)], ids=len)
def test_any_number_of_axes(backend: BackendUnderTest, lead: tuple[int, ...]) -> None:
    """(L, D) and (B, L, D) have one head; beyond four axes all but the last three are batch."""
    query, key, value = (torch.randn(*lead, n, d, device=backend.device) for n, d in ((5, 8), (7, 8), (7, 6)))
    mask = torch.rand(*lead, 5, 7, device=backend.device) > 0.3
    options: dict[str, Any] = {"return_lse": True, "return_weights": True, "return_stats": True}
    result = mha_ext.attention(query, key, value, mask, **options)
    four = (-1, lead[-1] if len(lead) > 1 else 1)
    expected = mha_ext.attention(
        *(x.reshape(*four, *x.shape[-2:]) for x in (query, key, value, mask)), **options
    )  # fmt: skip
    assert result.output.shape == (*lead, 5, 6)
    assert result.weights.shape == (*lead, 5, 7)
    assert result.lse.shape == result.max_score.shape == result.entropy.shape == (*lead, 5)
    assert all(identical(a.flatten(), b.flatten()) for a, b in zip(result, expected, strict=True))


def test_five_axes_with_grouped_heads_and_a_mask_of_each_number_of_axes(backend: BackendUnderTest) -> None:
    query = torch.randn(2, 3, 4, 5, 8, device=backend.device)
    key = torch.randn(2, 3, 2, 7, 8, device=backend.device)
    for mask_shape in [(7,), (5, 7), (4, 5, 7), (3, 1, 5, 7), (2, 1, 4, 1, 7), (2, 3, 1, 1, 1)]:
        mask = torch.randn(mask_shape, device=backend.device)
        output = mha_ext.attention(query, key, key, mask)
        full = mask.expand(2, 3, 4, 5, 7).flatten(0, 1)
        expected = mha_ext.attention(query.flatten(0, 1), key.flatten(0, 1), key.flatten(0, 1), full)
        torch.testing.assert_close(output.flatten(0, 1), expected)


@pytest.mark.parametrize(
    "mask_shape",
    [(), (1,), (11,), (9, 1), (9, 11), (1, 11), (6, 1, 1), (6, 9, 11), (1, 9, 11), (2, 1, 1, 11), (2, 6, 9, 1),
     (2, 1, 9, 11), (1, 1, 1, 1), (2, 6, 9, 11)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_a_mask_broadcasts(backend: BackendUnderTest, mask_shape: tuple[int, ...], kind: str) -> None:
    """Values and gradients equal those of the mask written out; its own gradient is summed to its shape."""
    inputs = make_inputs(Case("", SHAPES["gqa"]), torch.float64, backend.device)
    mask = torch.randn(mask_shape, dtype=torch.float64, device=backend.device)
    mask = mask > -0.5 if kind == "bool" else mask
    results = []
    for given in (mask, mask.expand(SHAPES["gqa"].scores).contiguous()):
        given = given.clone().requires_grad_(kind == "bias")
        wanted = leaves({name: x.detach() for name, x in inputs.items()})
        output = mha_ext.attention(**wanted, attn_mask=given)
        inputs_of_grad = [*wanted.values(), *([given] if kind == "bias" else [])]
        results.append((output, *torch.autograd.grad(output.square().sum(), inputs_of_grad)))
    for short, full in zip(*results, strict=True):
        torch.testing.assert_close(short, full.sum_to_size(short.shape))


@pytest.mark.parametrize("mask_dtype", DTYPES, ids=str)
@every_dtype
def test_a_bias_may_have_any_floating_dtype(
    backend: BackendUnderTest, dtype: torch.dtype, mask_dtype: torch.dtype
) -> None:
    """It is not rounded to query's dtype, and its gradient comes in its own."""
    inputs = make_inputs(Case("", SHAPES["gqa"]), dtype, backend.device)
    bias = torch.randn(SHAPES["gqa"].scores[2:], device=backend.device).to(mask_dtype)
    bias[2, 3:] = -math.inf
    inputs["attn_mask"] = bias
    wanted = leaves(inputs)
    result = mha_ext.attention(**inputs, return_lse=True)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    np.testing.assert_allclose(
        oracle.to_array(result.lse), oracle.attention(**inputs).lse, rtol=8 * torch.finfo(compute).eps, atol=0
    )
    grad_output = torch.randn_like(result.output)
    grads = torch.autograd.grad(result.output, list(wanted.values()), grad_output)
    assert [grad.dtype for grad in grads] == [dtype, dtype, dtype, mask_dtype]
    exact = oracle.gradients(**inputs, grad_output=grad_output)["attn_mask"]
    floor = 8 * max(torch.finfo(mask_dtype).eps, torch.finfo(dtype).eps)
    assert_accurate(grads[3], exact, None, floor, "gradient of attn_mask")


def test_the_minimum_of_a_wider_dtype_does_not_become_minus_infinity(backend: BackendUnderTest) -> None:
    """-inf hides, and the minimum of fp64 would round to it in fp32."""
    query = torch.randn(1, 2, 3, 4, device=backend.device)
    mask = torch.zeros(3, 3, dtype=torch.float64, device=backend.device)
    mask[0], mask[1, 1:] = torch.finfo(torch.float64).min, -math.inf
    weights = mha_ext.attention(query, query, query, mask, return_weights=True).weights
    torch.testing.assert_close(weights[:, :, 0], torch.full_like(weights[:, :, 0], 1 / 3))
    assert (weights[:, :, 1, 0] == 1).all()


def _strided(x: Tensor, how: str) -> Tensor:
    """The same numbers in another place in memory."""
    if how == "transposed":  # (B, L, H, D) in memory, as a projection leaves it
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "sliced":
        padded = torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 5), math.nan, dtype=x.dtype, device=x.device)
        padded[:, :, 2:-1, 1:-4] = x
        return padded[:, :, 2:-1, 1:-4]
    if how == "last_axis_strided":
        return torch.stack((x, torch.full_like(x, math.nan)), -1)[..., 0]
    if how == "last_axes_swapped":
        return x.mT.contiguous().mT
    assert how == "every_other_row"
    return torch.stack((x, torch.full_like(x, math.nan)), 3).flatten(2, 3)[:, :, ::2]


@pytest.mark.parametrize("how", ["transposed", "sliced", "last_axis_strided", "last_axes_swapped", "every_other_row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_strides_change_nothing(backend: BackendUnderTest, how: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("", SHAPES["gqa"], ("bias",)), dtype, backend.device)
    results = []
    for arrange in (lambda x: x, lambda x: _strided(x, how)):
        arranged = {name: arrange(x.detach()) for name, x in inputs.items()}
        wanted = leaves(arranged)
        result = mha_ext.attention(**arranged, return_weights=True)
        grad = arrange(torch.ones_like(result.output).cumsum(-1))
        results.append(
            (result.output, result.weights, *torch.autograd.grad(result.output, list(wanted.values()), grad))
        )
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_expanded_inputs_are_read_in_place(backend: BackendUnderTest) -> None:
    """Stride 0 on batch, heads and length, for inputs, mask and grad; gradients sum over what was expanded."""
    shape = SHAPES["gqa"]
    wide = {
        "query": torch.randn(1, 1, shape.seqlen_q, shape.head_dim),
        "key": torch.randn(1, 1, shape.seqlen_kv, shape.head_dim),
        "value": torch.randn(shape.batch, shape.heads_kv, 1, shape.head_dim_v),
        "attn_mask": torch.randn(1, shape.heads, 1, shape.seqlen_kv),
    }
    full = {
        "query": (*shape.scores[:3], shape.head_dim),
        "key": (shape.batch, shape.heads_kv, shape.seqlen_kv, shape.head_dim),
        "value": (shape.batch, shape.heads_kv, shape.seqlen_kv, shape.head_dim_v),
        "attn_mask": shape.scores,
    }
    results = []
    for arrange in (Tensor.expand, lambda x, *size: x.expand(*size).contiguous()):
        small = {name: x.double().to(backend.device).requires_grad_() for name, x in wide.items()}
        output = mha_ext.attention(**{name: arrange(x, *full[name]) for name, x in small.items()})
        grad = torch.ones((), dtype=output.dtype, device=output.device).expand(output.shape)
        results.append((output, *torch.autograd.grad(output.exp(), list(small.values()), grad)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# --- the face -------------------------------------------------------------------------------------------


def test_the_positional_part_is_torchs(backend: BackendUnderTest) -> None:
    inputs = make_inputs(Case("", SHAPES["odd"], ("bias",)), torch.float32, backend.device)
    arguments = (*(inputs[name] for name in ("query", "key", "value", "attn_mask")), 0.0, False)
    ours = mha_ext.attention(*arguments, scale=0.3)
    theirs = torch.nn.functional.scaled_dot_product_attention(*arguments, scale=0.3)
    torch.testing.assert_close(ours, theirs)
    query, key, value = make_inputs(Case("", SHAPES["gqa"]), torch.float32, backend.device).values()
    ours = mha_ext.attention(query, key, value, None, 0.0, True, scale=None, enable_gqa=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, None, 0.0, True, scale=None, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs)


def test_only_what_was_asked_for_is_returned(backend: BackendUnderTest) -> None:
    query = torch.randn(1, 2, 3, 4, device=backend.device)
    output = mha_ext.attention(query, query, query)
    assert isinstance(output, Tensor)
    fields = {"return_lse": ("lse",), "return_weights": ("weights",), "return_stats": ("max_score", "entropy")}
    for option, names in fields.items():
        result = mha_ext.attention(query, query, query, **{option: True})
        assert isinstance(result, mha_ext.AttentionResult)
        assert {name for name, x in result._asdict().items() if x is not None} == {"output", *names}
        assert identical(result.output, output)


def test_statistics_carry_no_gradient_and_disturb_none(backend: BackendUnderTest) -> None:
    query = torch.randn(1, 2, 3, 4, device=backend.device, requires_grad=True)
    result = mha_ext.attention(query, query, query, return_stats=True)
    assert not result.max_score.requires_grad
    assert not result.entropy.requires_grad
    (with_stats,) = torch.autograd.grad(result.output.square().sum(), query)
    (without,) = torch.autograd.grad(mha_ext.attention(query, query, query).square().sum(), query)
    assert identical(with_stats, without)


@pytest.mark.parametrize("case", [*RULE_CASES, *COMBINED_CASES], ids=lambda case: case.name)
def test_parts_compose_to_attention(backend: BackendUnderTest, case: Case) -> None:
    inputs = make_inputs(case, torch.float64, backend.device)
    result = mha_ext.attention(**inputs, return_lse=True, return_weights=True)
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    scores = mha_ext.attention_scores(query, key, inputs.pop("scale", None))
    weights, lse = mha_ext.masked_softmax(scores, **inputs, return_lse=True)
    torch.testing.assert_close(weights, result.weights)
    torch.testing.assert_close(lse, result.lse)
    torch.testing.assert_close(mha_ext.attention_output(weights, value), result.output)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_parts_in_half_precision_keep_scores_in_single(backend: BackendUnderTest, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("", SHAPES["gqa"]), dtype, backend.device)
    scores = mha_ext.attention_scores(inputs["query"], inputs["key"])
    assert scores.dtype == torch.float32
    weights = mha_ext.masked_softmax(scores, dtype=dtype)
    assert weights.dtype == dtype
    output = mha_ext.attention_output(weights, inputs["value"])
    assert output.dtype == dtype
    expected = oracle.attention(**inputs)
    plain = plain_attention(**inputs)
    assert_accurate(weights, expected.weights, plain[2], FLOOR[dtype])
    assert_accurate(output, expected.output, plain[0], FLOOR[dtype])


@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 1), (6, 2), (3, None), (4, 1)])
@pytest.mark.parametrize("with_bias", [True, False])
@every_dtype
def test_qkv_split_cuts_and_merges(
    backend: BackendUnderTest, heads: int, heads_kv: int | None, with_bias: bool, dtype: torch.dtype
) -> None:
    """Element by element: column c of the packed projection is head c // D, feature c % D."""
    batch, seqlen, head_dim = 2, 5, 3
    kv = heads if heads_kv is None else heads_kv
    columns = (heads + 2 * kv) * head_dim
    packed = torch.randn(batch, seqlen, columns, device=backend.device).to(dtype).requires_grad_()
    bias = torch.randn(columns, device=backend.device).to(dtype).requires_grad_() if with_bias else None
    parts = mha_ext.qkv_split(packed, bias, heads, heads_kv)
    total = packed.detach() if bias is None else packed.detach() + bias.detach()
    merged = torch.cat(parts, 1)
    assert [part.shape[1] for part in parts] == [heads, kv, kv]
    assert all(part.is_contiguous() for part in parts)
    for c in range(columns):
        assert identical(merged[:, c // head_dim, :, c % head_dim], total[:, :, c])
    grads = [torch.randn(part.shape, device=part.device).to(dtype) for part in parts]
    leaf = [packed, *([bias] if bias is not None else [])]
    grad_packed, *grad_bias = torch.autograd.grad(parts, leaf, grads)
    expected = torch.cat(grads, 1)
    for c in range(columns):
        assert identical(grad_packed[:, :, c], expected[:, c // head_dim, :, c % head_dim])
    if with_bias:
        exact = grad_packed.double().sum((0, 1))
        torch.testing.assert_close(grad_bias[0].double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_qkv_split_reads_any_strides_and_empty_axes(backend: BackendUnderTest) -> None:
    packed = torch.randn(3, 4, 9 * 8, device=backend.device)
    for view in (packed.transpose(0, 1), packed[:, ::2], packed[:1].expand(5, 4, 72), packed[:0], packed[:, :0]):
        for part, expected in zip(
            mha_ext.qkv_split(view, None, 3), mha_ext.qkv_split(view.contiguous(), None, 3), strict=True
        ):
            assert identical(part, expected)
            assert part.shape == (view.shape[0], 3, view.shape[1], 8)


def test_calls_are_repeatable_bit_for_bit(backend: BackendUnderTest) -> None:
    results = []
    for _ in range(2):
        inputs = make_inputs(COMBINED_CASES[1], torch.float32, backend.device)
        wanted = leaves(inputs)
        output = mha_ext.attention(**inputs, deterministic=True)
        results.append((output, *torch.autograd.grad(output.square().sum(), list(wanted.values()))))
    assert all(identical(a, b) for a, b in zip(*results, strict=True))


def test_inputs_are_left_alone(backend: BackendUnderTest) -> None:
    inputs = make_inputs(COMBINED_CASES[1], torch.float32, backend.device)
    before = {name: x.clone() for name, x in inputs.items() if isinstance(x, Tensor)}
    mha_ext.attention(**inputs)
    assert all(identical(inputs[name], x) for name, x in before.items())


def test_parts_under_autocast_accumulate_in_fp32(backend: BackendUnderTest) -> None:
    query = torch.full((1, 1, 2, 64), 200.0, device=backend.device)
    with torch.autocast(backend.device, dtype=torch.float16):
        scores = mha_ext.attention_scores(query, query, scale=1.0)
        weights = mha_ext.masked_softmax(scores, dtype=torch.float16)
        output = mha_ext.attention_output(weights, query)
        split = mha_ext.qkv_split(query[0].half(), torch.ones(64, device=backend.device), 2, 1)
    assert scores.dtype == torch.float32
    assert (scores == 200.0 * 200.0 * 64).all()
    assert output.dtype == torch.float16
    assert split[0].dtype == torch.float16


def test_second_derivatives_under_autocast_are_not_rounded_twice(backend: BackendUnderTest) -> None:
    query, key, value = (torch.randn(1, 2, 5, 8, device=backend.device, requires_grad=True) for _ in range(3))
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        output = mha_ext.attention(query, key, value)
        (once,) = torch.autograd.grad(output.float().square().sum(), query, create_graph=True)
    (exact,) = torch.autograd.grad(mha_ext.attention(query, key, value).square().sum(), query)
    assert (once - exact).abs().max() <= 2e-2 * exact.abs().max()


def test_heads_that_are_one_in_memory_stay_so(backend: BackendUnderTest) -> None:
    key = torch.randn(2, 1, 5, 8, device=backend.device).expand(2, 4, 5, 8)
    query = torch.randn(2, 4, 3, 8, device=backend.device)
    mask = torch.tensor([True, True, False, True, False], device=backend.device)
    masked = mha_ext.attention(query, key, key, mask)
    torch.testing.assert_close(masked, mha_ext.attention(query, key[:, :, mask], key[:, :, mask]))
    lengths = torch.tensor([3, 5], device=backend.device)
    short = mha_ext.attention(query, key, key, key_lengths=lengths)
    torch.testing.assert_close(short[0], mha_ext.attention(query[0], key[0, :, :3], key[0, :, :3]))


@pytest.mark.parametrize("heads_kv", [0, 2])
def test_no_query_heads(backend: BackendUnderTest, heads_kv: int) -> None:
    query, key = (torch.randn(2, h, 3, 8, device=backend.device) for h in (0, heads_kv))
    assert mha_ext.attention(query, key, key).shape == (2, 0, 3, 8)


def test_returned_weights_can_be_changed_in_place(backend: BackendUnderTest) -> None:
    for length in (8, 9):
        query = torch.randn(1, 1, 2, 4, device=backend.device, requires_grad=True)
        key = torch.randn(1, 1, length, 4, device=backend.device)
        weights = mha_ext.attention(query, key, key, return_weights=True).weights
        weights.mul_(2)


BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "keys for all": ((3,), (1,), (1,)),
    "one query for all": ((1,), (3,), (3,)),
    "value alone": ((3,), (3,), (1,)),
    "no batch": ((), (3,), ()),
    "two axes": ((2, 1), (1, 3), (3,)),
}


@pytest.mark.parametrize("form", BATCHES)
def test_batches_broadcast(any_backend: BackendUnderTest, form: str) -> None:
    torch.manual_seed(3)
    sizes = ((4, 3, 8), (2, 5, 8), (2, 5, 6))
    inputs = [
        torch.randn(*batch, *size, device=any_backend.device, requires_grad=True)
        for batch, size in zip(BATCHES[form], sizes, strict=True)
    ]
    batch = torch.broadcast_shapes(*BATCHES[form])
    expanded = [x.expand(*batch, *size) for x, size in zip(inputs, sizes, strict=True)]
    output, expected = mha_ext.attention(*inputs), mha_ext.attention(*expanded)
    assert output.shape == (*batch, 4, 3, 6)
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(output)
    for ours, theirs in zip(
        torch.autograd.grad(output, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_batches_without_heads_broadcast() -> None:
    query, key = torch.randn(3, 8), torch.randn(4, 5, 8)
    torch.testing.assert_close(
        mha_ext.attention(query, key, key[:1]), mha_ext.attention(query.expand(4, 3, 8), key, key[:1].expand(4, 5, 8))
    )
