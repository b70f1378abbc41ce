"""torch.ops.mha_ext.qkv_split and qkv_merge, against the reference."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mha_ext import reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# (batch, seqlen, num_heads, num_kv_heads, head_dim): whole packs of 16 bytes, broken ones, grouped heads, one head.
SHAPES = {
    "packs": (2, 37, 4, 4, 64),
    "grouped heads": (2, 9, 8, 2, 32),
    "broken packs": (3, 11, 3, 1, 6),
    "odd head": (1, 5, 2, 2, 7),
    "head of one": (2, 3, 1, 1, 1),
    "several row chunks": (3, 50, 2, 1, 16),
    "no tokens": (2, 0, 2, 1, 8),
    "no batch": (0, 4, 2, 1, 8),
}


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_split(kernels: str, name: str, dtype: torch.dtype, with_bias: bool) -> None:
    batch, seqlen, num_heads, num_kv_heads, head_dim = SHAPES[name]
    columns = (num_heads + 2 * num_kv_heads) * head_dim
    packed = random((batch, seqlen, columns), dtype, kernels)
    bias = random((columns,), dtype, kernels) if with_bias else None
    ours = torch.ops.mha_ext.qkv_split(packed, bias, num_heads, num_kv_heads)
    for mine, right in zip(ours, reference.qkv_split(packed, bias, num_heads, num_kv_heads), strict=True):
        assert mine.is_contiguous()
        assert mine.shape == right.shape
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_takes_any_strides(kernels: str, dtype: torch.dtype) -> None:
    contiguous = random((3, 5, 4 * 16), dtype, kernels)
    bias = random((4 * 16 + 1,), dtype, kernels)
    padded = torch.full((3, 5, 4 * 16 + 16), math.nan, dtype=dtype, device=kernels)[..., :64].copy_(contiguous)
    shifted = torch.full((3, 5, 4 * 16 + 1), math.nan, dtype=dtype, device=kernels)[..., 1:].copy_(contiguous)
    swapped = contiguous.transpose(0, 1).contiguous().transpose(0, 1)
    expanded = contiguous[:1].expand(3, 5, 64)
    for packed in (padded, shifted, swapped, expanded):
        for offset in (0, 1):  # a bias that is not aligned to a pack
            part = bias[offset : offset + 64]
            ours = torch.ops.mha_ext.qkv_split(packed, part, 2, 1)
            for mine, right in zip(ours, reference.qkv_split(packed, part, 2, 1), strict=True):
                torch.testing.assert_close(mine, right, rtol=0, atol=0)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_grad", [False, True])
def test_merge(kernels: str, name: str, dtype: torch.dtype, bias_grad: bool) -> None:
    batch, seqlen, num_heads, num_kv_heads, head_dim = SHAPES[name]
    heads = (num_heads, num_kv_heads, num_kv_heads)
    grads = [random((batch, h, seqlen, head_dim), dtype, kernels) for h in heads]
    check_merge(grads, bias_grad)


def check_merge(grads: list[Tensor], bias_grad: bool) -> None:
    batch, _, seqlen, head_dim = grads[0].shape
    columns = sum(x.shape[1] for x in grads) * head_dim
    grad_packed, grad_bias = torch.ops.mha_ext.qkv_merge(*grads, bias_grad)
    exact = torch.cat(grads, 1).transpose(1, 2).reshape(batch, seqlen, columns)
    torch.testing.assert_close(grad_packed, exact, rtol=0, atol=0)
    assert grad_bias.dtype == grads[0].dtype
    if not bias_grad:
        assert grad_bias.shape == (0,)
        return
    right = exact.double().sum((0, 1))
    # fp32 sums, rounded once
    precision = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5, torch.float64: 1e-14}[grad_bias.dtype]
    torch.testing.assert_close(grad_bias.double(), right, rtol=precision, atol=precision)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_takes_any_strides(kernels: str, dtype: torch.dtype) -> None:
    shape = (2, 2, 6, 16)
    contiguous = random(shape, dtype, kernels)
    token_major = contiguous.transpose(1, 2).contiguous().transpose(1, 2)
    padded = torch.full((2, 2, 6, 24), math.nan, dtype=dtype, device=kernels)[..., :16].copy_(contiguous)
    shifted = torch.full((2, 2, 6, 17), math.nan, dtype=dtype, device=kernels)[..., 1:].copy_(contiguous)
    for expanded in (contiguous[:, :1].expand(shape), contiguous[:1].expand(shape), contiguous[:, :, :1].expand(shape)):
        check_merge([token_major, padded, expanded], True)
        check_merge([expanded, contiguous, shifted], True)


def test_merge_adds_many_rows(kernels: str) -> None:
    """More rows than chunks of 32 rows may be: chunks grow, and the sum stays one of fp32."""
    grad = random((1, 1, 33000, 1), torch.float16, kernels)
    check_merge([grad, grad, grad], True)


def test_merge_is_deterministic(kernels: str) -> None:
    grads = [random((4, 2, 100, 8), torch.float32, kernels) for _ in range(3)]
    first = torch.ops.mha_ext.qkv_merge(*grads, True)
    second = torch.ops.mha_ext.qkv_merge(*grads, True)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_refuses(kernels: str) -> None:
    def split(packed: Tensor, bias: Tensor | None = None, heads: tuple[int, int] = (2, 1)) -> Any:
        return torch.ops.mha_ext.qkv_split(packed.to(kernels), None if bias is None else bias.to(kernels), *heads)

    with pytest.raises(ValueError, match="packed: expected 3 dimensions, got 2"):
        split(torch.zeros(2, 8))
    with pytest.raises(TypeError, match=r"packed: expected dtype .* got Long"):
        split(torch.zeros(1, 2, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"packed: expected a last axis that is a multiple of 4 .* got 10"):
        split(torch.zeros(1, 2, 10))
    with pytest.raises(ValueError, match="packed: expected a last axis of stride 1"):
        split(torch.zeros(1, 8, 3).mT)
    with pytest.raises(ValueError, match="num_heads: expected a positive number, got 0"):
        split(torch.zeros(1, 2, 8), heads=(0, 1))
    with pytest.raises(ValueError, match=r"bias: expected shape \[8\], got \[7\]"):
        split(torch.zeros(1, 2, 8), torch.zeros(7))
    with pytest.raises(TypeError, match="bias: expected dtype Float, got Half"):
        split(torch.zeros(1, 2, 8), torch.zeros(8).half())
    grad = torch.zeros(1, 2, 3, 4, device=kernels)
    with pytest.raises(ValueError, match=r"grad_value: expected shape \[1, 2, 3, 4\], got \[1, 2, 3, 5\]"):
        torch.ops.mha_ext.qkv_merge(grad, grad, torch.zeros(1, 2, 3, 5, device=kernels), True)
    with pytest.raises(TypeError, match="grad_key: expected dtype Float, got Half"):
        torch.ops.mha_ext.qkv_merge(grad, grad.half(), grad, True)
