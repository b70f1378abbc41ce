"""The pass over attn_mask: bits, block map and key bits are what NumPy says, for every layout."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

pytestmark = pytest.mark.sim
pytest.importorskip("tests.gpusim.build")
import build_backend  # noqa: E402
from tests.gpusim import build  # noqa: E402

Array = NDArray[Any]
BLOCK = 64
WARPS, SPAN = 8, 512
NONE, SOME, ALL = range(3)
DTYPES = {np.float16: 0, np.float32: 2, np.float64: 3, np.bool_: 4}


class Params(ctypes.Structure):
    """MaskBlocksParams of csrc/params.h."""

    _fields_ = (
        ("attn_mask", ctypes.c_void_p),
        ("mask_strides", ctypes.c_int64 * 4),
        ("mask_dtype", ctypes.c_int),
        ("bits", ctypes.c_void_p),
        ("map", ctypes.c_void_p),
        ("key_bits", ctypes.c_void_p),
        ("mask_batch", ctypes.c_int64),
        ("mask_heads", ctypes.c_int64),
        ("mask_rows", ctypes.c_int64),
        ("seqlen_kv", ctypes.c_int64),
        ("group", ctypes.c_int),
    )


class Cut(ctypes.Structure):
    """MaskCut of csrc/kernels/mask_blocks.cuh."""

    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("key_blocks", "key_spans", "query_blocks", "heads", "heads_kv", "group")
    )


class Blocks(NamedTuple):
    bits: Array  # (batch, heads, rows, key_blocks) uint64
    map: Array  # (batch, heads, query_blocks, key_blocks) uint8
    key_bits: Array  # (batch, heads_kv, key_blocks) uint64


Launch = Callable[..., None]


@pytest.fixture(scope="module")
def module() -> Any:
    try:
        ptx = build.compile_ptx(build.CSRC / "kernels/instances/mask_blocks.cu", *build_backend.NVCC_FLAGS)
    except build.MissingError as error:
        pytest.skip(str(error))
    return build.load_simulator().load_ptx(ptx)


@pytest.fixture(params=[0, 1], ids=["in turn", "seed 1"])
def kernels(module: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    with build.load_simulator().using(checks=True, seed=request.param, threads=1 + request.param):
        yield module


def parts(length: int, part: int) -> int:
    return -(-length // part)


def compute(module: Any, mask: Array, group: int = 1, packs: bool = False) -> Blocks:
    """mask (batch, heads, rows, keys), 1 on repeated axes; bits and map of bool masks, key_bits of one row."""
    batch, heads, rows, keys = mask.shape
    heads_kv = heads // group if heads > 1 else 1
    cut = Cut(parts(keys, BLOCK), parts(keys, SPAN), parts(rows, BLOCK), heads, heads_kv, group if heads > 1 else 1)
    is_bool = mask.dtype == np.bool_
    bits = np.full((batch, heads, rows, cut.key_blocks), 0xAB, np.uint64)
    block_map = np.full((batch, heads, cut.query_blocks, cut.key_blocks), 0xAB, np.uint8)
    key_bits = np.full((batch, heads_kv, cut.key_blocks), 0xAB, np.uint64)
    written = (bits, block_map, key_bits)
    params = Params(
        mask.ctypes.data,
        tuple(stride // mask.itemsize for stride in mask.strides),
        DTYPES[mask.dtype.type],
        *(array.ctypes.data for array in written),
        batch,
        heads,
        rows,
        keys,
        group,
    )
    arguments = [bytes(params), bytes(cut)]
    simulator = build.load_simulator()
    for array in (mask, *written):
        simulator.register(array)
    try:
        if is_bool:
            grid = batch * heads * cut.query_blocks * cut.key_spans
            module.launch(f"mask_bits_kernelILb{int(packs)}E", grid, WARPS * 32, *arguments)
        if rows == 1:
            letter = {np.bool_: "b", np.float16: "6__half", np.float32: "f", np.float64: "d"}[mask.dtype.type]
            grid = parts(batch * heads_kv * cut.key_spans, WARPS)
            module.launch(f"key_bits_kernelI{letter}E", grid, WARPS * 32, *arguments)
    finally:
        for array in (mask, *written):
            simulator.unregister(array)
    return Blocks(*written)


def words(visible: Array) -> Array:
    """(..., keys) bool -> (..., key_blocks) uint64."""
    padding = [(0, 0)] * (visible.ndim - 1) + [(0, -visible.shape[-1] % BLOCK)]
    return np.packbits(np.pad(visible, padding), axis=-1, bitorder="little").view(np.uint64)


def expected_map(visible: Array) -> Array:
    """Rows beyond the last do not count, keys beyond the last are hidden."""
    batch, heads, rows, keys = visible.shape
    result = np.zeros((batch, heads, parts(rows, BLOCK), parts(keys, BLOCK)), np.uint8)
    for qb, kb in np.ndindex(result.shape[2:]):
        block = visible[:, :, qb * BLOCK : (qb + 1) * BLOCK, kb * BLOCK : (kb + 1) * BLOCK]
        every = block.all((2, 3)) & (block.shape[3] == BLOCK)
        result[:, :, qb, kb] = np.where(every, ALL, np.where(block.any((2, 3)), SOME, NONE))
    return result


def banded(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """A mask with blocks of every kind: a band, noise in some rows, and one head that hides all."""
    i, j = np.ogrid[: shape[2], : shape[3]]
    mask = np.broadcast_to(np.abs(i - j) < 150, shape).copy()
    mask[:, :, ::7] ^= rng.random(mask[:, :, ::7].shape) < 0.2
    mask[-1, -1] = shape[0] * shape[1] == 1
    return mask


SHAPES = [(1, 1, 1, 1), (2, 3, 5, 63), (1, 2, 65, 64), (2, 1, 129, 130), (1, 1, 64, 513), (1, 2, 200, 1040)]


def check_bool(blocks: Blocks, visible: Array, group: int = 1) -> None:
    np.testing.assert_array_equal(blocks.bits, words(visible))
    np.testing.assert_array_equal(blocks.map, expected_map(visible))
    if visible.shape[2] == 1:
        check_key_bits(blocks, visible, group)


def check_key_bits(blocks: Blocks, visible: Array, group: int) -> None:
    batch, heads, _, keys = visible.shape
    grouped = visible.reshape(batch, -1, group if heads > 1 else 1, keys).any(2)
    np.testing.assert_array_equal(blocks.key_bits, words(np.asarray(grouped)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contiguous(kernels: Any, shape: tuple[int, ...]) -> None:
    visible = banded(shape, np.random.default_rng(0))
    check_bool(compute(kernels, visible), visible)


@pytest.mark.parametrize("shape", [(2, 2, 66, 64), (1, 1, 130, 528)], ids=str)
def test_packs(kernels: Any, shape: tuple[int, ...]) -> None:
    """Sixteen keys an access, where rows start and end on sixteen."""
    visible = banded(shape, np.random.default_rng(1))
    check_bool(compute(kernels, visible, packs=True), visible)


def test_any_byte_but_zero_is_true(kernels: Any) -> None:
    """A bool tensor that is a view of bytes."""
    visible = np.random.default_rng(2).random((1, 1, 3, 64)) < 0.6
    values = np.random.default_rng(3).integers(1, 256, visible.shape).astype(np.uint8)
    mask = np.where(visible, values, 0).astype(np.uint8).view(np.bool_)
    for packs in (False, True):
        check_bool(compute(kernels, mask, packs=packs), visible)


@pytest.mark.parametrize("axes", [(0, 1, 3, 2), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_strides(kernels: Any, axes: tuple[int, ...]) -> None:
    """Any order of axes in memory, and gaps between keys."""
    shape = (2, 3, 66, 70)
    visible = banded(shape, np.random.default_rng(4))
    memory = np.ascontiguousarray(visible.transpose(axes)).repeat(2, axis=-1)
    memory[..., 1::2] ^= True
    view = memory[..., ::2].transpose(np.argsort(axes))
    check_bool(compute(kernels, view), visible)


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_key_bits(kernels: Any, dtype: type, group: int) -> None:
    """A key that some query head of its group sees; in a float mask all but -inf shows it, NaN and finfo.min too."""
    rng = np.random.default_rng(5)
    visible = rng.random((2, 6, 1, 517)) < 0.3
    mask = visible
    if dtype is not np.bool_:
        shown = rng.choice([0.0, 1.0, np.nan, np.inf, np.finfo(dtype).min], visible.shape)
        mask = np.where(visible, shown, -np.inf).astype(dtype)
    check_key_bits(compute(kernels, mask, group), visible, group)


def test_key_bits_of_a_mask_for_all_heads(kernels: Any) -> None:
    visible = np.random.default_rng(6).random((3, 1, 1, 200)) < 0.5
    check_key_bits(compute(kernels, visible, group=4), visible, 1)


def test_reads_and_writes_once(module: Any) -> None:
    """Whole sectors, every byte of the mask once, sixteen a lane."""
    simulator = build.load_simulator()
    shape = (1, 2, 128, 1024)
    memory = np.empty(np.prod(shape) + 32, np.bool_)
    visible = memory[-memory.ctypes.data % 32 :][: np.prod(shape)].reshape(shape)  # starts on a sector
    visible[:] = banded(shape, np.random.default_rng(7))
    simulator.take_records()
    blocks = compute(module, visible, packs=True)
    (record,) = simulator.take_records()
    assert record.global_load_bytes == visible.nbytes
    assert record.global_load_sectors * 32 == visible.nbytes
    assert record.global_load_requests * 32 * 16 == visible.nbytes
    assert record.global_store_bytes == blocks.bits.nbytes + blocks.map.nbytes
