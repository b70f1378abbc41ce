"""What the fused kernels do, held near their ideal by the simulator's counters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Count
from torch import Tensor

import mha_ext

LENGTH, HEADS = 1024, 2
pytestmark = pytest.mark.usefixtures("fused")


def one(records: list[Any], name: str) -> Any:
    (record,) = [record for record in records if name in record.kernel]
    return record


def tensors(heads: int, heads_kv: int, seqlen_q: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = ((1, heads, seqlen_q, head_dim), (1, heads_kv, LENGTH, head_dim), (1, heads_kv, LENGTH, head_dim))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def nbytes(*xs: Tensor) -> int:
    return sum(x.numel() * x.itemsize for x in xs)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_forward(count: Count, dtype: torch.dtype, head_dim: int, is_causal: bool) -> None:
    """No product in vain, no bank met twice, keys and values read once for each tile of 128 queries."""
    query, key, value = tensors(HEADS, HEADS, LENGTH, head_dim, dtype)
    done = one(count(lambda: mha_ext.attention(query, key, value, is_causal=is_causal)), "attention_fwd")
    ideal = 4 * HEADS * LENGTH**2 * head_dim / (2 if is_causal else 1)
    assert done.tensor_flops <= (1.125 if is_causal else 1.02) * ideal
    assert done.wavefronts_per_load == 1
    assert done.wavefronts_per_store == 1
    read = nbytes(query) + nbytes(key, value) * LENGTH // 128 * (0.5625 if is_causal else 1)
    assert done.cp_async_bytes == read
    assert done.global_load_sectors * 32 <= 1.02 * read
    assert done.global_store_sectors * 32 <= 1.02 * (nbytes(query) + 4 * HEADS * LENGTH)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_backward(count: Count, dtype: torch.dtype, head_dim: int, is_causal: bool) -> None:
    """Five products and no more, no bank met twice."""
    inputs = [x.requires_grad_() for x in tensors(HEADS, HEADS, LENGTH, head_dim, dtype)]
    output = mha_ext.attention(*inputs, is_causal=is_causal)
    grad = torch.randn_like(output)
    done = one(count(lambda: torch.autograd.grad(output, inputs, grad)), "attention_bwd_sm80")
    ideal = 10 * HEADS * LENGTH**2 * head_dim / (2 if is_causal else 1)
    assert done.tensor_flops <= (1.125 if is_causal else 1.02) * ideal
    assert done.wavefronts_per_load == 1
    assert done.wavefronts_per_store == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_bool_mask_of_blocks_is_block_sparse_attention(count: Count, dtype: torch.dtype) -> None:
    """Of 8 x 16 tiles of scores, each query tile sees 2 whole ones and half of a third: the others are not computed."""
    query, key, value = (x.requires_grad_() for x in tensors(1, 1, LENGTH, 64, dtype))
    tile = torch.arange(LENGTH) // 128
    begin = (tile * 128)[:, None]
    columns = torch.arange(LENGTH)
    mask = (columns >= begin) & (columns < begin + 128) | (columns < 32)
    dense = count(lambda: mha_ext.attention(query, key, value))
    sparse = count(lambda: mha_ext.attention(query, key, value, mask))
    flops = [one(records, "attention_fwd").tensor_flops for records in (dense, sparse)]
    visited = 2 * 8 + 7  # tiles of 128 x 64
    assert flops[1] == flops[0] * visited // 128
    output = mha_ext.attention(query, key, value, mask)
    torch.testing.assert_close(
        output, mha_ext.attention(query, key, value, mask, backend="reference"), rtol=1e-2, atol=1e-2
    )


def test_a_window_is_linear_in_the_length(count: Count) -> None:
    query, key, value = tensors(1, 1, LENGTH, 64, torch.float16)
    done = one(count(lambda: mha_ext.attention(query, key, value, window=(127, 0))), "attention_fwd")
    seen = LENGTH * 128 - 128 * 127 // 2
    assert done.tensor_flops <= 1.55 * 4 * seen * 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_group_of_heads_reads_its_keys_once(count: Count, dtype: torch.dtype) -> None:
    """Eight query heads of one key head, four queries each, fit in a tile."""
    query, key, value = tensors(8, 1, 4, 64, dtype)
    done = one(count(lambda: mha_ext.attention(query, key, value)), "attention_fwd")
    assert done.global_load_sectors * 32 <= 1.02 * nbytes(query, key, value)


def test_packed_sequences_compute_nothing_between_them(count: Count) -> None:
    query, key, value = (torch.randn(LENGTH, 1, 64).half() for _ in range(3))
    cu_seqlens = torch.tensor([0, 512, 512, 640, 1024], dtype=torch.int32)
    done = one(count(lambda: mha_ext.attention_varlen(query, key, value, cu_seqlens, cu_seqlens)), "attention_fwd")
    assert done.tensor_flops == 4 * (512**2 + 128**2 + 384**2) * 64
