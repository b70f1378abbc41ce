"""The simulator from Python: switches, counters, and launching kernels of a PTX text on NumPy arrays."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ARRIVALS = {"late": 0, "at_once": 1, "random": 2}
CHECKS = (
    "global_bounds",
    "alignment",
    "uninitialized",
    "races",
    "barriers",
    "async_wait",
    "launch_bounds",
    "wgmma_registers",
    "proxy_fences",
    "cp_async_fence",
    "mbarrier_init_fence",
)


class SimulatorError(RuntimeError):
    """A kernel did something a check refuses, or something the simulator does not know."""


@dataclass(frozen=True)
class LaunchRecord:
    """What one launch did. `numbers` holds every counter by name, `instructions` warp instructions by class."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    seconds: float
    instructions: Mapping[str, int]
    numbers: Mapping[str, int] = field(repr=False)

    def __getattr__(self, name: str) -> int:
        try:
            return self.numbers[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def wavefronts_per_load(self) -> float:
        """Shared-memory wavefronts of loads, over those that would do without bank conflicts."""
        return self.shared_load_wavefronts / max(self.shared_load_ideal, 1)

    @property
    def wavefronts_per_store(self) -> float:
        """As `wavefronts_per_load`, for stores."""
        return self.shared_store_wavefronts / max(self.shared_store_ideal, 1)


class Simulator:
    """One loaded library: the simulator alone, or the package's kernels with the simulator inside.

    Parameters
    ----------
    path
        The shared library, see `tests.gpusim.build`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        library.gpusim_set.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
        library.gpusim_get.argtypes = [ctypes.c_char_p]
        library.gpusim_get.restype = ctypes.c_longlong
        library.gpusim_register_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.gpusim_unregister_memory.argtypes = [ctypes.c_void_p]
        library.gpusim_take_records.restype = ctypes.c_char_p
        library.gpusim_load_ptx.argtypes = [ctypes.c_char_p]
        library.gpusim_load_ptx.restype = ctypes.c_void_p
        library.gpusim_last_error.restype = ctypes.c_char_p
        library.gpusim_launch.restype = ctypes.c_char_p
        self._library = library

    # switches

    def set(self, **switches: bool | int | str) -> None:
        """Set switches: the names of `CHECKS`, `checks` (all of them), `arrival` ("late", "at_once", "random"),
        `seed` (0: warps take turns), `architecture`, `threads`, `multiprocessors`, `count_memory`, `step_limit`,
        `poll_limit`."""
        for name, value in switches.items():
            if name == "checks":
                for check in CHECKS:
                    self._set(check, int(value))
            elif name == "arrival":
                self._set(name, ARRIVALS[str(value)])
            else:
                self._set(name, int(value))

    def _set(self, name: str, value: int) -> None:
        if not self._library.gpusim_set(name.encode(), value):
            raise ValueError(f"the simulator has no switch {name!r}")

    @contextlib.contextmanager
    def using(self, **switches: bool | int | str) -> Iterator[Simulator]:
        """`set` for the time of a with block."""
        names = {n for name in switches for n in (CHECKS if name == "checks" else (name,))}
        saved = {name: self._library.gpusim_get(name.encode()) for name in names}
        self.set(**switches)
        try:
            yield self
        finally:
            for name, value in saved.items():
                self._set(name, value)

    # counters

    def take_records(self) -> list[LaunchRecord]:
        """The records of all launches since the last call."""
        records = []
        for r in json.loads(self._library.gpusim_take_records()):
            known = {"kernel", "grid", "block", "shared_bytes", "seconds", "instructions"}
            numbers = {name: value for name, value in r.items() if name not in known}
            records.append(
                LaunchRecord(
                    r["kernel"],
                    tuple(r["grid"]),
                    tuple(r["block"]),
                    r["shared_bytes"],
                    r["seconds"],
                    r["instructions"],
                    numbers,
                )
            )
        return records

    # memory

    def register(self, array: Any) -> None:
        """Allow kernels to touch this NumPy array or CPU tensor (tensors made after loading are allowed already)."""
        if isinstance(array, np.ndarray):
            low, high = np.lib.array_utils.byte_bounds(array)
            self._library.gpusim_register_memory(low, high - low)
        else:
            storage = array.untyped_storage()
            self._library.gpusim_register_memory(storage.data_ptr(), storage.nbytes())

    def unregister(self, array: Any) -> None:
        """Forget what `register` was told."""
        if isinstance(array, np.ndarray):
            self._library.gpusim_unregister_memory(np.lib.array_utils.byte_bounds(array)[0])
        else:
            self._library.gpusim_unregister_memory(array.untyped_storage().data_ptr())

    def encode_tiled(self, array: np.ndarray, box: Sequence[int], swizzle: int = 0) -> bytes:
        """A tensor map (128 bytes) of an array, as cuTensorMapEncodeTiled makes it; `box` in the array's order."""
        raw = np.zeros(256, np.uint8)
        at = raw[-raw.ctypes.data % 64 :][:128]
        dims = np.array(array.shape[::-1], np.uint64)
        strides = np.array(array.strides[-2::-1], np.uint64)
        boxes, steps = np.array(box[::-1], np.uint32), np.ones(array.ndim, np.uint32)
        encode = self._library.gpusim_encode_tiled
        encode.restype = ctypes.c_char_p
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (at, array, dims, strides, boxes, steps)]
        mode = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
        error = encode(pointers[0], array.itemsize, array.ndim, *pointers[1:], mode)
        if error:
            raise ValueError(error.decode())
        return at.tobytes()

    # kernels of a PTX text

    def load_ptx(self, text: str) -> PtxModule:
        """Load a PTX text."""
        handle = self._library.gpusim_load_ptx(text.encode())
        if not handle:
            raise SimulatorError(self._library.gpusim_last_error().decode())
        return PtxModule(self, handle, text)


class PtxModule:
    """A loaded PTX text; `launch` runs one of its kernels."""

    def __init__(self, simulator: Simulator, handle: int, text: str) -> None:
        self._simulator = simulator
        self._handle = handle
        self._kernels = [
            w.split("(")[0] for line in text.splitlines() if ".entry" in line for w in [line.split(".entry")[1].strip()]
        ]

    def kernel_name(self, part: str) -> str:
        """The one kernel whose (mangled) name contains `part`."""
        found = [name for name in self._kernels if name == part] or [name for name in self._kernels if part in name]
        if len(found) != 1:
            raise ValueError(f"{part!r} names {len(found)} kernels of {self._kernels}")
        return found[0]

    def launch(
        self, kernel: str, grid: int | Sequence[int], block: int | Sequence[int], *args: Any, shared: int = 0
    ) -> None:
        """Run a kernel. NumPy arrays are passed as pointers (and registered), NumPy scalars and bytes by value."""
        name = self.kernel_name(kernel)
        library = self._simulator._library
        keep: list[Any] = []
        arrays = [a for a in args if isinstance(a, np.ndarray)]
        for a in args:
            if isinstance(a, np.ndarray):
                keep.append(ctypes.c_void_p(a.ctypes.data))
            else:
                data = a if isinstance(a, bytes) else np.asarray(a).tobytes()
                keep.append(ctypes.create_string_buffer(data, len(data)))
        sizes = (ctypes.c_uint * 64)()
        n = library.gpusim_parameters(ctypes.c_void_p(self._handle), name.encode(), sizes, 64)
        if n < 0:
            raise SimulatorError(library.gpusim_last_error().decode())
        if n != len(keep) or any(sizes[i] != ctypes.sizeof(keep[i]) for i in range(n)):
            raise ValueError(
                f"{name} takes parameters of {list(sizes[:n])} bytes, not {[ctypes.sizeof(k) for k in keep]}"
            )
        pointers = (ctypes.c_void_p * max(n, 1))(*[ctypes.addressof(k) for k in keep])
        dims = [(ctypes.c_uint * 3)(*(([d] if isinstance(d, int) else list(d)) + [1, 1, 1])[:3]) for d in (grid, block)]
        for a in arrays:
            self._simulator.register(a)
        try:
            error = library.gpusim_launch(
                ctypes.c_void_p(self._handle), name.encode(), dims[0], dims[1], shared, pointers
            )
        finally:
            for a in arrays:
                self._simulator.unregister(a)
        if error:
            raise SimulatorError(error.decode())
