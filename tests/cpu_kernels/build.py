"""Builds executables that run the kernels of csrc/cpu without torch: see driver.cpp.

Each is cached by the content of all it was made from, in `$XDG_CACHE_HOME/mha_ext-cpu-kernels` (or `~/.cache/...`).

    python -m tests.cpu_kernels.build          build everything, with progress
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
sys.path.insert(0, str(ROOT))
import build_backend  # noqa: E402

FLAGS = ("-std=c++17", "-Og", "-g1", "-fno-omit-frame-pointer", "-pthread", "-w", f"-I{CSRC}")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
KEPT_EXECUTABLES = 40  # every state of the sources gives another

# What makes a kernel's source be compiled for a processor: without it the intrinsics can be those of SIMDe.
TARGET_PRAGMA = re.compile(
    r"^#pragma (?:GCC (?:push_options|pop_options|target)|clang attribute)(?:.*\\\n)*.*\n", re.MULTILINE
)


class BuildError(RuntimeError):
    """A compiler refused."""


class MissingError(BuildError):
    """This machine lacks what a build needs."""


@dataclass(frozen=True)
class Build:
    """A target of csrc/cpu, and how it comes to run here."""

    name: str
    target: str
    sanitized: bool = False
    by_simde: bool = False
    emulated: bool = False


def targets() -> list[str]:
    """The targets of csrc/cpu, whether this machine runs them or not."""
    return sorted(path.stem.removeprefix("attention_") for path in (CSRC / "cpu").glob("attention_*.cpp"))


def builds() -> list[Build]:
    """Each target with sanitizers, AVX-512 in any processor's stead, and what aarch64 makes of the portable one."""
    found = [Build(f"{target}_sanitized", target, True, target.startswith("avx512")) for target in targets()]
    return [*found, Build("aarch64", "portable", emulated=True)]


BUILDS = {build.name: build for build in builds()}


# ---- what this machine has ----


@functools.cache
def cxx() -> str:
    """The C++ compiler."""
    found = build_backend.find_compiler(os.environ)
    if found is None:
        raise MissingError("no C++ compiler: install g++ or clang++, or name one in CXX")
    return found


@functools.cache
def simde() -> str:
    """Where SIMDe's headers lie."""
    if importlib.util.find_spec("simde_py") is None:
        raise MissingError("no SIMDe: `pip install simde-py`")
    import simde_py

    return str(simde_py.get_include())


@functools.cache
def aarch64_cxx() -> str:
    """The compiler for aarch64."""
    for name in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
        if shutil.which(name) is None:
            raise MissingError(f"no {name}: `apt-get install g++-aarch64-linux-gnu qemu-user`")
    return "aarch64-linux-gnu-g++"


def on_x86() -> bool:
    """Whether this machine runs the targets of x86-64."""
    return platform.machine() in ("x86_64", "AMD64")


# ---- commands ----


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{what} did not compile\n{shlex.join(command)}\n{done.stdout}{done.stderr}")


def simde_flags() -> list[str]:
    """What makes AVX-512 of this machine's AVX2."""
    return ["-mavx2", "-mfma", "-mf16c", f"-isystem{simde()}", "-include", str(HERE / "avx512_by_simde.h")]


def without_target(source: Path) -> str:
    """The source as it ships, but for the lines that name its processor."""
    text, count = TARGET_PRAGMA.subn("\n", source.read_text())
    if not count:
        raise BuildError(f"{source.name} names no target: what should run through SIMDe?")
    return text


def commands(build: Build, work: Path, executable: Path) -> list[list[str]]:
    """The compiler's commands, in order; temporary files go to `work`."""
    if not build.emulated and build.target != "portable" and not on_x86():
        raise MissingError(f"{build.target} is a target of x86-64, this is {platform.machine()}")
    compiler = aarch64_cxx() if build.emulated else cxx()
    flags = [*FLAGS, *(SANITIZERS if build.sanitized else ())]
    source, kernel = CSRC / "cpu" / f"attention_{build.target}.cpp", work / "kernel.o"
    target_flags = []
    if build.by_simde:
        target_flags = simde_flags()
        copy = work / source.name
        copy.write_text(without_target(source))
        source = copy
    link = ["-static"] if build.emulated else []
    driver = [f"-DMHA_TEST_TARGET={build.target}", str(HERE / "driver.cpp"), str(kernel)]
    return [
        [compiler, *flags, *target_flags, "-c", str(source), "-o", str(kernel)],
        [compiler, *flags, *driver, *link, "-o", str(executable)],
    ]


# ---- the cache ----


def cache_dir() -> Path:
    """Where executables are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mha_ext-cpu-kernels"


def _digest(lines: Sequence[str]) -> str:
    """Of a build's commands and all that they may read."""
    digest = hashlib.sha256()
    sources = [path for pattern in ("*.h", "attention/*.h", "cpu/**/*.*") for path in CSRC.glob(pattern)]
    for path in sorted([*sources, *HERE.glob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    for line in lines:
        digest.update(line.replace(str(ROOT), "").encode() + b"\0")
    return digest.hexdigest()[:24]


def _cached(name: str, key: str, make: list[list[str]], work: Path, executable: Path) -> Path:
    found = cache_dir() / f"{name}-{key}"
    with contextlib.suppress(FileNotFoundError):
        os.utime(found)  # counts as new again
        return found
    for command in make:
        _run(command, name)
    executable.rename(found)
    newest = sorted((path for path in cache_dir().iterdir() if path.is_file()), key=lambda x: -x.stat().st_mtime)
    for path in newest[KEPT_EXECUTABLES:]:
        path.unlink(missing_ok=True)
    return found


@contextlib.contextmanager
def _work_folder(name: str):  # type: ignore[no-untyped-def]
    """Beside the cache, so that what is made there can be renamed into it."""
    work = cache_dir() / f"{name}.{os.getpid()}.tmp"
    work.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    finally:
        shutil.rmtree(work)


def build_driver(build: Build) -> Path:
    """The executable, from the cache or from the compiler."""
    with _work_folder(build.name) as work:
        executable = work / "driver"
        make = commands(build, work, executable)
        lines = [shlex.join(command).replace(str(work), "") for command in make]
        return _cached(build.name, _digest([*lines, _version(make[0][0])]), make, work, executable)


def build_intrinsics(native: bool) -> Path:
    """The comparison of intrinsics with their definitions: SIMDe's, or those of this machine."""
    flags = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mf16c", "-mfma"]
    name = f"intrinsics_{'native' if native else 'simde'}"
    with _work_folder(name) as work:
        executable = work / "intrinsics"
        command = [cxx(), *FLAGS, "-ffp-contract=off", *(flags if native else simde_flags())]
        command += [str(HERE / "intrinsics.cpp"), "-o", str(executable)]
        line = shlex.join(command).replace(str(work), "")
        return _cached(name, _digest([line, _version(cxx())]), [command], work, executable)


def start(names: Sequence[str]) -> dict[str, concurrent.futures.Future[Path]]:
    """Build these at the same time, as many as there are cores (or MAX_JOBS); the slowest first."""
    pool = concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
    slowest_first = sorted(names, key=lambda name: not BUILDS[name].by_simde)
    futures = {name: pool.submit(build_driver, BUILDS[name]) for name in slowest_first}
    pool.shutdown(wait=False)
    return futures


def main() -> None:
    """Build everything."""
    futures = start(list(BUILDS))
    names = {future: name for name, future in futures.items()}
    for number, future in enumerate(concurrent.futures.as_completed(names), 1):
        try:
            text = str(future.result())
        except MissingError as error:
            text = f"left out, {error}"
        print(f"[{number}/{len(names)}] {names[future]}: {text}", flush=True)


if __name__ == "__main__":
    main()
