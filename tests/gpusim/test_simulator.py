"""The simulator on small kernels whose results NumPy knows."""

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


@pytest.fixture(scope="module", params=["compute_80", "compute_90a"])
def basic(simulator: Simulator, request: pytest.FixtureRequest) -> PtxModule:
    return simulator.load_ptx(compile_ptx(KERNELS / "basic.cu", arch=request.param))


@pytest.fixture(params=[0, 1, 2], ids=["in turn", "seed 1", "seed 2"], autouse=True)
def order(simulator: Simulator, request: pytest.FixtureRequest):
    arrival = ["late", "at_once", "random"][request.param]
    with simulator.using(seed=request.param, arrival=arrival, checks=True, threads=1 + request.param % 2):
        yield


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_vector_add(basic: PtxModule) -> None:
    a, b = rng().random((2, 1000), dtype=np.float32)
    c = np.zeros_like(a)
    basic.launch("vector_add", 8, 128, a, b, c, np.int32(1000))
    np.testing.assert_array_equal(c, a + b)


def test_transpose(basic: PtxModule) -> None:
    a = rng().random((70, 70), dtype=np.float32)
    b = np.zeros_like(a)
    basic.launch("transpose", (3, 3), (32, 32), a, b, np.int32(70))
    np.testing.assert_array_equal(b, a.T)


def test_shuffles(basic: PtxModule) -> None:
    a = rng().integers(0, 100, (5, 32)).astype(np.float32)
    sums = np.zeros(5, np.float32)
    basic.launch("warp_sums", 5, 32, a, sums)
    np.testing.assert_array_equal(sums, a.sum(1))


def test_atomics(basic: PtxModule) -> None:
    values = rng().integers(0, 16, 1000).astype(np.int32)
    histogram, total, count = np.zeros(16, np.int32), np.zeros(1, np.float32), np.zeros(1, np.uint64)
    basic.launch("atomics", 8, 128, values, histogram, total, count, np.int32(1000))
    np.testing.assert_array_equal(histogram, np.bincount(values, minlength=16))
    assert total[0] == values.sum()
    assert count[0] == 1000


def test_doubles(basic: PtxModule) -> None:
    a, b = rng().standard_normal((2, 100))
    out = np.zeros_like(a)
    basic.launch("doubles", 1, 128, a, b, out, np.int32(100))
    expected = (a * b + 1) / (b * b + 1) + np.sqrt(abs(a)) + np.exp(a) + np.log(abs(b) + 1)
    np.testing.assert_allclose(out, expected, rtol=1e-14)


def test_floats(basic: PtxModule) -> None:
    a = (rng().standard_normal(100) * 3).astype(np.float32)
    out = np.zeros_like(a)
    basic.launch("floats", 1, 128, a, out, np.int32(100))
    x = a.astype(np.float64)
    expected = np.exp(x) + np.tanh(x) + np.sin(x) + np.log(abs(x) + 1) + 1 / np.sqrt(abs(x) + 1) + x / 3
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-6)


def test_half_pairs(basic: PtxModule) -> None:
    a, b = rng().standard_normal((2, 64)).astype(np.float16)
    out, wide = np.zeros_like(a), np.zeros(64, np.uint16)
    basic.launch("half_pairs", 1, 32, a, b, out, wide, np.int32(32))
    added = (a.astype(np.float64) + b).astype(np.float16)
    np.testing.assert_array_equal(out, (a.astype(np.float64) * b + added).astype(np.float16))
    bits = np.maximum(a, b).astype(np.float32).view(np.uint32)
    np.testing.assert_array_equal(wide, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def test_integers(basic: PtxModule) -> None:
    a = rng().integers(-(2**31), 2**31, 100).astype(np.int32)
    b = rng().integers(1, 1000, 100).astype(np.int32) * np.where(np.arange(100) % 2, -1, 1).astype(np.int32)
    quotient, remainder, high, wide = (np.zeros(100, t) for t in (np.int32, np.int32, np.uint32, np.int64))
    basic.launch("integers", 1, 128, a, b, quotient, remainder, high, wide, np.int32(100))
    exact = np.trunc(a / b.astype(np.float64)).astype(np.int64)
    np.testing.assert_array_equal(quotient, exact)
    np.testing.assert_array_equal(remainder, a - exact * b)
    product = a.astype(np.uint32).astype(np.uint64) * b.astype(np.uint32).astype(np.uint64)
    np.testing.assert_array_equal(high, product >> np.uint64(32))
    seven = [int(abs(int(x) * int(y)) // 7) * (1 if int(x) * int(y) >= 0 else -1) for x, y in zip(a, b, strict=True)]
    ones = [bin(int(x) & 0xFFFFFFFF).count("1") for x in a]
    zeros = [32 - (int(y) & 0xFFFFFFFF).bit_length() for y in b]
    np.testing.assert_array_equal(wide, np.add(seven, np.add(ones, zeros)))


def test_calls(basic: PtxModule) -> None:
    a = np.arange(32, dtype=np.float32)
    basic.launch("calls", 1, 32, a)
    x = np.arange(32)
    np.testing.assert_array_equal(a, x * x + x + 1)


def test_divergence(basic: PtxModule) -> None:
    out = np.zeros(32, np.int32)
    basic.launch("divergence", 1, 32, out)
    values = np.array([sum(i if i % 3 == lane % 3 else -1 for i in range(lane)) for lane in range(32)])
    odd = np.arange(32) % 2 == 1
    changed = values + np.where(odd, (values[odd] > 0).sum(), -(values[~odd] > 0).sum())
    np.testing.assert_array_equal(out, changed.sum() + np.arange(32))


def test_switch(basic: PtxModule) -> None:
    a = (np.arange(32) % 9).astype(np.int32)
    out = np.zeros_like(a)
    basic.launch("switches", 1, 32, a, out)
    np.testing.assert_array_equal(out, [[5, 77, 1, 9, -1, a[0], a[6], 1000, 1000][v] for v in a])


@pytest.mark.parametrize("kernel", ["mma_f16", "mma_ldmatrix"])
def test_mma(basic: PtxModule, kernel: str) -> None:
    a, b = rng().standard_normal((16, 16)).astype(np.float16), rng().standard_normal((16, 8)).astype(np.float16)
    c = np.zeros((16, 8), np.float32)
    basic.launch(kernel, 1, 32, a, np.ascontiguousarray(b.T) if kernel == "mma_f16" else b, c)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_mma_f64(basic: PtxModule) -> None:
    a, b = rng().standard_normal((8, 4)), rng().standard_normal((4, 8))
    c = np.zeros((8, 8))
    basic.launch("mma_f64", 1, 32, a, b, c)
    np.testing.assert_allclose(c, a @ b, rtol=1e-14, atol=1e-14)


def test_pipeline(basic: PtxModule) -> None:
    n = 700
    values = rng().integers(0, 50, n).astype(np.float32)
    out = np.zeros(32, np.float32)
    basic.launch("pipeline", 1, 32, values, out, np.int32(n))
    padded = np.zeros(768, np.float32)
    padded[:n] = values
    expected = np.roll(padded.reshape(6, 128).sum(0), -64).reshape(32, 4).sum(1)
    np.testing.assert_array_equal(out, expected)


def test_print(basic: PtxModule, capfd: pytest.CaptureFixture[str]) -> None:
    basic.launch("prints", 1, 32, np.int32(7))
    assert capfd.readouterr().out == "".join(f"thread {i} of prints: 3.50 {1 << 40}\n" for i in range(2))


def test_globals(basic: PtxModule) -> None:
    out = np.zeros(8, np.float32)
    basic.launch("globals", 1, 8, out)
    np.testing.assert_array_equal(out, [1.5, 2.5, 3.5, 4.5] * 2)


def test_grid_barrier(basic: PtxModule) -> None:
    arrived, out = np.zeros(1, np.int32), np.zeros(6, np.int32)
    basic.launch("grid_barrier", 6, 64, arrived, out)
    np.testing.assert_array_equal(out, np.full(6, 6))


def test_unknown_instruction(simulator: Simulator) -> None:
    text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n  frobnicate.b32 %r1;\n  ret;\n}\n"
    with pytest.raises(SimulatorError, match=r"'frobnicate.b32' is not known[^\n]*\n.*PTX line 6"):
        simulator.load_ptx(text).launch("k", 1, 32)


def test_unknown_modifier(simulator: Simulator) -> None:
    body = "  .reg .b32 %r<3>;\n  add.fancy.s32 %r1, %r2, 1;\n  ret;\n"
    text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n" + body + "}\n"
    with pytest.raises(SimulatorError, match=r"'\.fancy' of the instruction 'add\.fancy\.s32'"):
        simulator.load_ptx(text).launch("k", 1, 32)
