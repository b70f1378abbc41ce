"""What the processor can do at most, measured by small loops in C++ (peak.cpp) that are compiled when they are needed.

Without a compiler there is no peak, which is said and not an error. Nothing of this is part of the package.
"""

import ctypes
import functools
import os
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Loops", "load_loops"]

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp")
SECONDS = 0.03  # of one try of a loop
TRIES = 7
LARGE_BYTES = 256 << 20  # more than any cache


class Loops:
    """The compiled loops, on as many threads as torch uses at the call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name in ("run_multiply_add", "run_bf16_dot"):
            getattr(library, name).argtypes = (ctypes.c_int64, ctypes.c_int)
        library.read_words.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        library.read_words.restype = ctypes.c_int64

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """The best of some tries of multiply-adds in registers; bf16 by its dot product where the processor has it."""
        name = "multiply_add"
        if dtype == torch.bfloat16 and self.has_bf16_dot():
            name = "bf16_dot"
        per_step = getattr(self.library, f"{name}_flops_per_step")()
        loop, threads = getattr(self.library, f"run_{name}"), torch.get_num_threads()
        trial = 100_000  # steps, on one thread: waiting for others on a busy machine would look like work
        steps = int(trial * SECONDS / min(seconds_of(lambda: loop(trial, 1)) for _ in range(TRIES)))
        best = min(seconds_of(lambda: loop(steps, threads)) for _ in range(TRIES))
        return float(per_step) * steps * threads / best

    def has_bf16_dot(self) -> bool:
        """Whether this processor multiplies pairs of bf16 in one instruction; if not, bf16 is computed in fp32."""
        return bool(self.library.bf16_dot_flops_per_step())

    def read(self, tensor: Tensor) -> int:
        """The sum of all words of 8 bytes of a dense tensor, in 64 bits."""
        return int(self.library.read_words(tensor.data_ptr(), tensor.nbytes // 8, torch.get_num_threads()))

    def large_read_bytes_per_second(self) -> float:
        """Of memory that no cache holds: median of some tries."""
        memory = torch.ones(LARGE_BYTES // 8, dtype=torch.int64)
        return LARGE_BYTES / statistics.median(seconds_of(lambda: self.read(memory)) for _ in range(TRIES))


def seconds_of(call: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@functools.cache
def load_loops() -> tuple[Loops | None, str]:
    """The loops, compiled in a temporary directory once a process; or None and why not."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]  # as torch's own build of extensions finds it
    if shutil.which(compiler[0]) is None:
        return None, f"there is no C++ compiler ({compiler[0]} is not on PATH)"
    with tempfile.TemporaryDirectory(prefix="mha_ext_benchmark_") as folder:
        made, library = Path(folder, "peak.o"), Path(folder, "peak.so")
        source = str(Path(__file__).with_name("peak.cpp"))
        try:
            run([*compiler, *FLAGS, "-c", source, "-o", str(made)])
            run([*compiler, "-shared", str(made), "-o", str(library)])  # no OpenMP: torch has loaded its own
            return Loops(ctypes.CDLL(str(library))), ""
        except (OSError, subprocess.SubprocessError) as problem:
            said = (getattr(problem, "stderr", "") or str(problem)).strip().splitlines()
            return None, f"{compiler[0]} does not build peak.cpp: {said[0] if said else type(problem).__name__}"


def run(command: Sequence[str]) -> None:
    """Of the compiler; raises where it fails, with what it said."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
