"""Builds executables that run the kernels of csrc/cpu without torch: see driver.cpp.

Each is cached by the content of all it was made from, in `$XDG_CACHE_HOME/mha_ext-cpu-kernels` (or `~/.cache/...`).

    python -m tests.cpu_kernels.build          build everything, with progress
"""

from __future__ import annotations

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
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
SIMDE_HEADER = HERE / "avx512_by_simde.h"
sys.path.insert(0, str(ROOT))
import build_backend  # noqa: E402

FLAGS = ("-std=c++17", "-Og", "-g1", "-fno-omit-frame-pointer", "-pthread", "-w", f"-I{CSRC}")
# Not what AddressSanitizer finds anyway: without these checks the kernels compile in two thirds of the time.
LEFT_TO_ADDRESS = "-fno-sanitize=null,object-size,vptr,pointer-overflow"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", LEFT_TO_ADDRESS)
KEPT_FILES = 200  # objects and executables; every state of the sources gives others

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
    names = {path.stem.removeprefix("attention_") for path in (CSRC / "cpu").glob("attention_*.cpp")}
    return sorted(name for name in names if not name.startswith("backward_"))


def sources(target: str) -> list[Path]:
    """Of its kernels, and of those that it leaves some types to: avx512_bf16 needs avx512."""
    needed = [name for name in targets() if f"{target}_".startswith(f"{name}_")]
    found = [CSRC / "cpu" / f"attention_{kind}{name}.cpp" for name in needed for kind in ("", "backward_")]
    return [path for path in found if path.exists()]


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


# ---- compiling ----


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def cache_dir() -> Path:
    """Where objects and executables are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mha_ext-cpu-kernels"


def _included(text: str, seen: dict[Path, str]) -> None:
    """All files of csrc and of this folder that a source includes, with their content."""
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
        for path in (CSRC / name, HERE / name):
            if path.is_file() and path not in seen:
                seen[path] = path.read_text()
                _included(seen[path], seen)


def _cached(name: str, command: Sequence[str], text: str) -> Path:
    """What the command makes of a C++ source, or of objects whose names hold their hash."""
    seen: dict[Path, str] = {}
    _included(text, seen)
    if str(SIMDE_HEADER) in command:
        seen[SIMDE_HEADER] = SIMDE_HEADER.read_text()
    digest = hashlib.sha256()
    for part in (*command, _version(command[0]), text, *(seen[path] for path in sorted(seen))):
        digest.update(part.replace(str(ROOT), "").encode() + b"\0")
    found = cache_dir() / f"{name}-{digest.hexdigest()[:24]}"
    with contextlib.suppress(FileNotFoundError):
        os.utime(found)  # counts as new again
        return found
    cache_dir().mkdir(parents=True, exist_ok=True)
    source, made = found.with_suffix(f".{os.getpid()}.cpp"), found.with_suffix(f".{os.getpid()}.tmp")
    if text:
        source.write_text(text)
    whole = [*command, *([str(source)] if text else []), "-o", str(made)]
    try:
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
    finally:
        source.unlink(missing_ok=True)
    if done.returncode != 0:
        raise BuildError(f"{name} did not compile\n{shlex.join(whole)}\n{done.stderr[:4000]}")
    made.rename(found)
    return found


def prune() -> None:
    """Delete what has not been used for longest."""
    files = sorted(cache_dir().glob("*-*"), key=lambda path: -path.stat().st_mtime)
    for path in files[KEPT_FILES:]:
        path.unlink(missing_ok=True)


def simde_flags() -> list[str]:
    """What makes AVX-512 of this machine's AVX2."""
    return ["-mavx2", "-mfma", "-mf16c", f"-isystem{simde()}", "-include", str(SIMDE_HEADER)]


def without_target(source: Path) -> str:
    """The source as it ships, but for the lines that name its processor."""
    text, count = TARGET_PRAGMA.subn("\n", source.read_text())
    if not count:
        raise BuildError(f"{source.name} names no target: what should run through SIMDe?")
    return text


def _compiler(build: Build) -> list[str]:
    if not build.emulated and build.target != "portable" and not on_x86():
        raise MissingError(f"{build.target} is a target of x86-64, this is {platform.machine()}")
    return [aarch64_cxx() if build.emulated else cxx(), *FLAGS, *(SANITIZERS if build.sanitized else ())]


def build_kernel(build: Build, source: Path) -> Path:
    """One object of a target."""
    text, flags = source.read_text(), []
    if build.by_simde:
        text, flags = without_target(source), simde_flags()
    return _cached(source.stem, [*_compiler(build), *flags, "-c"], text)


def build_main(build: Build) -> Path:
    """The object of driver.cpp."""
    command = [*_compiler(build), f"-DMHA_TEST_TARGET={build.target}", "-c"]
    return _cached("driver", command, (HERE / "driver.cpp").read_text())


def link(build: Build, objects: Sequence[Path]) -> Path:
    """The executable."""
    static = ["-static"] if build.emulated else []
    return _cached(build.name, [*_compiler(build), *map(str, objects), *static], "")


def build_intrinsics(native: bool) -> Path:
    """The comparison of intrinsics with their definitions: SIMDe's, or those of this machine."""
    features = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mf16c", "-mfma"]
    command = [cxx(), *FLAGS, "-ffp-contract=off", *(features if native else simde_flags())]
    name = f"intrinsics_{'native' if native else 'simde'}"
    return _cached(name, command, (HERE / "intrinsics.cpp").read_text())


def start(names: Sequence[str]) -> dict[str, Future[Path]]:
    """Build these at the same time, as many objects as there are cores (or MAX_JOBS)."""
    pool = ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
    links = ThreadPoolExecutor(len(names))  # wait for objects more than they work

    def finish(build: Build, objects: list[Future[Path]]) -> Path:
        return link(build, [each.result() for each in objects])

    executables = {}
    kernels: dict[tuple[Path, bool, bool], Future[Path]] = {}
    for name in names:
        build = BUILDS[name]
        objects = []
        for source in sources(build.target):
            key = source, build.by_simde, build.emulated  # what the objects of two builds may share
            if key not in kernels:
                kernels[key] = pool.submit(build_kernel, build, source)
            objects.append(kernels[key])
        executables[name] = links.submit(finish, build, [*objects, pool.submit(build_main, build)])
    pool.shutdown(wait=False)
    links.shutdown(wait=False)
    prune()
    return executables


def main() -> None:
    """Build everything."""
    names = {future: name for name, future in start(list(BUILDS)).items()}
    for number, future in enumerate(as_completed(names), 1):
        try:
            text = str(future.result())
        except MissingError as error:
            text = f"left out, {error}"
        print(f"[{number}/{len(names)}] {names[future]}: {text}", flush=True)


if __name__ == "__main__":
    main()
