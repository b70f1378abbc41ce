"""The gradient of a float attn_mask by the fused kernels, for every way to broadcast it and every score rule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from accuracy import FLOOR as PLAIN_FLOOR
from accuracy import assert_accurate, plain_attention
from cases import RULES, Case, Count, Shape, make_inputs
from torch import Tensor

import mha_ext

# Three products of TF32 parts leave out a fourth: twice the error of plain fp32.
FLOOR = {**PLAIN_FLOOR, torch.float32: 4e-6}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

# Which axes of (B, Hq, Lq, Lk) the mask has of its own.
BROADCASTS = {
    "bhqk": (True, True, True, True),
    "hqk": (False, True, True, True),
    "bqk": (True, False, True, True),
    "qk": (False, False, True, True),
    "bk": (True, False, False, True),
    "hk": (False, True, False, True),
    "k": (False, False, False, True),
    "bhq": (True, True, True, False),
    "none": (False, False, False, False),
}
SMALL = Shape(2, 4, 2, 19, 21, 24, 40)
SHAPES = {
    "one": Shape(1, 1, 1, 1, 1, 1, 1),
    "full_tile": Shape(1, 1, 1, 128, 64, 64, 64),
    "past_a_tile": Shape(2, 2, 1, 129, 65, 72, 65),
    "odd": Shape(1, 3, 1, 5, 67, 100, 17),
    "wide": Shape(1, 1, 1, 7, 9, 256, 200),
    "narrow": Shape(2, 2, 2, 33, 130, 1, 3),
}
SCORE_RULES = [name for name in RULES if name not in ("bool_mask", "key_padding", "bias", "bias_hides", "bias_by_head")]


def with_mask(
    shape: Shape, own_axes: tuple[bool, ...], dtype: torch.dtype, device: str, rules: tuple[str, ...] = (),
    mask_dtype: torch.dtype | None = None, hidden: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `attention` with a float mask, of which a part hides."""
    inputs = make_inputs(Case("", shape, rules), dtype, device)
    generator = torch.Generator().manual_seed(1)
    sizes = [size if own else 1 for size, own in zip(shape.scores, own_axes, strict=True)]
    mask = torch.randn(sizes, generator=generator)
    mask = mask.masked_fill(torch.rand(sizes, generator=generator) < hidden, -math.inf)
    inputs["attn_mask"] = mask.to(device, mask_dtype or dtype)
    return inputs


def output_grads(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    query = inputs["query"]
    rows = query.shape[:3]
    grad_output = torch.randn((*rows, inputs["value"].shape[3]), generator=generator).to(query)
    return grad_output, torch.randn(rows, generator=generator).to(query.device)


def mask_gradient(inputs: dict[str, Any], **arguments: Any) -> Tensor:
    mask = inputs["attn_mask"].detach().requires_grad_()
    result = mha_ext.attention(**{**inputs, "attn_mask": mask}, **arguments, return_lse=True)
    grad_output, grad_lse = output_grads(inputs)
    grad_lse[result.lse.detach() == -math.inf] = 0  # such a row has no derivative
    (gradient,) = torch.autograd.grad((result.output, result.lse), mask, (grad_output, grad_lse))
    assert gradient.dtype == mask.dtype
    return gradient


def exact_gradient(inputs: dict[str, Any], **arguments: Any) -> Any:
    grad_output, grad_lse = output_grads(inputs)
    expected = oracle.attention(**inputs, **arguments)
    grad_lse[torch.from_numpy(np.isneginf(expected.lse))] = 0
    return oracle.gradients(**inputs, **arguments, grad_output=grad_output, grad_lse=grad_lse)["attn_mask"]


def plain_gradient(inputs: dict[str, Any]) -> Tensor:
    mask = inputs["attn_mask"].detach().requires_grad_()
    output, lse, _ = plain_attention(**{**inputs, "attn_mask": mask})
    grad_output, grad_lse = output_grads(inputs)
    grad_lse[lse.detach() == -math.inf] = 0
    return torch.autograd.grad((output, lse), mask, (grad_output, grad_lse.to(lse.dtype)))[0].nan_to_num(0.0)


def check(inputs: dict[str, Any]) -> None:
    floor = FLOOR[inputs["query"].dtype]
    assert_accurate(mask_gradient(inputs), exact_gradient(inputs), plain_gradient(inputs), floor, "gradient")


@pytest.mark.parametrize("own_axes", BROADCASTS.values(), ids=BROADCASTS)
@every_dtype
def test_what_the_mask_repeats_is_summed(fused: str, own_axes: tuple[bool, ...], dtype: torch.dtype) -> None:
    check(with_mask(SMALL, own_axes, dtype, fused))


@pytest.mark.parametrize("own_axes", [BROADCASTS["hqk"], BROADCASTS["bk"]], ids=["hqk", "bk"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@every_dtype
def test_shapes(fused: str, shape: Shape, own_axes: tuple[bool, ...], dtype: torch.dtype) -> None:
    check(with_mask(shape, own_axes, dtype, fused))


@pytest.mark.parametrize("own_axes", [BROADCASTS["bqk"], BROADCASTS["k"]], ids=["bqk", "k"])
@pytest.mark.parametrize("rule", SCORE_RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_score_rules(fused: str, rule: str, own_axes: tuple[bool, ...], dtype: torch.dtype) -> None:
    check(with_mask(SMALL, own_axes, dtype, fused, (rule,)))


@pytest.mark.parametrize("own_axes", [BROADCASTS["hqk"], BROADCASTS["bk"]], ids=["hqk", "bk"])
@every_dtype
def test_all_rules_together(fused: str, own_axes: tuple[bool, ...], dtype: torch.dtype) -> None:
    rules = ("causal_offsets", "window_left", "lengths", "alibi_by_batch", "softcap", "sinks", "scale")
    check(with_mask(Shape(2, 4, 2, 140, 70, 16, 24), own_axes, dtype, fused, rules, hidden=0.2))


@pytest.mark.parametrize("own_axes", BROADCASTS.values(), ids=BROADCASTS)
def test_a_mask_that_hides(fused: str, own_axes: tuple[bool, ...]) -> None:
    """Gradients are 0 where the mask is -inf, and so are those of a query that sees nothing."""
    inputs = with_mask(SMALL, own_axes, torch.float16, fused, hidden=0.5)
    if own_axes[2]:
        inputs["attn_mask"][:, :, 3] = -math.inf
    check(inputs)
    gradient = mask_gradient(inputs)
    assert (gradient[inputs["attn_mask"] == -math.inf] == 0).all()


@pytest.mark.parametrize("mask_dtype", DTYPES, ids=str)
def test_a_mask_of_another_dtype(fused: str, mask_dtype: torch.dtype) -> None:
    inputs = with_mask(SMALL, BROADCASTS["hqk"], torch.float16, fused, mask_dtype=mask_dtype)
    floor = max(FLOOR[torch.float16], FLOOR[mask_dtype])
    assert_accurate(mask_gradient(inputs), exact_gradient(inputs), plain_gradient(inputs), floor)


def test_a_strided_mask(fused: str) -> None:
    inputs = with_mask(SMALL, BROADCASTS["bqk"], torch.float16, fused)
    expected = mask_gradient(inputs)
    transposed = inputs["attn_mask"].mT.contiguous().mT
    assert torch.equal(mask_gradient({**inputs, "attn_mask": transposed}), expected)


@pytest.mark.parametrize("own_axes", [BROADCASTS["bhqk"], BROADCASTS["hk"]], ids=["bhqk", "hk"])
@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dropout(fused: str, own_axes: tuple[bool, ...], dropout_p: float, dtype: torch.dtype) -> None:
    inputs = with_mask(Shape(2, 2, 1, 37, 70, 16, 16), own_axes, dtype, fused)
    torch.manual_seed(5)
    rng_state = mha_ext.reference.draw_rng_state(torch.device(fused))
    torch.manual_seed(5)
    ours = mask_gradient(inputs, dropout_p=dropout_p)
    exact = exact_gradient(inputs, dropout_p=dropout_p, rng_state=rng_state)
    assert_accurate(ours, exact, None, 8 * FLOOR[dtype])


@every_dtype
def test_what_a_key_mask_hides_may_be_nan(fused: str, dtype: torch.dtype) -> None:
    inputs = with_mask(SMALL, BROADCASTS["bk"], dtype, fused, hidden=0.5)
    expected = mask_gradient(inputs)
    hidden = (inputs["attn_mask"] == -math.inf).mT
    for name in ("key", "value"):
        inputs[name] = inputs[name].masked_fill(hidden, math.nan)
    assert torch.equal(mask_gradient(inputs), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_of_the_smallest_number_is_uniform(fused: str, dtype: torch.dtype) -> None:
    inputs = with_mask(SMALL, BROADCASTS["hqk"], dtype, fused)
    inputs["attn_mask"][:, :, 2] = torch.finfo(dtype).min
    exact = exact_gradient(inputs)
    assert_accurate(mask_gradient(inputs), exact, None, 8 * FLOOR[dtype])
    assert np.abs(exact[:, :, 2]).max() > 0.01


@pytest.mark.parametrize("own_axes", [BROADCASTS["hqk"], BROADCASTS["k"]], ids=["hqk", "k"])
@every_dtype
def test_windows_of_an_image(fused: str, own_axes: tuple[bool, ...], dtype: torch.dtype) -> None:
    """One small bias for very many batches: blocks share its tiles, and their parts are summed afterwards."""
    check(with_mask(Shape(24, 2, 2, 49, 49, 32, 32), own_axes, dtype, fused))


@pytest.mark.parametrize("own_axes", [BROADCASTS["hqk"], BROADCASTS["k"]], ids=["hqk", "k"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_same_bits_whatever_runs_when(
    fused: str, simulator: Any, own_axes: tuple[bool, ...], dtype: torch.dtype
) -> None:
    inputs = with_mask(Shape(9, 2, 1, 70, 66, 16, 16), own_axes, dtype, fused)
    expected = mask_gradient(inputs)
    if simulator is None:
        assert all(torch.equal(mask_gradient(inputs), expected) for _ in range(20))
        return
    for seed in range(1, 4):
        with simulator.using(seed=seed, arrival="random", threads=2):
            assert torch.equal(mask_gradient(inputs), expected)


@every_dtype
def test_computes_no_more_than_two_products(fused: str, count: Count, dtype: torch.dtype) -> None:
    shape = Shape(1, 2, 1, 256, 128, 64, 64)
    inputs = with_mask(shape, BROADCASTS["hqk"], dtype, fused)
    (record,) = [r for r in count(lambda: mask_gradient(inputs)) if "attention_bwd_bias" in r.kernel]
    products = 3 if dtype == torch.float32 else 1
    scores = math.prod(shape.scores)
    assert record.tensor_flops == products * 2 * scores * (shape.head_dim + shape.head_dim_v)
    assert record.wavefronts_per_load == 1
    assert record.wavefronts_per_store == 1
