"""The build's decisions, and pip's way in (PEP 517).

pip asks this module what a build needs, and setup.py asks it what to build. It wraps setuptools' own
backend because the answer depends on the machine: an installed torch must be compiled against and never
replaced, and the CUDA compiler is fetched from PyPI only where the machine has none. Nothing here imports
torch: the decisions are made before it can be brought.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (the hooks that need no change)
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

TORCH_REQUIREMENT = "torch>=2.9"
# The wheels carry the nvcc program from CUDA 13 on; those for CUDA 12 hold ptxas alone.
FIRST_CUDA_WITH_NVCC_WHEEL = 13
USUAL_HOMES = ("/usr/local/cuda-{cuda}", "/usr/local/cuda-{major}", "/usr/local/cuda", "/opt/cuda")

CXX_FLAGS = ["-O3", "-g0", "-fvisibility=hidden"]  # the C++ standard is the one torch's headers ask for
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fvisibility=hidden",
    # torch switches these operators off; here a kernel means the same with and without torch's flags.
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
]


class BuildError(Exception):
    """What was asked for by MHA_EXT_BUILD cannot be built here."""


@dataclass(frozen=True)
class Torch:
    """An installed torch, as its version.py describes it."""

    site_dir: Path
    version: str
    cuda: str | None
    hip: str | None = None


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: `home` holds bin/nvcc and include/cuda_runtime.h."""

    home: Path
    version: str
    origin: str


@dataclass(frozen=True)
class Plan:
    """What to build ("cuda", "cpu" or "python"), with what, and why not more."""

    kind: str
    torch: Torch | None
    toolkit: Toolkit | None
    reason: str = ""


def site_dirs() -> list[str]:
    """Folders to look for packages in: the build's own, then those of the environment that pip installs into.

    pip's isolated build hides the latter from sys.path, but the interpreter still knows where they are.
    """
    dirs = [path for path in sys.path if path]
    dirs += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    pyvenv = Path(sys.prefix, "pyvenv.cfg")
    in_venv = sys.prefix != sys.base_prefix
    if not in_venv or re.search(r"include-system-site-packages\s*=\s*true", pyvenv.read_text(), re.IGNORECASE):
        dirs.append(site.getusersitepackages())
        base = {"base": sys.base_prefix, "platbase": sys.base_prefix}
        dirs.append(sysconfig.get_path("purelib", vars=base))
        dirs += [path for path in site.getsitepackages([sys.base_prefix]) if path not in dirs]
    return list(dict.fromkeys(dirs))


def find_torch(dirs: Iterable[str]) -> Torch | None:
    """The first torch found in `dirs`, read without importing it."""
    for directory in dirs:
        spec = PathFinder.find_spec("torch", [directory])
        if spec is None or spec.origin is None:
            continue
        version_file = Path(spec.origin).with_name("version.py")
        if version_file.is_file():
            facts = runpy.run_path(str(version_file))
            return Torch(Path(directory), str(facts["__version__"]), facts.get("cuda"), facts.get("hip"))
    return None


def find_compiler(env: Mapping[str, str]) -> str | None:
    """The C++ compiler that torch's build would call, or None."""
    command = shlex.split(env.get("CXX", "")) or ["c++"]
    return shutil.which(command[0], path=env.get("PATH", os.defpath))


def missing_for_cxx(env: Mapping[str, str]) -> str:
    """Why no C++ can be compiled here; empty when it can."""
    if find_compiler(env) is None:
        name = env.get("CXX") or "c++"
        return f"there is no C++ compiler ({name} is not on PATH; `apt install g++` brings one)"
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        return f"Python's headers are missing (no Python.h in {include}; `apt install python3-dev` brings them)"
    return ""


def toolkit_homes(cuda: str, env: Mapping[str, str], dirs: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Where a CUDA toolkit may be, best first: (how it was found, folder)."""
    major = cuda.partition(".")[0]
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name):
            yield name, Path(env[name])
    nvcc = shutil.which("nvcc", path=env.get("PATH", os.defpath))
    if nvcc is not None:
        yield "nvcc on PATH", Path(nvcc).parent.parent
        yield "nvcc on PATH", Path(nvcc).resolve().parent.parent
    for home in USUAL_HOMES:
        yield "usual place", Path(home.format(cuda=cuda, major=major))
    for directory in dirs:
        yield "PyPI wheels", Path(directory, "nvidia", f"cu{major}")


def toolkit_version(home: Path) -> str | None:
    """Version of the toolkit in `home` by its headers ("13.0"), or None where there is no toolkit.

    The folder above an `nvcc` that is a wrapper or a link has no headers, and is no toolkit.
    """
    if not os.access(home / "bin" / "nvcc", os.X_OK) or not (home / "include" / "cuda_runtime.h").is_file():
        return None
    header = home / "include" / "cuda_runtime_api.h"
    match = (
        re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace")) if header.is_file() else None
    )
    return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}" if match else None


def find_toolkit(
    cuda: str, env: Mapping[str, str], dirs: Iterable[str], refused: list[str] | None = None
) -> Toolkit | None:
    """The first toolkit of torch's CUDA major version; `refused` gets the others and why."""
    refused = [] if refused is None else refused
    seen = set()
    for origin, home in toolkit_homes(cuda, env, dirs):
        if home in seen:
            continue
        seen.add(home)
        version = toolkit_version(home)
        if version is None:
            if origin.startswith("CUDA_") or origin.startswith("nvcc"):
                refused.append(f"{home} ({origin}): no bin/nvcc with include/cuda_runtime.h")
        elif version.partition(".")[0] != cuda.partition(".")[0]:
            refused.append(f"{home} ({origin}): CUDA {version}, and torch has CUDA {cuda}")
        else:
            return Toolkit(home, version, origin)
    return None


def make_plan(env: Mapping[str, str], dirs: list[str], refused: list[str] | None = None) -> Plan:
    """Decide what to build from what the machine has and what MHA_EXT_BUILD asks for.

    Raises
    ------
    BuildError
        MHA_EXT_BUILD names something unknown, or something that cannot be built here.
    """
    refused = [] if refused is None else refused
    wanted = env.get("MHA_EXT_BUILD", "").strip().lower()
    if wanted not in ("", "cuda", "cpu", "python"):
        raise BuildError(f"MHA_EXT_BUILD must be cuda, cpu or python, not {wanted!r}")
    torch = find_torch(dirs)
    if wanted == "python":
        return Plan("python", torch, None, "MHA_EXT_BUILD=python asked for no extension")

    no_cxx = missing_for_cxx(env)
    if torch is None and not no_cxx:
        no_cxx = f"torch is not installed, and was not brought by pip either ({TORCH_REQUIREMENT} is needed)"
    if no_cxx:
        if wanted:
            raise BuildError(f"MHA_EXT_BUILD={wanted}, but {no_cxx}")
        return Plan("python", torch, None, no_cxx)
    assert torch is not None
    if wanted == "cpu":
        return Plan("cpu", torch, None, "MHA_EXT_BUILD=cpu asked for no CUDA kernels")

    toolkit = find_toolkit(torch.cuda, env, dirs, refused) if torch.cuda else None
    if toolkit is not None:
        return Plan("cuda", torch, toolkit)
    if not torch.cuda:
        no_cuda = f"torch {torch.version} is a {'ROCm' if torch.hip else 'CPU'} build"
    else:
        no_cuda = "; ".join([f"no CUDA {torch.cuda.partition('.')[0]} toolkit was found", *refused])
    if wanted == "cuda":
        raise BuildError(f"MHA_EXT_BUILD=cuda, but {no_cuda}")
    return Plan("cpu", torch, None, no_cuda)


def requirements(env: Mapping[str, str], dirs: list[str]) -> list[str]:
    """What pip must bring into an isolated build, beyond setuptools."""
    wanted = env.get("MHA_EXT_BUILD", "").strip().lower()
    if wanted == "python" or missing_for_cxx(env):
        return []
    torch = find_torch(dirs)
    if torch is None:
        # The torch that pip will choose pins the version of cuda-toolkit: its compiler fits by itself.
        return ["ninja", TORCH_REQUIREMENT] + ([] if wanted == "cpu" else ["cuda-toolkit[nvcc,cudart,cccl]"])
    if not torch.cuda or wanted == "cpu" or find_toolkit(torch.cuda, env, dirs) is not None:
        return ["ninja"]
    if int(torch.cuda.partition(".")[0]) < FIRST_CUDA_WITH_NVCC_WHEEL:
        return ["ninja"]
    return ["ninja", f"cuda-toolkit[nvcc,cudart,cccl]=={torch.cuda}.*"]


def build_editable(
    wheel_directory: str, config_settings: dict[str, object] | None = None, metadata_directory: str | None = None
) -> str:
    """Hook of PEP 660: by a path entry, since setuptools' own finder loses to a folder of the package's name."""
    settings = {"editable_mode": "compat", **(config_settings or {})}
    return str(build_meta.build_editable(wheel_directory, settings, metadata_directory))


def get_requires_for_build_wheel(config_settings: dict[str, object] | None = None) -> list[str]:
    """Hook of PEP 517."""
    return requirements(os.environ, site_dirs())


def get_requires_for_build_editable(config_settings: dict[str, object] | None = None) -> list[str]:
    """Hook of PEP 660."""
    return requirements(os.environ, site_dirs())


def get_requires_for_build_sdist(config_settings: dict[str, object] | None = None) -> list[str]:
    """Hook of PEP 517: a source distribution needs no torch and no compiler."""
    return []
