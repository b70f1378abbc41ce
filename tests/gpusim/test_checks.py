"""Every check on a kernel that is broken in one way, and on its correct twin."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.gpusim.build import compile_ptx, load_simulator
from tests.gpusim.simulator import PtxModule, Simulator, SimulatorError

pytestmark = pytest.mark.sim
KERNELS = Path(__file__).parent / "kernels"

# what -> (the switch that governs it, or None: always on; the words of the report)
BROKEN = {
    "global_bounds": ("global_bounds", r"out of bounds.*at PTX line"),
    "shared_bounds": (None, r"shared write of 4 bytes out of bounds: byte 256 of 256"),
    "alignment": ("alignment", r"misaligned read of 16 bytes"),
    "uninitialized": ("uninitialized", r"never written, byte 252"),
    "race_read": ("races", r"race on shared memory"),
    "race_overwrite": ("races", r"race on shared memory"),
    "race_write": ("races", r"writes another value over"),
    "race_bytes": ("races", r"writes another value over"),
    "race_lanes": ("races", r"without __syncwarp"),
    "async_wait": ("async_wait", r"before the wait for the asynchronous copy"),
    "async_groups": ("async_wait", r"before the wait for the asynchronous copy"),
    "async_barrier": (None, r"before the wait|never written|race on shared memory"),
    "exited": ("barriers", r"exit"),
    "barrier_count": ("barriers", r"barrier 1 is used with|deadlock"),
    "deadlock": (None, r"deadlock.*barrier 1 .*barrier 2"),
    "divergent": (None, r"deadlock"),
    "members": (None, r"does not take part"),
    "producer": (None, r"never written|race on shared memory"),
}


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return load_simulator()


@pytest.fixture(scope="module")
def module(simulator: Simulator) -> PtxModule:
    return simulator.load_ptx(compile_ptx(KERNELS / "broken.cu"))


def aligned_range(n: int) -> np.ndarray:
    raw = np.zeros(n + 64, np.float32)
    start = (-raw.ctypes.data // 4) % 64
    raw[start : start + n] = np.arange(n)
    return raw[start : start + n]


def launch(module: PtxModule, kernel: str) -> None:
    block = 128 if "global_bounds" in kernel else 64
    shared = 256 if "shared_bounds" in kernel else 0
    module.launch(kernel, 1, block, aligned_range(64), aligned_range(64), np.int32(64), shared=shared)


@pytest.mark.parametrize("arrival", ["late", "at_once"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("what", BROKEN)
def test_broken(simulator: Simulator, module: PtxModule, what: str, seed: int, arrival: str) -> None:
    with simulator.using(checks=True, seed=seed, arrival=arrival):
        with pytest.raises(SimulatorError, match=f"(?s){BROKEN[what][1]}") as report:
            launch(module, f"{what}_broken")
        assert f"{what}_broken" in str(report.value)
        assert "broken.cu:" in str(report.value)


@pytest.mark.parametrize("arrival", ["late", "at_once"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("what", BROKEN)
def test_right(simulator: Simulator, module: PtxModule, what: str, seed: int, arrival: str) -> None:
    with simulator.using(checks=True, seed=seed, arrival=arrival):
        launch(module, f"{what}_right")


@pytest.mark.parametrize("what", [what for what, (switch, _) in BROKEN.items() if switch and what != "global_bounds"])
def test_switched_off(simulator: Simulator, module: PtxModule, what: str) -> None:
    switch = BROKEN[what][0]
    with simulator.using(checks=True, **{switch: False, "arrival": "late"}):
        report = ""
        try:
            launch(module, f"{what}_broken")
        except SimulatorError as error:  # another check, or a deadlock, may see it
            report = str(error)
    assert what == "barrier_count" or not re.search(f"(?s){BROKEN[what][1]}", report)


def test_shared_limit(simulator: Simulator, module: PtxModule) -> None:
    a, b = aligned_range(64), aligned_range(64)
    with (
        simulator.using(architecture=80),
        pytest.raises(SimulatorError, match="needs 200000 bytes of shared memory, a block of sm_80 has at most 166912"),
    ):
        module.launch("shared_bounds_right", 1, 64, a, b, np.int32(64), shared=200000)
    module.launch("shared_bounds_right", 1, 64, a, b, np.int32(64), shared=200000)


def test_step_limit(simulator: Simulator, module: PtxModule) -> None:
    with simulator.using(step_limit=5), pytest.raises(SimulatorError, match="the limit that was set"):
        launch(module, "race_overwrite_right")
