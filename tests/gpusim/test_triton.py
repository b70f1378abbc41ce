"""An oracle nobody here wrote: Triton compiles kernels to PTX (no GPU needed), and NumPy knows the results.

Optional: `pip install triton`. What Triton emits is unlike what nvcc does: its own layouts, swizzles and pipelines.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.gpusim.build import load_simulator
from tests.gpusim.simulator import PtxModule, Simulator

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

pytestmark = pytest.mark.sim

# ---- the kernels ----


@triton.jit
def matmul_kernel(
    a,  # (m, k)
    b,  # (k, n)
    c,  # (m, n)
    m,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    precision: tl.constexpr,
):
    rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    cols = tl.program_id(1) * block_n + tl.arange(0, block_n)
    acc = tl.zeros((block_m, block_n), tl.float32)
    for begin in range(0, k, block_k):
        ks = begin + tl.arange(0, block_k)
        a_tile = tl.load(a + rows[:, None] * k + ks[None, :], (rows[:, None] < m) & (ks[None, :] < k), 0.0)
        b_tile = tl.load(b + ks[:, None] * n + cols[None, :], (ks[:, None] < k) & (cols[None, :] < n), 0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=precision)
    tl.store(c + rows[:, None] * n + cols[None, :], acc, (rows[:, None] < m) & (cols[None, :] < n))


@triton.jit
def split_k_kernel(
    a,  # (m, k)
    b,  # (n, k)
    c,  # (m, n) zeros: added to
    m,
    n,
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    cols = tl.program_id(1) * block_n + tl.arange(0, block_n)
    ks = tl.program_id(2) * block_k + tl.arange(0, block_k)
    a_tile = tl.load(a + rows[:, None] * k + ks[None, :], (rows[:, None] < m) & (ks[None, :] < k), 0.0)
    b_tile = tl.load(b + cols[:, None] * k + ks[None, :], (cols[:, None] < n) & (ks[None, :] < k), 0.0)
    acc = tl.dot(a_tile, b_tile.T)
    tl.atomic_add(c + rows[:, None] * n + cols[None, :], acc, (rows[:, None] < m) & (cols[None, :] < n))


@triton.jit
def tma_matmul_kernel(
    a_tiles,  # tensor maps of (m, k), ...
    b_tiles,  # (n, k)
    c_tiles,  # and (m, n)
    k,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    row, col = tl.program_id(0) * block_m, tl.program_id(1) * block_n
    acc = tl.zeros((block_m, block_n), tl.float32)
    for begin in range(0, k, block_k):
        acc = tl.dot(a_tiles.load([row, begin]), b_tiles.load([col, begin]).T, acc)
    c_tiles.store([row, col], acc.to(tl.float16))


@triton.jit
def attention_kernel(
    q,  # (heads, lq, d)
    k,  # (heads, lk, d)
    v,  # (heads, lk, d)
    out,  # (heads, lq, d)
    lse,  # (heads, lq)
    scale_log2,
    lq,
    lk,
    causal: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    d: tl.constexpr,
):
    head = tl.program_id(1)
    rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    dims = tl.arange(0, d)
    q_tile = tl.load(q + (head * lq + rows[:, None]) * d + dims[None, :], rows[:, None] < lq, 0.0)
    row_max = tl.full((block_m,), float("-inf"), tl.float32)
    row_sum = tl.zeros((block_m,), tl.float32)
    acc = tl.zeros((block_m, d), tl.float32)
    end = tl.minimum(lk, (tl.program_id(0) + 1) * block_m) if causal else lk
    for begin in range(0, end, block_n):
        cols = begin + tl.arange(0, block_n)
        k_tile = tl.load(k + (head * lk + cols[:, None]) * d + dims[None, :], cols[:, None] < lk, 0.0)
        v_tile = tl.load(v + (head * lk + cols[:, None]) * d + dims[None, :], cols[:, None] < lk, 0.0)
        scores = tl.dot(q_tile, k_tile.T) * scale_log2
        visible = cols[None, :] < lk
        if causal:
            visible = visible & (cols[None, :] <= rows[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None])
        row_max = new_max
    acc = acc / row_sum[:, None]
    tl.store(out + (head * lq + rows[:, None]) * d + dims[None, :], acc.to(out.dtype.element_ty), rows[:, None] < lq)
    tl.store(lse + head * lq + rows, row_max * 0.6931471805599453 + tl.log(row_sum), rows < lq)


@triton.jit
def attention_backward_kernel(
    q,  # (heads, lq, d), as the other tensors; lengths are multiples of the blocks
    k,
    v,
    grad_out,
    lse,  # (heads, lq)
    delta,  # (heads, lq)
    grad_q,  # fp32 zeros: added to
    grad_k,
    grad_v,
    scale,
    lq,
    lk,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    d: tl.constexpr,
):
    head = tl.program_id(1)
    cols = tl.program_id(0) * block_n + tl.arange(0, block_n)
    dims = tl.arange(0, d)
    kv_at = (head * lk + cols[:, None]) * d + dims[None, :]
    k_tile, v_tile = tl.load(k + kv_at), tl.load(v + kv_at)
    k_acc, v_acc = tl.zeros((block_n, d), tl.float32), tl.zeros((block_n, d), tl.float32)
    for begin in range(0, lq, block_m):
        rows = begin + tl.arange(0, block_m)
        q_at = (head * lq + rows[:, None]) * d + dims[None, :]
        q_tile, o_tile = tl.load(q + q_at), tl.load(grad_out + q_at)
        weights = tl.exp(tl.dot(q_tile, k_tile.T) * scale - tl.load(lse + head * lq + rows)[:, None])
        v_acc = tl.dot(weights.to(o_tile.dtype).T, o_tile, v_acc)
        grad_weights = tl.dot(o_tile, v_tile.T)
        grad_scores = weights * (grad_weights - tl.load(delta + head * lq + rows)[:, None]) * scale
        grad_scores = grad_scores.to(q_tile.dtype)
        k_acc = tl.dot(grad_scores.T, q_tile, k_acc)
        tl.atomic_add(grad_q + q_at, tl.dot(grad_scores, k_tile))
    tl.store(grad_k + kv_at, k_acc)
    tl.store(grad_v + kv_at, v_acc)


@triton.jit
def softmax_kernel(x, y, seed, columns, dropout_p, block: tl.constexpr):
    """Softmax of a row, and Triton's own dropout (Philox)."""
    at = tl.arange(0, block)
    row = tl.program_id(0) * columns
    scores = tl.load(x + row + at, at < columns, float("-inf")).to(tl.float32)
    weights = tl.exp(scores - tl.max(scores, 0))
    weights = weights / tl.sum(weights, 0)
    weights = tl.where(tl.rand(seed, row + at) >= dropout_p, weights / (1 - dropout_p), 0.0)
    tl.store(y + row + at, weights.to(y.dtype.element_ty), at < columns)


@triton.jit
def scan_kernel(x, sums, ranked, rows: tl.constexpr, columns: tl.constexpr):
    """A running sum along rows, and rows sorted."""
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    tile = tl.load(x + at)
    tl.store(sums + at, tl.cumsum(tile, 1))
    tl.store(ranked + at, tl.sort(tile, 1))


# ---- compiling and launching ----

TYPES = {np.dtype(np.float16): "fp16", np.dtype(np.float32): "fp32"}


@dataclass(frozen=True)
class TensorMap:
    """An array and the tile that the kernel asks for; Triton may move it in several boxes."""

    array: np.ndarray
    tile: tuple[int, int]


@dataclass(frozen=True)
class Compiled:
    module: PtxModule
    name: str
    threads: int
    shared: int
    maps: tuple[tuple[int, list[int]], ...]  # swizzle and box of each tensor map


@functools.cache
def compiled(
    kernel: Any,
    types: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    capability: int,
    **options: int,
) -> Compiled:
    """The kernel as PTX, and what its launch needs. Pointers are taken as multiples of 16."""
    signature = dict(types)
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, dict(constants), aligned)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    maps = tuple(((0, 32, 64, 128)[x["swizzle"]], list(x["block_size"])) for x in result.metadata.tensordesc_meta)
    module = load_simulator().load_ptx(result.asm["ptx"])
    return Compiled(module, result.metadata.name, 32 * result.metadata.num_warps, result.metadata.shared, maps)


def bf16(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bf16 numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def type_of(value: Any) -> str:
    """In Triton's words; an array of uint16 holds bf16."""
    if isinstance(value, TensorMap):
        return f"tensordesc<{TYPES[value.array.dtype]}[{value.tile[0]}, {value.tile[1]}]>"
    if isinstance(value, np.ndarray):
        return "*bf16" if value.dtype == np.uint16 else "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, np.floating) else "i32"


def run(kernel: Any, grid: tuple[int, ...], capability: int, values: Mapping[str, Any], **more: Any) -> None:
    """Compile for a capability and run. `more`: constants by name, num_warps and num_stages."""
    options = {name: more.pop(name) for name in ("num_warps", "num_stages") if name in more}
    types = {name: type_of(value) for name, value in values.items()} | dict.fromkeys(more, "constexpr")
    built = compiled(kernel, tuple(types.items()), tuple(more.items()), capability, **options)
    simulator, maps = load_simulator(), iter(built.maps)
    arguments: list[Any] = []
    for value in values.values():
        if isinstance(value, TensorMap):  # the map, then its shape and strides
            swizzle, box = next(maps)
            steps = [step // value.array.itemsize for step in value.array.strides]
            arguments.append(simulator.encode_tiled(value.array, box, swizzle))
            arguments += [*map(np.int32, value.array.shape), *map(np.int64, steps)]
            simulator.register(value.array)
        else:
            arguments.append(value)
    arguments += [np.uint64(0), np.uint64(0)]  # scratch memory: what Triton's own runtime passes behind the arguments
    try:
        built.module.launch(built.name, grid, built.threads, *arguments, shared=built.shared)
    finally:
        for value in values.values():
            if isinstance(value, TensorMap):
                simulator.unregister(value.array)


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy that begins on a multiple of 128 bytes."""
    raw = np.zeros(values.nbytes + 128, np.uint8)
    found = raw[-raw.ctypes.data % 128 :][: values.nbytes].view(values.dtype).reshape(values.shape)
    found[...] = values
    return found


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def wide(x: np.ndarray) -> np.ndarray:
    return (from_bf16(x) if x.dtype == np.uint16 else x).astype(np.float64)


# ---- the tests ----


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return load_simulator()


@pytest.fixture(params=[(0, "late"), (0, "at_once"), (1, "random")], ids=str, autouse=True)
def order(simulator: Simulator, request: pytest.FixtureRequest) -> Iterator[None]:
    seed, arrival = request.param
    # Two fences that the ISA asks for and Triton leaves out.
    left_out = {"mbarrier_init_fence": False, "cp_async_fence": False}
    with simulator.using(checks=True, **left_out, seed=seed, arrival=arrival):
        yield


every_capability = pytest.mark.parametrize("capability", [80, 90])


def check_matmul(
    capability: int, m: int, n: int, k: int, kind: str, precision: str, block: tuple[int, int, int], **options: int
) -> None:
    a, b = normal(m, k), normal(k, n, seed=1)
    a, b = (bf16(a), bf16(b)) if kind == "bf16" else (a.astype(kind), b.astype(kind))
    c = aligned(np.zeros((m, n), np.float32))
    values = {"a": aligned(a), "b": aligned(b), "c": c, "m": np.int32(m), "n": np.int32(n), "k": np.int32(k)}
    blocks = dict(zip(("block_m", "block_n", "block_k"), block, strict=True))
    grid = (-(-m // block[0]), -(-n // block[1]))
    run(matmul_kernel, grid, capability, values, **blocks, precision=precision, **options)
    # TF32 keeps 11 bits of each factor; Triton leaves it to the tensor core to cut the others off.
    epsilon = 2.0**-9 if precision == "tf32" and kind == "float32" else 2.0**-21
    bound = epsilon * (abs(wide(a)) @ abs(wide(b)))
    assert (abs(c - wide(a) @ wide(b)) <= bound).all()


@every_capability
@pytest.mark.parametrize("kind", ["float16 tf32", "bf16 tf32", "float32 tf32", "float32 ieee"])
@pytest.mark.parametrize("size", [(128, 128, 128), (65, 70, 72), (33, 129, 41)], ids=str)
def test_matmul(capability: int, size: tuple[int, int, int], kind: str) -> None:
    check_matmul(capability, *size, *kind.split(), (64, 64, 32), num_warps=4, num_stages=3)


@every_capability
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("block", "warps"), [((16, 16, 16), 1), ((128, 64, 64), 8), ((32, 128, 32), 2)], ids=str)
def test_matmul_shapes(capability: int, block: tuple[int, int, int], warps: int, stages: int) -> None:
    check_matmul(capability, 144, 136, 200, "float16", "tf32", block, num_warps=warps, num_stages=stages)


@every_capability
def test_split_k(capability: int) -> None:
    m, n, k = 65, 48, 136
    a, b = normal(m, k).astype(np.float16), normal(n, k, seed=1).astype(np.float16)
    c = aligned(np.zeros((m, n), np.float32))
    values = {"a": aligned(a), "b": aligned(b), "c": c, "m": np.int32(m), "n": np.int32(n), "k": np.int32(k)}
    run(split_k_kernel, (2, 1, 3), capability, values, block_m=64, block_n=64, block_k=64, num_warps=4)
    assert (abs(c - wide(a) @ wide(b).T) <= 2.0**-21 * (abs(wide(a)) @ abs(wide(b)).T)).all()


@pytest.mark.parametrize("block_k", [32, 64])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("block_n", "warps"), [(64, 4), (128, 8)])
def test_matmul_by_tensor_maps(block_n: int, warps: int, stages: int, block_k: int) -> None:
    """TMA both ways, wgmma, and ragged edges that the maps cut off."""
    m, n, k, block_m = 136, 144, 200, 128
    a, b = aligned(normal(m, k).astype(np.float16)), aligned(normal(n, k, seed=1).astype(np.float16))
    c = aligned(np.zeros((m, n), np.float16))
    tiles = {"a_tiles": (a, (block_m, block_k)), "b_tiles": (b, (block_n, block_k)), "c_tiles": (c, (block_m, block_n))}
    values = {name: TensorMap(*tile) for name, tile in tiles.items()} | {"k": np.int32(k)}
    blocks = {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    run(tma_matmul_kernel, (2, -(-n // block_n)), 90, values, **blocks, num_warps=warps, num_stages=stages)
    exact = wide(a) @ wide(b).T
    np.testing.assert_allclose(c, exact, rtol=2.0**-11, atol=1e-4)


def exact_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """weights, output and lse in fp64"""
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(q.shape[1], k.shape[1], dtype=bool), scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - lse[..., None])
    return weights, weights @ v, lse


@every_capability
@pytest.mark.parametrize("kind", ["float16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("lq", "lk", "d", "warps"), [(128, 128, 64, 4), (70, 99, 32, 4), (65, 130, 128, 8)])
def test_attention(capability: int, lq: int, lk: int, d: int, warps: int, causal: bool, kind: str) -> None:
    heads = 2
    q, k, v = (normal(heads, n, d, seed=i) for i, n in enumerate((lq, lk, lk)))
    q, k, v = (bf16(x) if kind == "bf16" else x.astype(np.float16) for x in (q, k, v))
    out, lse = aligned(np.zeros_like(q)), aligned(np.zeros((heads, lq), np.float32))
    values = {"q": aligned(q), "k": aligned(k), "v": aligned(v), "out": out, "lse": lse}
    values |= {"scale_log2": np.float32(np.log2(np.e) / np.sqrt(d)), "lq": np.int32(lq), "lk": np.int32(lk)}
    blocks = {"block_m": 64, "block_n": 32, "d": d, "causal": causal}
    run(attention_kernel, (-(-lq // 64), heads), capability, values, **blocks, num_warps=warps, num_stages=2)
    _, exact, exact_lse = exact_attention(wide(q), wide(k), wide(v), causal)
    # Weights and output are each rounded once; the values are about 1.
    epsilon = 2.0**-8 if kind == "bf16" else 2.0**-11
    np.testing.assert_allclose(wide(out), exact, rtol=2 * epsilon, atol=2 * epsilon)
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=2e-6)


@every_capability
@pytest.mark.parametrize("d", [32, 64])
def test_attention_backward(capability: int, d: int) -> None:
    heads, lq, lk, scale = 2, 64, 96, 1 / np.sqrt(d)
    q, k, v, grad = (normal(heads, n, d, seed=i).astype(np.float16) for i, n in enumerate((lq, lk, lk, lq)))
    weights, out, lse = exact_attention(wide(q), wide(k), wide(v), False)
    delta = (out * wide(grad)).sum(-1)
    grads = [aligned(np.zeros(x.shape, np.float32)) for x in (q, k, v)]
    names = ("q", "k", "v", "grad_out", "lse", "delta", "grad_q", "grad_k", "grad_v")
    tensors = [aligned(x) for x in (q, k, v, grad, lse.astype(np.float32), delta.astype(np.float32))] + grads
    values = dict(zip(names, tensors, strict=True))
    values |= {"scale": np.float32(scale), "lq": np.int32(lq), "lk": np.int32(lk)}
    run(attention_backward_kernel, (3, heads), capability, values, block_m=32, block_n=32, d=d, num_warps=4)
    grad_scores = weights * (wide(grad) @ wide(v).transpose(0, 2, 1) - delta[..., None]) * scale
    exact = grad_scores @ wide(k), grad_scores.transpose(0, 2, 1) @ wide(q), weights.transpose(0, 2, 1) @ wide(grad)
    for mine, right in zip(grads, exact, strict=True):
        np.testing.assert_allclose(mine, right, rtol=2e-3, atol=2e-3)


def philox(seed: int, offsets: np.ndarray) -> np.ndarray:
    """The first of the four words of Philox4x32 with 10 rounds (Salmon et al., 2011), as tl.randint draws it."""
    counter = [offsets.astype(np.uint64), *(np.zeros(len(offsets), np.uint64) for _ in range(3))]
    key, low = [seed & 0xFFFFFFFF, seed >> 32], np.uint64(0xFFFFFFFF)
    for _ in range(10):
        products = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        high = [p >> np.uint64(32) for p in products]
        counter = [
            high[1] ^ counter[1] ^ np.uint64(key[0]),
            products[1] & low,
            high[0] ^ counter[3] ^ np.uint64(key[1]),
            products[0] & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter[0]


@every_capability
@pytest.mark.parametrize("columns", [64, 77, 1000])
def test_softmax_dropout(capability: int, columns: int) -> None:
    rows, seed = 3, 1234
    x, y = normal(rows, columns).astype(np.float16), aligned(np.zeros((rows, columns), np.float32))
    values = {"x": aligned(x), "y": y, "seed": np.int32(seed), "columns": np.int32(columns)}
    values["dropout_p"] = np.float32(0.25)
    run(softmax_kernel, (rows,), capability, values, block=max(128, 1 << (columns - 1).bit_length()), num_warps=4)
    exact = np.exp(wide(x))
    exact /= exact.sum(-1, keepdims=True)
    word = philox(seed, np.arange(rows * columns)).astype(np.uint32).view(np.int32).astype(np.int64)
    uniform = np.where(word < 0, -word - 1, word) * 4.6566127342e-10  # how tl.rand makes a float of a word
    kept = uniform.reshape(rows, columns) >= 0.25
    np.testing.assert_allclose(y, np.where(kept, exact / 0.75, 0), rtol=2e-6, atol=0)


@every_capability
@pytest.mark.parametrize("warps", [1, 4])
def test_scan_and_sort(capability: int, warps: int) -> None:
    x = normal(8, 64).astype(np.float32).round(2)
    sums, ranked = aligned(np.zeros_like(x)), aligned(np.zeros_like(x))
    values = {"x": aligned(x), "sums": sums, "ranked": ranked}
    run(scan_kernel, (1,), capability, values, rows=8, columns=64, num_warps=warps)
    np.testing.assert_allclose(sums, x.astype(np.float64).cumsum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ranked, np.sort(x, 1))
