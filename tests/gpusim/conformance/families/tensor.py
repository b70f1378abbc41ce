"""Tensor copies by tensor map: 1 to 5 dimensions, every swizzle, boxes that reach outside, both ways; reductions."""

from __future__ import annotations

import numpy as np

from tests.gpusim.conformance.forms import form, same_bits
from tests.gpusim.conformance.inputs import rng
from tests.gpusim.conformance.layouts import put_tile, tile_from_shared, tile_of, tile_to_shared
from tests.gpusim.conformance.machine import Machine, TensorMap

SHAPES = {1: (300,), 2: (33, 128), 3: (5, 20, 128), 4: (3, 5, 6, 128), 5: (2, 3, 4, 5, 128)}
BOXES = {1: (64,), 2: (16, 0), 3: (3, 8, 0), 4: (2, 3, 4, 0), 5: (2, 2, 3, 2, 0)}


def starts(rank: int, box: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Inside; beyond the end; before the beginning."""
    shape = SHAPES[rank]
    return [
        tuple(min(1, n - b) if i < rank - 1 else 8 for i, (n, b) in enumerate(zip(shape, box, strict=True))),
        tuple(n - b // 2 for n, b in zip(shape, box, strict=True)),
        tuple(-(b // 2) for b in box),
    ]


def coordinates(start: tuple[int, ...]) -> bytes:
    """Innermost first."""
    return np.array([*start[::-1], *[0] * (5 - len(start))], np.int32).tobytes()


def box_of(rank: int, swizzle: int, dtype: np.dtype) -> tuple[int, ...]:
    """As wide as the swizzle's span; 64 bytes without one."""
    return (*BOXES[rank][:-1], (swizzle or 64) // dtype.itemsize)


def noise(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    return np.frombuffer(rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()


def copies(rank: int, swizzle: int, dtype: np.dtype) -> None:
    kind = f"{rank}d, swizzle {swizzle or 'none'}, {8 * dtype.itemsize} bits"
    box = box_of(rank, swizzle, dtype)
    size = int(np.prod(box)) * dtype.itemsize

    @form(f"cp.async.bulk.tensor.shared::cluster.global, {kind}", "tensor_sm90")
    def check_load(machine: Machine) -> None:
        tensor = noise(SHAPES[rank], dtype, 91)
        for start in starts(rank, box):
            got = np.zeros(size, np.uint8)
            machine.launch(
                "tensor_sm90",
                f"load_{rank}d",
                1,
                64,
                TensorMap(tensor, box, swizzle),
                coordinates(start),
                got,
                np.uint32(size),
                shared=size + 1024,
            )
            same_bits(got, tile_to_shared(tile_of(tensor, start, box), swizzle))

    @form(f"cp.async.bulk.tensor.global.shared::cta, {kind}", "tensor_sm90")
    def check_store(machine: Machine) -> None:
        for start in starts(rank, box):
            tensor, image = noise(SHAPES[rank], dtype, 92), noise((size,), np.dtype(np.uint8), 93)
            want = tensor.copy()
            put_tile(want, start, tile_from_shared(image, box, dtype, swizzle))
            machine.launch(
                "tensor_sm90",
                f"store_{rank}d",
                1,
                64,
                TensorMap(tensor, box, swizzle),
                coordinates(start),
                image,
                np.uint32(size),
                shared=size + 1024,
            )
            same_bits(tensor, want)


for _swizzle in (0, 32, 64, 128):
    for _rank in (2, 3, 4, 5):
        copies(_rank, _swizzle, np.dtype(np.uint16))
copies(1, 0, np.dtype(np.uint16))
for _dtype in (np.uint8, np.uint32, np.uint64):
    copies(2, 128, np.dtype(_dtype))


def reduction(rank: int, swizzle: int) -> None:
    dtype = np.dtype(np.float32)
    box = box_of(rank, swizzle, dtype)
    size = int(np.prod(box)) * 4

    @form(
        f"cp.reduce.async.bulk.tensor.global.shared::cta.add, {rank}d, swizzle {swizzle or 'none'}, f32", "tensor_sm90"
    )
    def check(machine: Machine) -> None:
        r = rng(94)
        for start in starts(rank, box):
            tensor = r.integers(-9, 10, SHAPES[rank]).astype(dtype)
            tile = r.integers(-9, 10, box).astype(dtype)
            want = tensor.copy()
            put_tile(want, start, tile + tile_of(tensor, start, box))
            machine.launch(
                "tensor_sm90",
                f"add_{rank}d",
                1,
                64,
                TensorMap(tensor, box, swizzle),
                coordinates(start),
                tile_to_shared(tile, swizzle),
                np.uint32(size),
                shared=size + 1024,
            )
            same_bits(tensor, want)


reduction(1, 0)
reduction(2, 128)
reduction(3, 64)
reduction(4, 32)
reduction(5, 128)


@form("cp.async.bulk.tensor.2d, L2::cache_hint, multicast::cluster, after prefetch", "tensor_sm90")
def check_hints(machine: Machine) -> None:
    dtype = np.dtype(np.uint16)
    tensor, box = noise(SHAPES[2], dtype, 95), box_of(2, 128, dtype)
    size = int(np.prod(box)) * 2
    got = np.zeros(2 * size, np.uint8)
    machine.launch(
        "tensor_sm90",
        "load_hints",
        1,
        64,
        TensorMap(tensor, box, 128),
        coordinates((3, 16)),
        got,
        np.uint32(size),
        shared=2 * size + 1024,
    )
    same_bits(got, np.tile(tile_to_shared(tile_of(tensor, (3, 16), box), 128), 2))
