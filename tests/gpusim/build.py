"""Builds the simulator, and the package's CUDA kernels with the simulator in place of the CUDA runtime.

Every object is cached by the content of all it was made from, in `$XDG_CACHE_HOME/mha_ext-gpusim` (or `~/.cache/...`).

    python -m tests.gpusim.build          build everything, with progress
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpusim.simulator import Simulator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
sys.path.insert(0, str(ROOT))
import build_backend  # noqa: E402

# Plain PTX, which the simulator reads; all else as it ships.
PTX_FLAGS = ["-gencode", "arch=compute_90a,code=compute_90a", "--compress-mode=none"]
# No contraction: a product and a sum stay two roundings unless the PTX says fma. Errors of math functions and traps
# are of no interest, and stand in the way of vector code.
SIMULATOR_FLAGS = [
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]

OLDEST_GXX = 12  # the first with __builtin_shufflevector
NEEDED_CXX = f"install g++ {OLDEST_GXX} or later, or clang++, or name one in CXX"
KEPT_LIBRARIES = 8  # of each kind; every state of the sources gives another
KEPT_DAYS = 14  # an object or PTX file that nothing asked for


class BuildError(RuntimeError):
    """A compiler refused."""


class MissingError(BuildError):
    """This machine lacks what the simulator is built with."""


@dataclass(frozen=True)
class Step:
    """One object: its source, and the command without `-o`."""

    source: Path
    command: tuple[str, ...]
    include_dirs: tuple[Path, ...]


def cache_dir() -> Path:
    """Where objects and libraries are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mha_ext-gpusim"


@functools.cache
def toolkit() -> build_backend.Toolkit:
    """The CUDA toolkit: CUDA_HOME, nvcc on PATH, the usual places, or the PyPI wheels."""
    refused: list[str] = []
    for version in ("13.0", "12.8"):
        found = build_backend.find_toolkit(version, os.environ, build_backend.site_dirs(), refused)
        if found is not None:
            return found
    raise MissingError(
        "no CUDA compiler: put nvcc on PATH or `pip install 'cuda-toolkit[nvcc,cudart,cccl]==13.0.*'`"
        + "".join(f"\n  {line}" for line in refused)
    )


def nvcc() -> str:
    """The compiler of the toolkit."""
    return str(toolkit().home / "bin" / "nvcc")


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


@functools.cache
def _machine() -> str:
    """What -march=native depends on."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return os.uname().machine


def _included(source: Path, include_dirs: Sequence[Path], seen: dict[Path, bytes]) -> None:
    """All files of this repository that `source` includes, with their content."""
    if source in seen:
        return
    seen[source] = source.read_bytes()
    for name in re.findall(rb'^\s*#\s*include\s*"([^"]+)"', seen[source], re.MULTILINE):
        for directory in (source.parent, *include_dirs):
            candidate = (directory / name.decode()).resolve()
            if candidate.is_file() and ROOT in candidate.parents:
                _included(candidate, include_dirs, seen)
                break


def _key(step: Step) -> str:
    """A hash of everything the object depends on."""
    seen: dict[Path, bytes] = {}
    _included(step.source, step.include_dirs, seen)
    digest = hashlib.sha256()
    command = [part.replace(str(ROOT), "") for part in step.command]
    for part in (*command, _version(step.command[0]), _machine(), *(seen[path] for path in sorted(seen))):
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:24]


def _say(text: str) -> None:
    print(f"gpusim: {text}", file=sys.stderr, flush=True)


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{what} did not compile\n{shlex.join(command)}\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One build at a time: others wait and then find the work done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another build")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_library(name: str, steps: Sequence[Step], link: Sequence[str]) -> Path:
    """Compile what is not in the cache, link, and return the shared library."""
    objects = {step: cache_dir() / "objects" / f"{_key(step)}.o" for step in steps}
    digest = hashlib.sha256("\0".join([*(path.name for path in objects.values()), *link]).encode()).hexdigest()[:24]
    library = cache_dir() / f"{name}-{digest}.so"
    if _in_cache(library):
        return library
    with _locked(cache_dir() / f"{name}.lock"):
        if library.is_file():
            return library
        (cache_dir() / "objects").mkdir(parents=True, exist_ok=True)
        missing = [step for step in steps if not _in_cache(objects[step])]
        workers = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(max(workers, 1)) as pool:
            futures = {pool.submit(_compile, step, objects[step]): step for step in missing}
            try:
                for i, future in enumerate(concurrent.futures.as_completed(futures), 1):
                    future.result()
                    _say(f"[{i}/{len(missing)}] {futures[future].source.relative_to(ROOT)}")
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
        _say(f"linking {library}")
        temporary = library.with_suffix(f".{os.getpid()}.tmp")
        command = [cxx(), "-shared", "-o", str(temporary), *map(str, objects.values()), "-Wl,-Bsymbolic", *link]
        _run(command, library.name)
        temporary.rename(library)
        prune(name)
    return library


def _in_cache(path: Path) -> bool:
    """Whether it is there; if so, it counts as new again."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:  # another's cache
        return path.is_file()
    return True


def prune(name: str) -> None:
    """Delete the libraries of this name but the newest, and what nothing has asked for in days.

    A library that a process has loaded stays usable to it.
    """

    def age(path: Path) -> float:
        with contextlib.suppress(FileNotFoundError):
            return time.time() - path.stat().st_mtime
        return 0.0

    libraries = sorted(cache_dir().glob(f"{name}-*.so"), key=age)
    files = [*(cache_dir() / "objects").glob("*.o"), *(cache_dir() / "ptx").glob("*.ptx")]
    old = [path for path in files if age(path) > KEPT_DAYS * 86400]
    for path in [*libraries[KEPT_LIBRARIES:], *old]:
        path.unlink(missing_ok=True)


def _compile(step: Step, target: Path) -> None:
    temporary = target.with_suffix(f".{os.getpid()}.tmp.o")
    _run([*step.command, "-c", str(step.source), "-o", str(temporary)], str(step.source.relative_to(ROOT)))
    if _key(step) != target.stem:
        temporary.unlink()
        raise BuildError(f"{step.source.relative_to(ROOT)} or what it includes changed while it was compiled")
    temporary.rename(target)


def cxx() -> str:
    """The C++ compiler."""
    found = build_backend.find_compiler(os.environ)
    if found is None:
        raise MissingError(f"no C++ compiler: {NEEDED_CXX}")
    return found


def check_cxx() -> None:
    """Refuse a g++ that is too old, before it prints hundreds of errors."""
    done = subprocess.run([cxx(), "-dumpversion"], capture_output=True, text=True, check=False)
    major = done.stdout.strip().split(".")[0]
    if not is_clang() and major.isdigit() and int(major) < OLDEST_GXX:
        raise MissingError(f"{cxx()} is g++ {major}: {NEEDED_CXX}")


def is_clang() -> bool:
    """Whether the C++ compiler is clang, whatever its name."""
    return "clang" in _version(cxx())


def no_gnu_unique() -> list[str]:
    """What keeps two loaded libraries from sharing their static variables; clang never shares them."""
    return [] if is_clang() else ["-fno-gnu-unique"]


def simulator_steps() -> list[Step]:
    """The simulator itself."""
    include = toolkit().home / "include"
    check_cxx()
    command = (cxx(), *SIMULATOR_FLAGS, *no_gnu_unique(), f"-isystem{include}")
    return [Step(source, command, (HERE / "src",)) for source in sorted((HERE / "src").glob("*.cpp"))]


def package_steps() -> list[Step]:
    """The package's kernels and their C++ face: device_sim.cpp takes the place of device_cuda.cpp."""
    import torch
    from torch.utils import cpp_extension

    kernels = sorted(CSRC.glob("**/*.cu"))
    api = [path for path in sorted((CSRC / "api").glob("*.cpp")) if path.name != "device_cuda.cpp"]
    cuda = (nvcc(), f"-ccbin={cxx()}", *build_backend.NVCC_FLAGS, *PTX_FLAGS, "-Xcompiler=-fPIC", f"-I{CSRC}")
    torch_includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    host = (
        cxx(),
        "-std=c++20" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else "-std=c++17",
        "-O1",
        "-fPIC",
        "-fvisibility=hidden",
        *no_gnu_unique(),
        f"-DTORCH_VERSION_FOR_CACHE={torch.__version__.replace('+', '_').replace('.', '_')}",
        f"-I{CSRC}",
        f"-I{HERE / 'src'}",
        *torch_includes,
        f"-isystem{toolkit().home / 'include'}",
    )
    include_dirs = (CSRC, HERE / "src")
    return [Step(path, cuda, include_dirs) for path in kernels] + [
        Step(path, host, include_dirs) for path in [*api, HERE / "device_sim.cpp"]
    ]


def build_simulator() -> Path:
    """The simulator alone, for kernels given as PTX."""
    return build_library("simulator", simulator_steps(), ["-lpthread"])


def build_package() -> Path:
    """The package's kernels with the simulator inside."""
    from torch.utils import cpp_extension

    torch_lib = cpp_extension.library_paths()[0]
    link = [f"-L{torch_lib}", f"-Wl,-rpath,{torch_lib}", "-ltorch_cpu", "-lc10", "-lpthread"]
    return build_library("package", [*simulator_steps(), *package_steps()], link)


@functools.cache
def load_simulator() -> Simulator:
    """The simulator alone, loaded."""
    return Simulator(build_simulator())


@functools.cache
def load_package() -> Simulator:
    """Build and load the package's kernels: from then on torch.ops.mha_ext.* run on CPU tensors, simulated."""
    import torch

    import mha_ext  # noqa: F401  its extension defines the operators

    path = build_package()
    if not hasattr(torch.ops.mha_ext, "qkv_split"):
        raise MissingError("mha_ext._C, which defines the operators, is not built: `pip install -e .` first")
    torch.ops.load_library(str(path))
    return Simulator(path)


def compile_ptx(source: Path, *flags: str, arch: str = "compute_90a") -> str:
    """The PTX of one .cu file, cached."""
    command = (
        nvcc(),
        f"-ccbin={cxx()}",
        "-std=c++17",
        "-O3",
        "-lineinfo",
        f"-arch={arch}",
        "-ptx",
        f"-I{CSRC}",
        *flags,
    )
    target = cache_dir() / "ptx" / f"{_key(Step(source, command, (CSRC,)))}.ptx"
    if not _in_cache(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        _run([*command, str(source), "-o", str(temporary)], source.name)
        temporary.rename(target)
    return target.read_text()


def main() -> None:
    """Build everything."""
    _say(f"CUDA {toolkit().version} in {toolkit().home}")
    _say(f"ready: {build_simulator()}")
    _say(f"ready: {build_package()}")


if __name__ == "__main__":
    main()
