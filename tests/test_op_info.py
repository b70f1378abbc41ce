"""Torch's own samples of `scaled_dot_product_attention` (OpInfo), word for word on `mha_ext.attention`, and on torch's
function after activation.

They have no error inputs; what torch refuses is listed here.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from accuracy import FLOOR, assert_accurate
from hypothesis import settings
from oracle import to_array
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import mha_ext
from mha_ext import _extension
from mha_ext.integrations import sdpa as provider

pytestmark = pytest.mark.filterwarnings("ignore:Dropout mask should only be used for testing")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
math = torch.ops.aten._scaled_dot_product_attention_math.default


class Sample(NamedTuple):
    """A call."""

    inputs: tuple[Tensor, Tensor, Tensor]
    named: dict[str, Any]

    def __str__(self) -> str:
        named = {name: tuple(x.shape) if isinstance(x, Tensor) else x for name, x in self.named.items()}
        return f"{[tuple(x.shape) for x in self.inputs]}, {named}"


@functools.cache
def op_info() -> Any:
    if not os.environ.get("CI"):
        pytest.importorskip("expecttest", reason="torch.testing._internal imports it")
    from torch.testing._internal.common_methods_invocations import op_db

    settings.load_profile("mha_ext")  # that import has put torch's in force

    (found,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    return found


def samples(dtype: torch.dtype, grad: bool) -> list[Sample]:
    made = op_info().sample_inputs("cpu", dtype, requires_grad=grad)
    return [Sample((x.input, *x.args), x.kwargs) for x in made]


def results(function: Callable[..., Any], sample: Sample, grad: bool) -> list[Tensor]:
    """Output, and the gradients of all that requires one."""
    torch.manual_seed(11)
    output = function(*sample.inputs, **sample.named)
    leaves = [x for x in (*sample.inputs, sample.named.get("attn_mask")) if x is not None]
    assert all(x.requires_grad is grad for x in leaves)
    if not grad:
        return [output]
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights)]


def cast(sample: Sample, dtype: torch.dtype) -> Sample:
    def leaf(x: Any) -> Any:
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    return Sample(tuple(map(leaf, sample.inputs)), {name: leaf(x) for name, x in sample.named.items()})


def kept(sample: Sample) -> Tensor | None:
    """Which weights the dropout of a call keeps: it depends on the generator and on the place of a weight alone."""
    if not sample.named["dropout_p"]:
        return None
    query, key, _ = (x.detach() for x in sample.inputs)
    torch.manual_seed(11)
    ones = torch.eye(key.shape[-2], dtype=key.dtype).expand(*key.shape[:-1], -1)
    zero = torch.zeros_like(query), torch.zeros_like(key)  # of equal weights none is 0 by itself
    return mha_ext.attention(*zero, ones, **{**sample.named, "is_causal": False}) != 0


def by_formula(sample: Sample, mask: Tensor | None) -> tuple[list[Tensor], float]:
    """Output and gradients as FlashAttention's formula has them, from the output in the inputs' dtype; and the size of
    the products whose differences the gradients are.
    """
    wide = torch.float64 if sample.inputs[0].dtype == torch.float64 else torch.float32
    query, key, value = (x.detach().to(wide) for x in sample.inputs)
    named, scale = sample.named, query.shape[-1] ** -0.5
    keep = (1 if mask is None else mask.to(wide)) / (1 - named["dropout_p"])
    bias = named.get("attn_mask")
    scores = query @ key.mT * scale + (0 if bias is None else bias.detach().to(wide))
    if named["is_causal"]:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    output = ((weights * keep) @ value).to(sample.inputs[0].dtype)
    grad = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype).to(wide)
    grad_weights = grad @ value.mT * keep
    grad_scores = weights * (grad_weights - (grad * output).sum(-1, keepdim=True))
    products = (grad_scores @ key * scale, grad_scores.mT @ query * scale, (weights * keep).mT @ grad)
    gradients = [x.sum_to_size(like.shape) for x, like in zip(products, sample.inputs, strict=True)]
    if bias is not None:
        gradients.append(grad_scores.sum_to_size(bias.shape))
    return [output, *gradients], (grad_weights.abs().max() * max(query.abs().max(), key.abs().max()) * scale).item()


def check(sample: Sample, grad: bool) -> None:
    """Against torch's plain attention in fp64, which gets the same draws.

    The samples' scores are large, weights close to 0 and 1, and the gradients of scores small differences of large
    products. What rounds these is not the dtype alone but the formula: the yardstick is the worse of torch's plain
    attention and the formula of all attention that does not keep the weights, torch's fused one included.
    """
    dtype = sample.inputs[0].dtype
    mask = kept(sample)

    def plain(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
        return math(query, key, value, dropout_mask=mask, **named)[0]

    expected = [to_array(x) for x in results(plain, cast(sample, torch.float64), grad)]
    formula, products = by_formula(sample, mask)
    names = ("output", "gradient of query", "gradient of key", "gradient of value", "gradient of the mask")
    columns = (names, results(mha_ext.attention, sample, grad), expected, results(plain, sample, grad), formula)
    for name, ours, wanted, by_torch, by_hand in zip(*columns, strict=False):
        assert ours.dtype == dtype
        yardstick = max(by_torch, by_hand, key=lambda x: np.abs(to_array(x) - wanted).max())
        floor = FLOOR[dtype]
        if name not in ("output", "gradient of value"):
            floor += FLOOR[torch.promote_types(dtype, torch.float32)] * products / np.abs(wanted).max()
        assert_accurate(ours, wanted, yardstick, floor, f"{name} of {sample}")


@pytest.mark.parametrize("grad", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_torchs_on_torchs_samples(dtype: torch.dtype, grad: bool) -> None:
    every = samples(dtype, grad)
    for sample in every:
        check(sample, grad)
    assert len(every) >= 25


@pytest.mark.skipif(_extension.extension is None, reason="no extension was built")
@pytest.mark.parametrize("grad", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_function_after_activation_takes_every_sample(dtype: torch.dtype, grad: bool) -> None:
    """As attention does, or as torch itself does."""
    for sample in samples(dtype, grad):
        expected = results(sdpa if dtype == torch.float64 else mha_ext.attention, sample, grad)
        handle = provider.activate()
        try:
            actual = results(sdpa, sample, grad)
        finally:
            handle.remove()
        for x, y in zip(actual, expected, strict=True):
            assert torch.equal(x, y), str(sample)


def test_derivatives_of_the_samples() -> None:
    """Forward mode and second derivatives too, of which torch's own attention has no forward mode."""
    done = 0
    for sample in samples(torch.float64, True):
        mask = sample.named.get("attn_mask")

        def function(*tensors: Tensor, sample: Sample = sample) -> Any:
            torch.manual_seed(11)
            named = {**sample.named, **({"attn_mask": tensors[3]} if len(tensors) > 3 else {})}
            return mha_ext.attention(*tensors[:3], **named)

        tensors = sample.inputs if mask is None else (*sample.inputs, mask)
        assert torch.autograd.gradcheck(function, tensors, fast_mode=True, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)
        done += 1
    assert done >= 25


Q, K, V = (torch.randn(2, 4, length, 8) for length in (3, 6, 6))
MASK = torch.ones(3, 6, dtype=torch.bool)
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one axis": ((Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0]), {}),
    "dtypes that differ": ((Q, K, V.half()), {}),
    "devices that differ": ((Q, K, V.to("meta")), {}),
    "head dimensions that differ": ((Q, K[..., :4], V), {}),
    "heads that do not divide": ((Q, K[:, :3], V[:, :3]), {"enable_gqa": True}),
    "mask of another shape": ((Q, K, V, MASK[:, 1:]), {}),
    "mask of integers": ((Q, K, V, MASK.long()), {}),
    "mask that is no tensor": ((Q, K, V, 1.0), {}),
    "integers": ((Q.long(), K.long(), V.long()), {}),
    "dropout_p over 1": ((Q, K, V), {"dropout_p": 1.5}),
    "no tensor": ((Q.tolist(), K, V), {}),
}
ACCEPTED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "mask and is_causal: a key is seen where both let it": ((Q, K, V, MASK), {"is_causal": True}),
    "mask of half precision": ((Q, K, V, MASK.half()), {}),
    "groups of heads without permission": ((Q, K[:, :2], V[:, :2]), {}),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_torch_refuses_is_refused_with_a_name(form: str) -> None:
    tensors, named = REFUSED[form]
    with pytest.raises((RuntimeError, TypeError, ValueError, IndexError)):
        sdpa(*tensors, **named)
    with pytest.raises((TypeError, ValueError), match=r"^[a-z_]+: expected .* got "):
        mha_ext.attention(*tensors, **named)


@pytest.mark.parametrize("form", ACCEPTED)
def test_what_torch_refuses_and_attention_takes(form: str) -> None:
    tensors, named = ACCEPTED[form]
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError):  # of torch's kernels for the CPU some take it
        sdpa(*tensors, **named)
    output = mha_ext.attention(*tensors, **named)
    assert isinstance(output, Tensor)
    assert output.shape == Q.shape
