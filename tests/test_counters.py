"""What the kernels do, held at its ideal by the simulator's counters: tensor cores, shared memory, global memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Count
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = {
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
    "tf32": (torch.float32, True),
    "fp32": (torch.float32, False),
    "fp64": (torch.float64, False),
}
LAYOUTS = {"nn": (False, False), "nt": (False, True), "tn": (True, False)}
GOAL = 1.02

CountOne = Callable[[Callable[[], Any]], Any]


@pytest.fixture(name="count")
def count_one(kernels: str, count: Count) -> CountOne:
    """Runs a call that launches one kernel, and returns what it did."""

    def run(call: Callable[[], Any]) -> Any:
        (record,) = count(call)
        return record

    return run


def nbytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.itemsize for x in tensors)


def assert_moves(record: Any, read: int, written: int, goal: float = GOAL) -> None:
    """Global memory: every byte once, in whole sectors."""
    assert record.global_load_bytes == read
    assert record.global_store_bytes == written
    assert record.global_load_sectors * 32 <= goal * read
    assert (record.global_load_sectors + record.global_store_sectors) * 32 <= goal * (read + written)


def assert_wide(record: Any, load: int, store: int | None = None) -> None:
    """So many bytes a lane and access."""
    assert record.global_load_requests * 32 * load <= GOAL * record.global_load_bytes
    if store is not None:
        assert record.global_store_requests * 32 * store <= GOAL * record.global_store_bytes


# ---- matmul ----


@pytest.mark.parametrize(("kind", "width"), [*((kind, 64) for kind in KINDS), ("fp16", 128), ("bf16", 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matmul(count: CountOne, layout: str, kind: str, width: int) -> None:
    """At multiples of the tile nothing is computed in vain, no bank is met twice, and no sector is read in part."""
    dtype, allow_tf32 = KINDS[kind]
    transpose_a, transpose_b = LAYOUTS[layout]
    m, n, k, heads = (256, 64, 128, 2) if width == 64 else (128, 128, 64, 128)  # wide tiles: where there are many
    a = torch.randn(1, heads, *((k, m) if transpose_a else (m, k))).to(dtype)
    b = torch.randn(1, heads, *((n, k) if transpose_b else (k, n))).to(dtype)
    done = count(lambda: torch.ops.mha_ext.matmul(a, b, transpose_a, transpose_b, 1.0, heads, dtype, allow_tf32, None))

    tiles = heads * (m // 128) * (n // width)
    assert done.grid == (tiles, 1, 1)
    assert_moves(done, tiles * (128 + width) * k * dtype.itemsize, heads * m * n * dtype.itemsize)
    assert done.cp_async_bytes == done.global_load_bytes
    if kind in ("fp16", "bf16", "tf32"):
        assert done.tensor_flops <= GOAL * 2 * heads * m * n * k
        assert done.instructions["matrix_load"] or kind == "tf32"
        assert_wide(done, 16, min(16, 4 * dtype.itemsize))
    else:
        assert done.tensor_flops == 0
    assert done.shared_load_requests > 0
    assert done.wavefronts_per_load == 1
    assert done.shared_store_requests > 0  # those of cp.async
    assert done.wavefronts_per_store == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matmul_of_shared_heads(count: CountOne, dtype: torch.dtype) -> None:
    """Grouped queries: no more work, and no copy of the shared operand."""
    a, b = torch.randn(2, 4, 128, 64).to(dtype), torch.randn(2, 2, 64, 64).to(dtype)
    done = count(lambda: torch.ops.mha_ext.matmul(a, b, False, True, 1.0, 4, dtype, False, None))
    assert done.tensor_flops <= GOAL * 2 * 8 * 128 * 64 * 64
    assert_moves(done, 8 * (128 + 64) * 64 * 2, 8 * 128 * 64 * 2)
    scores = torch.randn(2, 4, 128, 128).to(dtype)  # sums over pairs of heads: the gradient of a shared key
    done = count(lambda: torch.ops.mha_ext.matmul(scores, a, True, False, 1.0, 2, dtype, False, None))
    assert done.tensor_flops <= GOAL * 2 * 8 * 128 * 64 * 128
    assert_moves(done, nbytes(scores, a), 4 * 128 * 64 * 2)


def test_matmul_with_float_out(count: CountOne) -> None:
    a, b = torch.randn(1, 1, 128, 64).half(), torch.randn(1, 1, 64, 64).half()
    done = count(lambda: torch.ops.mha_ext.matmul(a, b, False, True, 1.0, 1, torch.float32, False, None))
    assert_moves(done, nbytes(a, b), 128 * 64 * 4)


# ---- masked_softmax ----


def softmax_arguments(scores: Tensor, mask: Tensor | None, dropout_p: float, window_right: int) -> tuple[Any, ...]:
    rng_state = torch.tensor([1, 2]) if dropout_p else None
    rule = (mask, None, None, None, None, rng_state, 0, -1, window_right, 0.0)
    return (scores, *rule, dropout_p, scores.dtype, False)


# Rows of a warp, of 4 and of 8. In shorter ones the sector in which the row's lse lies weighs more than 2 %.
LENGTHS = (512, 1024, 2048, 8192)


def goal_of_rows(dtype: torch.dtype) -> float:
    """A lane holds four neighbours: those of fp64 are asked for in two halves, each a half of every sector."""
    return 2 * GOAL if dtype == torch.float64 else GOAL


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_softmax(count: CountOne, dtype: torch.dtype, length: int) -> None:
    """Scores are read once, weights and lse are written once."""
    scores = torch.randn(1, 2, 4, length).to(dtype)
    done = count(lambda: torch.ops.mha_ext.masked_softmax(*softmax_arguments(scores, None, 0.0, -1)))
    assert_moves(done, nbytes(scores), nbytes(scores) + 8 * max(4, dtype.itemsize), goal_of_rows(dtype))
    assert done.tensor_flops == 0
    assert_wide(done, min(16, 4 * dtype.itemsize))
    if done.shared_load_requests:
        assert done.wavefronts_per_load == done.wavefronts_per_store == 1


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float16, torch.float32], ids=str)
def test_masked_softmax_reads_a_mask_once(count: CountOne, mask_dtype: torch.dtype) -> None:
    scores, mask = torch.randn(1, 2, 4, 1024).half(), torch.ones(1, 2, 4, 1024).to(mask_dtype)
    done = count(lambda: torch.ops.mha_ext.masked_softmax(*softmax_arguments(scores, mask, 0.0, -1)))
    assert_moves(done, nbytes(scores, mask), nbytes(scores) + 8 * 4)


def test_masked_softmax_reads_visible_scores_only(count: CountOne) -> None:
    """Causal: whole sectors up to the diagonal."""
    scores = torch.randn(1, 1, 64, 1024).half()
    done = count(lambda: torch.ops.mha_ext.masked_softmax(*softmax_arguments(scores, None, 0.0, 0)))
    assert done.global_load_sectors == sum(-(-2 * (row + 1) // 32) for row in range(64))
    assert done.global_store_bytes == nbytes(scores) + 64 * 4


def test_masked_softmax_with_dropout(count: CountOne) -> None:
    scores = torch.randn(1, 2, 4, 1024).half()
    done = count(lambda: torch.ops.mha_ext.masked_softmax(*softmax_arguments(scores, None, 0.1, -1)))
    rng = done.global_load_bytes - nbytes(scores)
    assert 0 < rng <= done.grid[0] * 4 * 32 * 2 * 8  # seed and offset, by each thread
    assert done.global_store_bytes == 2 * nbytes(scores) + 8 * 4
    assert done.global_store_sectors * 32 <= GOAL * done.global_store_bytes


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_softmax_backward(count: CountOne, dtype: torch.dtype, length: int) -> None:
    """Weights and their gradient are read once, the scores' gradient is written once."""
    weights, grad = torch.rand(1, 2, 4, length).to(dtype), torch.randn(1, 2, 4, length).to(dtype)
    lse = torch.randn(1, 2, 4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    rule = (None, None, None, 0, 0.0, 0.0)
    done = count(
        lambda: torch.ops.mha_ext.masked_softmax_backward(
            grad, None, None, weights, None, lse, *rule, dtype, False, False, False
        )
    )
    assert_moves(done, nbytes(weights, grad), nbytes(weights), goal_of_rows(dtype))
    assert_wide(done, min(16, 4 * dtype.itemsize), min(16, 4 * dtype.itemsize))
    if done.shared_load_requests:
        assert done.wavefronts_per_load == done.wavefronts_per_store == 1


# ---- qkv_split and qkv_merge ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_qkv_split(count: CountOne, head_dim: int, dtype: torch.dtype) -> None:
    packed = torch.randn(2, 16, (4 + 2 * 2) * head_dim).to(dtype)
    done = count(lambda: torch.ops.mha_ext.qkv_split(packed, None, 4, 2))
    assert_moves(done, nbytes(packed), nbytes(packed))
    assert_wide(done, 16, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qkv_split_with_bias(count: CountOne, dtype: torch.dtype) -> None:
    """Each row asks for the bias, which stays in the cache."""
    packed, bias = torch.randn(2, 16, 512).to(dtype), torch.randn(512).to(dtype)
    done = count(lambda: torch.ops.mha_ext.qkv_split(packed, bias, 4, 2))
    assert_moves(done, 2 * nbytes(packed), nbytes(packed))
    assert_wide(done, 16, 16)


@pytest.mark.parametrize("bias_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qkv_merge(count: CountOne, dtype: torch.dtype, bias_grad: bool) -> None:
    grads = [torch.randn(2, heads, 64, 64).to(dtype) for heads in (4, 2, 2)]
    done = count(lambda: torch.ops.mha_ext.qkv_merge(*grads, bias_grad))
    total = nbytes(*grads)
    if not bias_grad:
        assert_moves(done, total, total)
        assert_wide(done, 16, 16)
        return
    assert done.global_load_bytes == total
    assert done.global_load_sectors * 32 <= GOAL * total
    partial = done.global_store_bytes - total  # sums of some rows, in fp32
    assert 0 < partial <= total / 8
