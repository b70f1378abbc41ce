"""A real GPU, through the driver: loads the same PTX, assembled, and launches on copies of NumPy arrays."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.gpusim.build import BuildError, cache_dir, nvcc
from tests.gpusim.conformance.machine import Machine, TensorMap, kernel_files, needs_sm90, ptx

# cuda.h: CUtensorMapDataType, CUdevice_attribute, CUfunction_attribute
DATA_TYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float32": 7, "float64": 8}
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76
MAX_DYNAMIC_SHARED = 8
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


@functools.cache
def assemble(family: str, arch: str) -> bytes:
    """Machine code of one file's PTX, cached."""
    text = ptx(family)
    digest = hashlib.sha256(f"{arch}\0{text}".encode()).hexdigest()[:24]
    target = cache_dir() / "cubin" / f"{digest}.cubin"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        source = target.with_suffix(f".{os.getpid()}.ptx")
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        source.write_text(text)
        command = [nvcc(), "-cubin", f"-arch={arch}", str(source), "-o", str(temporary)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        source.unlink()
        if done.returncode != 0:
            raise BuildError(f"{family} was not assembled for {arch}\n{done.stdout}{done.stderr}")
        temporary.rename(target)
    return target.read_bytes()


def assemble_all(machine: Machine) -> None:
    """Side by side. What is refused is told by the tests that need it."""

    def one(family: str) -> None:
        if arch := machine.architecture(family):
            with contextlib.suppress(BuildError):
                assemble(family, arch)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, kernel_files()))


class DriverError(RuntimeError):
    """The driver refused, or the kernel faulted."""


def find_driver() -> ctypes.CDLL | None:
    """The driver's library, if it has a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    return driver


class Gpu:
    """The first device, in its primary context. A fault resets it, so that the next form starts anew."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        major, minor = self._attribute(COMPUTE_MAJOR), self._attribute(COMPUTE_MINOR)
        self._arch = f"sm_{major}{minor}" + "a" * ((major, minor) == (9, 0))
        self._modules: dict[str, ctypes.c_void_p] = {}
        self._enter()

    def architecture(self, family: str) -> str | None:
        """PTX for sm_90a runs on that alone."""
        return self._arch if self._arch == "sm_90a" or not needs_sm90(family) else None

    def launch(
        self,
        family: str,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        shared: int = 0,
    ) -> None:
        pointers: list[tuple[ctypes.c_uint64, np.ndarray]] = []
        try:
            values = [self._argument(arg, pointers) for arg in args]
            function = self._function(family, kernel)
            self._call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared)
            addresses = (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(v) for v in values])
            sizes = [([d] if isinstance(d, int) else list(d)) + [1, 1] for d in (grid, block)]
            numbers = [ctypes.c_uint(n) for size in sizes for n in size[:3]]
            self._call("cuLaunchKernel", function, *numbers, ctypes.c_uint(shared), None, addresses, None)
            self._call("cuCtxSynchronize")
            for pointer, array in pointers:
                back = np.empty(array.shape, array.dtype)
                self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(back.ctypes.data), pointer, ctypes.c_size_t(back.nbytes))
                array[...] = back
        except DriverError:
            self._reset()
            raise
        for pointer, _ in pointers:
            self._call("cuMemFree_v2", pointer)

    def _argument(self, arg: Any, pointers: list[tuple[ctypes.c_uint64, np.ndarray]]) -> Any:
        """What the kernel is given, as a ctypes object."""
        if isinstance(arg, TensorMap):
            return self._tensor_map(arg, self._to_device(arg.array, pointers))
        if isinstance(arg, np.ndarray):
            return self._to_device(arg, pointers)
        data = arg if isinstance(arg, bytes) else np.asarray(arg).tobytes()
        return ctypes.create_string_buffer(data, len(data))

    def _to_device(self, array: np.ndarray, pointers: list[tuple[ctypes.c_uint64, np.ndarray]]) -> ctypes.c_uint64:
        pointer, whole = ctypes.c_uint64(), np.ascontiguousarray(array)
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(whole.nbytes, 1)))
        pointers.append((pointer, array))
        self._call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(whole.nbytes))
        return pointer

    def _tensor_map(self, given: TensorMap, pointer: ctypes.c_uint64) -> Any:
        """128 bytes at a multiple of 64, inside of a buffer that is kept as long as they are."""
        array, rank = given.array, given.array.ndim
        raw = (ctypes.c_uint8 * 192)()
        encoded = (ctypes.c_uint8 * 128).from_buffer(raw, -ctypes.addressof(raw) % 64)
        self._call(
            "cuTensorMapEncodeTiled",
            encoded,
            DATA_TYPES[array.dtype.name],
            ctypes.c_uint32(rank),
            pointer,
            (ctypes.c_uint64 * rank)(*array.shape[::-1]),
            (ctypes.c_uint64 * rank)(*array.strides[-2::-1]),
            (ctypes.c_uint32 * rank)(*given.box[::-1]),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,  # no interleave
            SWIZZLES[given.swizzle],
            0,  # no promotion in L2
            0,  # zeros outside
        )
        return encoded

    def _function(self, family: str, kernel: str) -> ctypes.c_void_p:
        if family not in self._modules:
            module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(assemble(family, self._arch)))
            self._modules[family] = module
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), self._modules[family], kernel.encode())
        return function

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    def _enter(self) -> None:
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)

    def _reset(self) -> None:
        self._modules.clear()
        self._call("cuDevicePrimaryCtxReset_v2", self._device)
        self._enter()

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._driver, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown').decode()}")


def find_gpu() -> Gpu | None:
    driver = find_driver()
    if driver is None:
        if os.environ.get("MHA_EXT_TEST_GPU"):
            pytest.fail("a GPU was asked for, and the driver has none")
        return None
    return Gpu(driver)
