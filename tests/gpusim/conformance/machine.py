"""Where the micro-kernels run: the simulator, or a real GPU. Both take NumPy arrays and change them in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.gpusim.build import compile_ptx, load_simulator
from tests.gpusim.simulator import PtxModule

KERNELS = Path(__file__).parent / "kernels"


@dataclass(frozen=True)
class TensorMap:
    """An argument: the tensor map of an array, with a box in the array's order and a swizzle of so many bytes."""

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int = 0


class Machine(Protocol):
    def architecture(self, family: str) -> str | None:
        """What a file of kernels is assembled for; None if it does not run here."""

    def launch(
        self,
        family: str,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        shared: int = 0,
    ) -> None: ...


def kernel_files() -> list[str]:
    return sorted(path.stem for path in KERNELS.glob("*.cu"))


def needs_sm90(family: str) -> bool:
    return family.endswith("_sm90")


@functools.cache
def ptx(family: str) -> str:
    """The PTX of one file of kernels: the same text on both machines."""
    return compile_ptx(KERNELS / f"{family}.cu", arch="compute_90a" if needs_sm90(family) else "compute_80")


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """As device memory: 256-byte aligned."""
    raw = np.empty(array.nbytes + 256, np.uint8)
    copy = raw[-raw.ctypes.data % 256 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class SimulatedGpu:
    """The simulator, with all checks. Every launch runs three times: asynchronous copies late, at once and at random
    with another order of warps; the results must agree."""

    orders = ((0, "late"), (1, "at_once"), (2, "random"))

    def __init__(self) -> None:
        self._simulator = load_simulator()
        self._modules: dict[str, PtxModule] = {}

    def architecture(self, family: str) -> str | None:
        return "sm_90a" if needs_sm90(family) else "sm_80"

    def launch(
        self,
        family: str,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        shared: int = 0,
    ) -> None:
        if family not in self._modules:
            self._modules[family] = self._simulator.load_ptx(ptx(family))
        results: list[list[np.ndarray]] = []
        for seed, arrival in self.orders:
            copies = [self._pass(arg) for arg in args]
            mapped = [copy for arg, (_, copy) in zip(args, copies, strict=True) if isinstance(arg, TensorMap)]
            for array in mapped:
                self._simulator.register(array)
            try:
                with self._simulator.using(seed=seed, arrival=arrival, checks=True):
                    self._modules[family].launch(kernel, grid, block, *(given for given, _ in copies), shared=shared)
            finally:
                for array in mapped:
                    self._simulator.unregister(array)
            results.append([copy for _, copy in copies if copy is not None])
        for other in results[1:]:
            for first, second in zip(results[0], other, strict=True):
                np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8), "depends on the order")
        for array, result in zip(arrays_of(args), results[0], strict=True):
            array[...] = result

    def _pass(self, arg: Any) -> tuple[Any, np.ndarray | None]:
        """What the kernel is given, and the copy that it works on."""
        if isinstance(arg, TensorMap):
            copy = aligned_copy(arg.array)
            return self._simulator.encode_tiled(copy, arg.box, arg.swizzle), copy
        if isinstance(arg, np.ndarray):
            copy = aligned_copy(arg)
            return copy, copy
        return arg, None


def arrays_of(args: Sequence[Any]) -> list[np.ndarray]:
    """The arrays among the arguments, those behind tensor maps included."""
    return [a.array if isinstance(a, TensorMap) else a for a in args if isinstance(a, (TensorMap, np.ndarray))]
