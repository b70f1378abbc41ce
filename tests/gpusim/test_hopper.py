"""What sm_90 adds: mbarrier, bulk copies, tiles by tensor map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.gpusim.build import compile_ptx, load_simulator
from tests.gpusim.simulator import PtxModule, Simulator, SimulatorError

pytestmark = pytest.mark.sim
KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return load_simulator()


@pytest.fixture(scope="module")
def hopper(simulator: Simulator) -> PtxModule:
    return simulator.load_ptx(compile_ptx(KERNELS / "hopper.cu"))


@pytest.fixture(params=[(0, "late"), (0, "at_once"), (1, "late"), (2, "random"), (3, "random")], ids=str, autouse=True)
def order(simulator: Simulator, request: pytest.FixtureRequest):
    seed, arrival = request.param
    with simulator.using(seed=seed, arrival=arrival, checks=True):
        yield


def aligned(shape: int | tuple[int, ...], dtype: type) -> np.ndarray:
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(n + 128, np.uint8)
    return raw[-raw.ctypes.data % 128 :][:n].view(dtype).reshape(shape)


def test_ring(hopper: PtxModule) -> None:
    values = np.arange(7 * 32, dtype=np.float32)
    out = np.zeros_like(values)
    hopper.launch("ring", 1, 64, values, out, np.int32(7))
    np.testing.assert_array_equal(out, values.reshape(7, 32)[:, ::-1].ravel())


def test_ring_broken(hopper: PtxModule) -> None:
    values = np.arange(7 * 32, dtype=np.float32)
    with pytest.raises(SimulatorError, match=r"race on shared memory|more arrivals at an mbarrier|deadlock"):
        hopper.launch("ring_broken", 1, 64, values, np.zeros_like(values), np.int32(7))


def test_bulk_copy(hopper: PtxModule) -> None:
    values, out = aligned(256, np.float32), aligned(256, np.float32)
    values[:] = np.arange(256)
    hopper.launch("bulk_copy", 1, 64, values, out)
    np.testing.assert_array_equal(out, values * 2)


def test_bulk_copy_broken(hopper: PtxModule) -> None:
    with pytest.raises(SimulatorError, match=r"before the wait|race on shared memory"):
        hopper.launch("bulk_copy_broken", 1, 64, aligned(256, np.float32), aligned(256, np.float32))


@pytest.mark.parametrize(("x", "y"), [(0, 0), (24, 5), (-8, -3), (48, 30)])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_tensor_copy(simulator: Simulator, hopper: PtxModule, swizzle: int, x: int, y: int) -> None:
    rows, cols, box_rows, box_cols = 33, 64, 16, (swizzle or 128) // 2
    source, target, raw = (
        aligned((rows, cols), np.uint16),
        aligned((rows, cols), np.uint16),
        aligned(box_rows * box_cols // 2, np.uint32),
    )
    source[:] = np.arange(1, rows * cols + 1).reshape(rows, cols)
    maps = [simulator.encode_tiled(a, (box_rows, box_cols), swizzle) for a in (source, target)]
    for a in (source, target):
        simulator.register(a)
    size = box_rows * box_cols * 2
    hopper.launch("tensor_copy", 1, 32, *maps, raw, np.int32(x), np.int32(y), np.int32(size), shared=size + 1024)
    for a in (source, target):
        simulator.unregister(a)

    padded = np.zeros((rows + 64, cols + 128), np.uint16)
    padded[32 : 32 + rows, 64 : 64 + cols] = source
    tile = padded[32 + y : 32 + y + box_rows, 64 + x : 64 + x + box_cols]
    chunks = box_cols // 8
    seen = raw.view(np.uint16).reshape(box_rows, chunks, 8)
    expected = np.empty_like(seen)
    for r in range(box_rows):
        for c in range(chunks):
            flip = {0: 0, 32: r >> 2 & 1, 64: r >> 1 & 3, 128: r & 7}[swizzle]
            expected[r, c ^ flip] = tile[r, c * 8 : c * 8 + 8]
    np.testing.assert_array_equal(seen, expected)
    inside = np.zeros_like(padded)
    inside[32 + y : 32 + y + box_rows, 64 + x : 64 + x + box_cols] = tile
    np.testing.assert_array_equal(target, inside[32 : 32 + rows, 64 : 64 + cols])
