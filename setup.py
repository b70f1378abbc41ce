"""Builds mha_ext. Which torch, which compiler and why: build_backend.py; metadata: pyproject.toml.

Environment: MHA_EXT_BUILD=cuda|cpu|python forces what is built; TORCH_CUDA_ARCH_LIST, CUDA_HOME, CXX and
MAX_JOBS mean what they mean to torch.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from build_backend import (  # noqa: E402
    CXX_FLAGS,
    NVCC_FLAGS,
    BuildError,
    Plan,
    Toolkit,
    find_compiler,
    make_plan,
    site_dirs,
)

# PTX of 8.0 as well, the last generic one: newer GPUs (10.0, 12.0) compile it on first use.
# PTX of 9.0a would be of no use to them: what is specific to an architecture runs on no later one.
DEFAULT_ARCHITECTURES = "8.0+PTX;9.0a"
LEAST_CAPABILITY = (8, 0)  # of cp.async and the tensor-core instructions


def say(text: str) -> None:
    """Print a line of the build's log."""
    print(f"mha_ext: {text}", file=sys.stderr, flush=True)


def sources(kind: str) -> list[str]:
    """The files of an extension, relative to the root: everything that lies in the folders of its kind."""
    folders = {
        "cpu": ["csrc/cpu/*.cpp", "csrc/api/cpu/*.cpp"],
        "cuda": ["csrc/cpu/*.cpp", "csrc/api/cpu/*.cpp", "csrc/api/*.cpp", "csrc/kernels/instances/*.cu"],
    }
    found = [str(path.relative_to(ROOT)) for pattern in folders[kind] for path in ROOT.glob(pattern)]
    return ["csrc/bindings.cpp", *sorted(found)]


def choose_architectures(torch: Any) -> str:
    """TORCH_CUDA_ARCH_LIST as the user gave it, or else that of the visible GPUs, or else the default."""
    given = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if given and given != "native":
        return given
    if not torch.cuda.is_available():
        return DEFAULT_ARCHITECTURES
    visible = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    older = {gpu for gpu in visible if gpu < LEAST_CAPABILITY}
    if older:
        say(f"no kernels for the visible GPUs of compute capability {sorted(older)}: 8.0 is the least")
    visible -= older
    if not visible:
        return DEFAULT_ARCHITECTURES
    return ";".join("9.0a" if gpu == (9, 0) else "{}.{}".format(*gpu) for gpu in sorted(visible))


def architecture_names(arch_list: str) -> list[str]:
    """["sm_80", "compute_80", "sm_90a"] for "8.0+PTX;9.0a", as the compiler calls them."""
    names = []
    for arch in re.split(r"[;\s]+", arch_list):
        number = arch.partition("+")[0].replace(".", "")
        names.append(f"sm_{number}")
        if arch.endswith("+PTX"):
            names.append(f"compute_{number}")
    return names


def compiler_name() -> str:
    """The C++ compiler and its version, "g++ 12.2.0"."""
    compiler = os.path.realpath(find_compiler(os.environ) or "c++")
    name = next((kind for kind in ("clang++", "g++") if kind in Path(compiler).name), Path(compiler).name)
    command = [compiler, "-dumpfullversion", "-dumpversion"]
    version = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return " ".join([name, *version[:1]])


def openmp_flags(compiler: str) -> list[str]:
    """What makes at::parallel_for run on torch's threads.

    g++ calls the OpenMP runtime that torch brings, and nothing is linked for it; clang++ calls another, which torch's
    wheels do not hold.
    """
    if compiler.startswith("g++"):
        return ["-fopenmp"]
    say(f"the CPU kernels will run on one thread: {compiler} is not g++, whose OpenMP is torch's")
    return []


def make_extension(plan: Plan, facts: dict[str, Any]) -> tuple[Any, Any]:
    """The extension and the command that builds it."""
    assert plan.torch is not None
    if str(plan.torch.site_dir) not in sys.path:
        sys.path.append(str(plan.torch.site_dir))  # last: the build's own setuptools stays in front
    if plan.toolkit is not None:
        os.environ["CUDA_HOME"] = str(plan.toolkit.home)  # before torch looks for it and guesses
    import torch
    from torch.utils import cpp_extension

    if plan.kind == "cuda":
        os.environ["TORCH_CUDA_ARCH_LIST"] = choose_architectures(torch)
        facts["architectures"] = architecture_names(os.environ["TORCH_CUDA_ARCH_LIST"])
        say(f"architectures {' '.join(facts['architectures'])}")
    macros = {
        "MHA_EXT_TORCH_VERSION": facts["torch"],
        "MHA_EXT_COMPILER": facts["compiler"],
        "MHA_EXT_CUDA_VERSION": facts["cuda"],
        "MHA_EXT_ARCHITECTURES": " ".join(facts["architectures"]),
    }
    options: dict[str, Any] = {
        "sources": sources(plan.kind),
        "include_dirs": [str(ROOT / "csrc")],
        "depends": [str(path) for suffix in ("h", "cuh") for path in sorted(ROOT.glob(f"csrc/**/*.{suffix}"))],
        "extra_compile_args": {
            "cxx": CXX_FLAGS
            + openmp_flags(facts["compiler"])
            + [f'-D{name}="{value}"' for name, value in macros.items()],
            "nvcc": NVCC_FLAGS,
        },
    }
    if plan.toolkit is None:
        extension = cpp_extension.CppExtension("mha_ext._C", **options)
    else:
        extension = cpp_extension.CUDAExtension("mha_ext._C", **options)
        link_runtime_by_file(extension, plan.toolkit)
    return extension, cpp_extension.BuildExtension


def link_runtime_by_file(extension: Any, toolkit: Toolkit) -> None:
    """Name the runtime library by its file where there is no libcudart.so for `-lcudart`, as in the wheels."""
    versioned = sorted(toolkit.home.glob("lib*/libcudart.so.*"))
    if versioned and not list(toolkit.home.glob("lib*/libcudart.so")):
        extension.libraries.remove("cudart")
        extension.extra_link_args.append(str(versioned[0]))


def write_build_info(package_dir: str | Path, facts: dict[str, Any]) -> None:
    """Write what was built beside the extension: it is compared before the extension is loaded."""
    Path(package_dir, "_build_info.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    """Decide, say so, and hand over to setuptools."""
    building = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install"} & set(sys.argv)
    if not building:  # metadata or a source distribution: neither needs torch
        setup()
        return
    refused: list[str] = []
    try:
        plan = make_plan(os.environ, site_dirs(), refused)
    except BuildError as error:
        sys.exit(f"mha_ext: {error}")
    facts: dict[str, Any] = {
        "kind": plan.kind,
        "torch": plan.torch.version if plan.torch else "",
        "python": platform.python_version(),
        "compiler": compiler_name() if plan.kind != "python" else "",
        "cuda": plan.toolkit.version if plan.toolkit else "",
        "architectures": [],
        "reason": plan.reason,
    }
    for line in refused:
        say(f"passed over {line}")
    if plan.torch and plan.kind != "python":
        say(f"torch {plan.torch.version} in {plan.torch.site_dir}, C++ compiler {facts['compiler']}")
    if plan.toolkit:
        say(f"CUDA {plan.toolkit.version} taken from {plan.toolkit.home} ({plan.toolkit.origin})")
    built = {
        "cuda": "the CUDA kernels",
        "cpu": "the kernels for the CPU",
        "python": "pure Python, without an extension",
    }
    say(f"building {built[plan.kind]}{': ' + plan.reason if plan.reason else ''}")

    if plan.kind == "python":

        class WriteInfo(build_py):
            def run(self) -> None:
                super().run()
                write_build_info(
                    self.get_package_dir("mha_ext") if self.editable_mode else Path(self.build_lib, "mha_ext"),
                    facts,
                )

        setup(cmdclass={"build_py": WriteInfo})
        return

    extension, base = make_extension(plan, facts)

    class BuildAndWriteInfo(base):  # type: ignore[misc, valid-type]
        def finalize_options(self) -> None:
            super().finalize_options()
            # One folder for each torch and Python, for editable installs too: only what changed is compiled again.
            tags = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch{facts['torch']}"
            self.build_temp = str(ROOT / "build" / f"temp.{tags}")

        def run(self) -> None:
            super().run()
            write_build_info(Path(self.get_ext_fullpath("mha_ext._C")).parent, facts)

    setup(ext_modules=[extension], cmdclass={"build_ext": BuildAndWriteInfo})


if __name__ == "__main__":
    main()
