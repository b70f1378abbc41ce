"""Every check on a kernel that is broken in one way, and on its correct twin."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpusim.build import compile_ptx, cxx, load_simulator, nvcc
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
    "meet": ("races", r"reads what .* without __syncwarp"),
    "readers": ("races", r"overwrites what .* without __syncwarp"),
    "store_lanes": ("races", r"writes another value over"),
    "store_atomic": ("races", r"race on shared memory"),
    "atomic_read": ("races", r"race on shared memory"),
    "async_wait": ("async_wait", r"before the wait for the asynchronous copy"),
    "async_groups": ("async_wait", r"before the wait for the asynchronous copy"),
    "async_barrier": (None, r"before the wait|never written|race on shared memory"),
    "exited": ("barriers", r"exit"),
    "barrier_count": ("barriers", r"barrier 1 is used with|deadlock"),
    "deadlock": (None, r"deadlock.*barrier 1 .*barrier 2"),
    "divergent": (None, r"deadlock"),
    "members": (None, r"does not take part"),
    "producer": (None, r"never written|race on shared memory"),
    "barrier_left": ("barriers", r"exits while other warps wait for it|ended with 32 of 64 threads at barrier 1"),
    "wrapped": ("global_bounds", r"global read of 16 bytes out of bounds: 0xfffffffffffffff0"),
}

_OVERWRITTEN = r"overwrites shared memory, byte .* may still read"
BROKEN_SM90 = {
    "proxy_store": ("proxy_fences", r"asynchronous proxy reads .* without fence.proxy.async"),
    "proxy_issuer": ("proxy_fences", r"asynchronous proxy reads .* without fence.proxy.async"),
    "proxy_order": ("proxy_fences", r"asynchronous proxy reads .* without fence.proxy.async"),
    "proxy_wgmma": ("proxy_fences", r"asynchronous proxy reads .* without fence.proxy.async"),
    "proxy_load": ("proxy_fences", r"asynchronous proxy overwrites .* without fence.proxy.async"),
    "copy_fence": ("cp_async_fence", r"asynchronous proxy reads .* without fence.proxy.async"),
    "init_fence": ("mbarrier_init_fence", r"initialised without fence.mbarrier_init"),
    "init_thread": ("mbarrier_init_fence", r"initialised without fence.mbarrier_init"),
    "init_order": (None, r"no mbarrier was initialised|uses the mbarrier what .* initialised, without"),
    "arrivals": ("barriers", r"more arrivals at an mbarrier whose phase 0 expects 0 \(of 64\)"),
    "bytes": ("barriers", r"leave their range: 1048576"),
    "no_init": (None, r"no mbarrier was initialised"),
    "invalidated": (None, r"after mbarrier.inval"),
    "init_again": ("barriers", r"again, without mbarrier.inval"),
    "phase": (None, r"deadlock.*mbarrier at byte \d+ \(its phase 1 lacks 128 of 128 arrivals and 0 bytes\)"),
    "old_phase": ("barriers", r"only the current and the last phase"),
    "elected": ("races", r"overwrites what warp 1, lane \d+ read, without a barrier"),
    "elected_write": ("races", r"reads what warp 0, lane \d+ .* wrote, without a barrier"),
    "refill": ("races", r"overwrites what warp 0, lane \d+ read, without __syncwarp"),
    "bulk_edge": (None, r"never written|race on shared memory"),
    "copy_edge": (None, r"never written|race on shared memory"),
    "bulk_other": (None, r"before the wait|race on shared memory"),
    "bulk_source": ("async_wait", _OVERWRITTEN),
    "bulk_exit": ("async_wait", r"exits while a bulk store"),
    "wgmma_read": ("wgmma_registers", r"reads an accumulator before wgmma.wait_group"),
    "wgmma_write": ("wgmma_registers", r"(reads|overwrites) an accumulator before wgmma.wait_group"),
    "wgmma_move": ("wgmma_registers", r"reads an accumulator before wgmma.wait_group"),
    "wgmma_groups": ("wgmma_registers", r"reads an accumulator before wgmma.wait_group"),
    "wgmma_commit": ("wgmma_registers", r"reads an accumulator before wgmma.wait_group"),
    "wgmma_fence": ("wgmma_registers", r"first wgmma without a wgmma.fence"),
    "wgmma_rescale": ("wgmma_registers", r"an accumulator of wgmma was written since the last wgmma.fence"),
    "wgmma_shape": ("wgmma_registers", r"used in another shape since the last wgmma.fence"),
    "wgmma_fragment": ("wgmma_registers", r"overwrites a fragment of A before wgmma.wait_group"),
    "wgmma_store": ("async_wait", _OVERWRITTEN),
    "wgmma_copy": ("async_wait", _OVERWRITTEN),
    "wgmma_bulk": ("async_wait", _OVERWRITTEN),
    "registers_pool": (None, r"deadlock.*asks for 1024 more"),
    "bulk_left": ("async_wait", r"the block ended while a bulk load was in flight that nobody waited for"),
    "cluster_order": (None, r"never written|race on shared memory"),
    "cluster_relaxed": ("races", r"race on shared memory"),
    "cluster_twice": ("barriers", r"arrives twice at the barrier of the cluster"),
    "cluster_early": ("barriers", r"without having arrived"),
    "cluster_named": ("barriers", r"the block ended with 32 of 64 threads at barrier 15"),
    "cluster_deadlock": (None, r"deadlock.*waits for the barrier of the cluster"),
}
BROKEN |= BROKEN_SM90


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return load_simulator()


class Modules:
    """The kernels of both files, by name."""

    def __init__(self, *modules: PtxModule) -> None:
        self._modules = modules

    def launch(self, kernel: str, *arguments: Any, **options: Any) -> None:
        """Run the kernel of this name."""
        self._modules[kernel.rsplit("_", 1)[0] in {*BROKEN_SM90, "poll"}].launch(kernel, *arguments, **options)


@pytest.fixture(scope="module")
def module(simulator: Simulator) -> Modules:
    return Modules(*(simulator.load_ptx(compile_ptx(KERNELS / f"{name}.cu")) for name in ("broken", "broken_sm90")))


def aligned_range(n: int) -> np.ndarray:
    raw = np.zeros(n + 64, np.float32)
    start = (-raw.ctypes.data // 4) % 64
    raw[start : start + n] = np.arange(n)
    return raw[start : start + n]


def launch(module: Modules, kernel: str) -> None:
    what = kernel.rsplit("_", 1)[0]
    block = 256 if what == "registers_pool" else 128 if what == "global_bounds" or what in BROKEN_SM90 else 64
    shared = 256 if "shared_bounds" in kernel else 0
    module.launch(kernel, 1, block, aligned_range(64), aligned_range(64), np.int32(64), shared=shared)


@pytest.mark.parametrize("arrival", ["late", "at_once"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("what", BROKEN)
def test_broken(simulator: Simulator, module: Modules, what: str, seed: int, arrival: str) -> None:
    with simulator.using(checks=True, seed=seed, arrival=arrival):
        with pytest.raises(SimulatorError, match=f"(?s){BROKEN[what][1]}") as report:
            launch(module, f"{what}_broken")
        assert f"{what}_broken" in str(report.value)
        assert re.search(r"broken(_sm90)?.cu:", str(report.value))


@pytest.mark.parametrize("arrival", ["late", "at_once"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("what", BROKEN)
def test_right(simulator: Simulator, module: Modules, what: str, seed: int, arrival: str) -> None:
    with simulator.using(checks=True, seed=seed, arrival=arrival):
        launch(module, f"{what}_right")


@pytest.mark.parametrize("what", [what for what, (switch, _) in BROKEN.items() if switch and switch != "global_bounds"])
def test_switched_off(simulator: Simulator, module: Modules, what: str) -> None:
    switch = BROKEN[what][0]
    with simulator.using(checks=True, **{switch: False, "arrival": "late"}):
        report = ""
        try:
            launch(module, f"{what}_broken")
        except SimulatorError as error:  # another check, or a deadlock, may see it
            report = str(error)
    assert what == "barrier_count" or not re.search(f"(?s){BROKEN[what][1]}", report)


def test_ptxas_agrees(tmp_path: Path) -> None:
    """Where it finds registers of wgmma used against the rules, ptxas says so: of broken kernels, and of no twin."""
    source = KERNELS / "broken_sm90.cu"
    command = [nvcc(), f"-ccbin={cxx()}", "-std=c++17", "-O3", "-arch=sm_90a", "-cubin", "-Xptxas=-v", str(source)]
    done = subprocess.run([*command, "-o", str(tmp_path / "cubin")], capture_output=True, text=True, check=True)
    objections = set(re.findall(r"\(C75\d\d\).* in (?:the )?function '(\w+)'", done.stdout + done.stderr))
    known = ("read", "write", "move", "groups", "fence", "rescale", "shape")
    assert objections == {f"wgmma_{what}_broken" for what in known}


def test_shared_limit(simulator: Simulator, module: Modules) -> None:
    a, b = aligned_range(64), aligned_range(64)
    with (
        simulator.using(architecture=80),
        pytest.raises(SimulatorError, match="needs 200000 bytes of shared memory, a block of sm_80 has at most 166912"),
    ):
        module.launch("shared_bounds_right", 1, 64, a, b, np.int32(64), shared=200000)
    module.launch("shared_bounds_right", 1, 64, a, b, np.int32(64), shared=200000)


@pytest.mark.parametrize(
    ("directives", "threads", "report"),
    [
        (".reqntid 64", 32, "compiled for exactly 64"),
        (".maxntid 64", 96, "compiled for at most 64"),
        (".maxntid 1024 .maxnreg 128", 1024, "with 128 registers each"),
        ("", 288, "no launch bounds"),
        ("", 1056, "a block of 1056 threads"),
    ],
)
def test_launch_limits(simulator: Simulator, directives: str, threads: int, report: str) -> None:
    kernel = f".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() {directives} {{ ret; }}\n"
    module = simulator.load_ptx(kernel)
    with pytest.raises(SimulatorError, match=report):
        module.launch("k", 1, threads)
    module.launch("k", 1, 64)
    if report == "no launch bounds":
        with simulator.using(launch_bounds=False):
            module.launch("k", 1, threads)


def test_step_limit(simulator: Simulator, module: Modules) -> None:
    with simulator.using(step_limit=5), pytest.raises(SimulatorError, match="the limit that was set"):
        launch(module, "race_overwrite_right")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("what", ["mbarrier", "global"])
def test_polling(simulator: Simulator, module: Modules, what: str, seed: int) -> None:
    with simulator.using(poll_limit=1 << 18, seed=seed), pytest.raises(SimulatorError, match="it polls") as report:
        module.launch(f"poll_{what}", 1, 128, aligned_range(64), aligned_range(64), np.int32(64))
    assert "broken_sm90.cu:" in str(report.value)
