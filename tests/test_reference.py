"""`mha_ext.reference` against the definition in fp64 and against torch's own math attention."""

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from accuracy import FLOOR, assert_accurate
from cases import RULES, Case, Shape, leaves, make_inputs, pairs_of_rules, statistics_dtype
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mha_ext import reference

PAIRS = pairs_of_rules()


def check_against_oracle(case: Case, seed: int = 0) -> None:
    """Everything that comes out and every gradient, in fp64."""
    inputs = make_inputs(case, torch.float64, seed=seed)
    if inputs.get("q_offset") == "end":  # the public function resolves it
        inputs["q_offset"] = case.shape.seqlen_kv - case.shape.seqlen_q
    wanted = leaves(inputs)
    result = reference.attention(**inputs)
    expected = oracle.attention(**inputs)
    for name, ours in result._asdict().items():
        np.testing.assert_allclose(oracle.to_array(ours), getattr(expected, name), rtol=1e-12, atol=1e-13, err_msg=name)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in result[:3]]
    computed = torch.autograd.grad(result[:3], list(wanted.values()), grads)
    exact = oracle.gradients(
        **inputs, grad_output=grads[0], grad_lse=grads[1].masked_fill(result.lse == -math.inf, 0), grad_weights=grads[2]
    )
    for name, ours in zip(wanted, computed, strict=True):
        np.testing.assert_allclose(ours, exact[name], rtol=1e-11, atol=1e-12, err_msg=f"gradient of {name}")


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.name)
def test_two_rules_at_once_follow_the_definition(case: Case) -> None:
    check_against_oracle(case)


def test_every_rule_meets_every_other() -> None:
    """The pairs left out are those that set the same argument."""
    met = {frozenset(case.rules) for case in PAIRS}
    assert len(met) == len(PAIRS) > 90
    assert {name for pair in met for name in pair} == set(RULES)


@pytest.mark.parametrize("seed", range(5))
def test_all_rules_at_once_follow_the_definition(seed: int) -> None:
    rules = ("bias_hides", "causal_offsets", "window", "lengths", "alibi_by_batch", "softcap", "sinks", "scale")
    check_against_oracle(Case("", Shape(3, 6, 2, 7, 12, 5, 4), rules), seed)


# --- torch's math attention ----------------------------------------------------------------------------

SDPA_RULES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "causal": ("causal",),
    "scale": ("scale",),
    "bool_mask": ("bool_mask",),
    "key_padding": ("key_padding",),
    "bias": ("bias",),
    "bias_by_head": ("bias_by_head",),
    "bias_scale": ("bias", "scale"),
}


@pytest.mark.parametrize("dtype", FLOOR, ids=str)
@pytest.mark.parametrize("rules", SDPA_RULES.values(), ids=SDPA_RULES)
@pytest.mark.parametrize(
    "shape", [Shape(2, 4, 2, 33, 47, 24, 40), Shape(1, 2, 2, 128, 128, 64, 64)], ids=["gqa", "square"]
)
def test_as_accurate_as_torchs_math_attention(shape: Shape, rules: tuple[str, ...], dtype: torch.dtype) -> None:
    """Values and gradients; the yardstick is fp64 by torch on the same rounded inputs."""

    def run(function: Any, cast: torch.dtype) -> list[Tensor]:
        inputs = make_inputs(Case("", shape, rules), dtype)
        if "bool_mask" in rules:  # torch 2.13 gives a row that sees no key other gradients
            inputs["attn_mask"][..., 0] = True
        inputs = {
            name: x.to(cast) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()
        }
        wanted = leaves(inputs)
        output = function(**inputs)
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(output.shape, generator=generator).to(dtype).to(cast)
        return [output, *torch.autograd.grad(output, list(wanted.values()), grad)]

    def math_attention(**inputs: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(**inputs, enable_gqa=True)

    ours = run(lambda **inputs: reference.attention(**inputs).output, dtype)
    theirs = run(math_attention, dtype)
    exact = run(math_attention, torch.float64)
    for index, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert a.dtype == b.dtype == dtype
        assert_accurate(a, oracle.to_array(c), b, FLOOR[dtype] / 4, f"result {index}")


# --- dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_accumulate_dtype_changes_the_rounding_and_nothing_else(dtype: torch.dtype) -> None:
    """In fp64, the one rounding at the end is all that remains; statistics are in that dtype."""
    inputs = make_inputs(Case("", Shape(2, 4, 2, 9, 31, 16, 16), ("bias", "sinks")), dtype)
    expected = oracle.attention(**inputs)
    result = reference.attention(**inputs, accumulate_dtype=torch.float64)
    assert result.output.dtype == result.weights.dtype == dtype
    assert result.lse.dtype == result.max_score.dtype == result.entropy.dtype == torch.float64
    np.testing.assert_allclose(result.lse, expected.lse, rtol=1e-13)
    rounded = torch.from_numpy(expected.output).to(dtype)
    assert (result.output != rounded).float().mean() < 0.01  # fp64 itself may fall on the other side of a tie
    default = reference.attention(**inputs)
    assert default.lse.dtype == statistics_dtype(dtype)
    torch.testing.assert_close(default.output, result.output)


def test_accumulating_in_half_precision_is_worse() -> None:
    """So the argument does something, and single precision is what protects half inputs."""
    inputs = make_inputs(Case("", Shape(1, 2, 2, 16, 256, 64, 64)), torch.bfloat16)
    expected = oracle.attention(**inputs).output
    errors = [
        np.abs(oracle.to_array(reference.attention(**inputs, accumulate_dtype=dtype).output) - expected).max()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert errors[0] * 2 < errors[1]


def test_keys_and_values_are_never_repeated_in_memory() -> None:
    """One key head of 64: the largest tensor that autograd keeps is as large as the scores, not 64 keys."""
    query = torch.randn(1, 64, 1, 8, requires_grad=True)
    key = torch.randn(1, 1, 512, 8, requires_grad=True)
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        reference.attention(query, key, key)
    assert max(sizes) <= 64 * 512 * 4
    assert 64 * 512 * 8 * 4 not in sizes


def test_parts_of_the_reference_follow_the_definition() -> None:
    inputs = make_inputs(Case("", Shape(2, 4, 2, 6, 8, 4, 3), ("bias_hides", "alibi", "sinks")), torch.float64)
    expected = oracle.attention(**inputs)
    query, key, value = (inputs.pop(name) for name in ("query", "key", "value"))
    softmax = reference.masked_softmax(reference.attention_scores(query, key), **inputs)
    np.testing.assert_allclose(softmax.weights, expected.weights, rtol=1e-12)
    np.testing.assert_allclose(softmax.lse, expected.lse, rtol=1e-12)
    np.testing.assert_allclose(reference.attention_output(softmax.dropped, value), expected.output, rtol=1e-12)


@pytest.mark.parametrize("offset", [0, 1, 5000, 2**31 + 5, -3, -(2**40)])
def test_offsets_far_beyond_the_keys(offset: int) -> None:
    inputs = make_inputs(Case("", Shape(1, 1, 1, 3, 4, 2, 2)), torch.float64)
    for rule in ({"is_causal": True}, {"window": (2, None)}, {"window": (None, 1)}):
        result = reference.attention(**inputs, q_offset=offset, **rule)
        expected = oracle.attention(**inputs, q_offset=offset, **rule)
        np.testing.assert_allclose(result.weights, expected.weights, rtol=1e-12)


def test_great_scores_neither_overflow_nor_lose_the_sum() -> None:
    scores = torch.tensor([[[[1e30, 1e30, -1e30], [-1e30, -1e30, -1e30], [700.0, 0.0, 0.0]]]])
    softmax = reference.masked_softmax(scores, sinks=torch.tensor([-1e30]))
    expected = torch.tensor([[0.5, 0.5, 0], [0.25, 0.25, 0.25], [1, 0, 0]])
    torch.testing.assert_close(softmax.weights[0, 0], expected)
    assert softmax.lse.isfinite().all()
