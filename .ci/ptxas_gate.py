#!/usr/bin/env python3
"""Prints what ptxas says of each kernel on sm_80 and sm_90a, and fails on a spill or a known warning.

.ci/ptxas_gate.py                                     every csrc/kernels/instances/*.cu
.ci/ptxas_gate.py csrc/kernels/instances/matmul.cu    these only
.ci/ptxas_gate.py --log build.log                     a build's output, made with NVCC_APPEND_FLAGS=-Xptxas=-v

Sizes are in bytes; `shared` is what the kernel declares, without what the launch adds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = ("sm_80", "sm_90a")

# What each of these says is that ptxas gave up a schedule that the source asks for.
BAD_WARNINGS = {
    "C7508": "setmaxnreg ignored",
    "C7510": "wgmma serialized",
    "C7514": "wgmma serialized",
    "C7515": "wgmma serialized",
    "C7517": "wait injected before wgmma's accumulator is read",
    "C7519": "fence injected before wgmma",
}


@dataclass
class Kernel:
    """What ptxas says of one kernel on one architecture; sizes in bytes."""

    name: str
    arch: str
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0


def parse(log: str) -> tuple[list[Kernel], list[str]]:
    """The kernels and the bad warnings in the output of `ptxas -v`."""
    kernels: list[Kernel] = []
    warnings = []
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            kernels.append(Kernel(match[1], match[2]))
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            # Functions that were not inlined are listed behind the kernel that calls them.
            if kernels:
                kernels[-1].stack = max(kernels[-1].stack, int(match[1]))
                kernels[-1].spills += int(match[2]) + int(match[3])
        elif kernels and (match := re.search(r"Used (\d+) registers", line)):
            kernels[-1].registers = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[-1].shared = int(shared[1]) if shared else 0
        warnings += [f"{code} ({BAD_WARNINGS[code]}): {line.strip()}" for code in BAD_WARNINGS if code in line]
    return kernels, warnings


def demangle(names: list[str]) -> list[str]:
    """Names as in the source, without return type, parameters and the namespace that all share."""
    output = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    short = []
    for name in output.splitlines():
        name = re.sub(r"^void ", "", name.replace("(anonymous namespace)::", "")).replace("mha_ext::", "")
        short.append(re.sub(r"\([^()]*\)$", "", re.sub(r"\((?:int|bool|unsigned int|long)\)", "", name)))
    return short


def compile_one(job: tuple[str, Path, str]) -> tuple[int, str]:
    """Compile one file for one architecture to nothing; the exit status and what was said."""
    sys.path.insert(0, str(ROOT))
    from build_backend import NVCC_FLAGS

    nvcc, file, arch = job
    command = [nvcc, *NVCC_FLAGS, f"-arch={arch}", "-cubin", "-Xptxas=-v", f"-I{ROOT / 'csrc'}", str(file)]
    done = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def compile_all(files: list[Path], architectures: list[str]) -> str:
    """The output of ptxas for all files and architectures; exits where one does not compile."""
    nvcc = str(Path(os.environ["CUDA_HOME"], "bin", "nvcc")) if "CUDA_HOME" in os.environ else "nvcc"
    jobs = [(nvcc, file, arch) for file in files for arch in architectures]
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        results = list(pool.map(compile_one, jobs))
    for (_, file, arch), (status, output) in zip(jobs, results, strict=True):
        if status != 0:
            sys.exit(f"{output}\n{file} does not compile for {arch}")
    return "\n".join(output for _, output in results)


def main() -> int:
    """Print the table; 1 when the gate is shut."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("files", nargs="*", type=Path, help="default: every csrc/kernels/instances/*.cu")
    arguments.add_argument("--log", type=Path, help="read this output of a build instead of compiling")
    arguments.add_argument("--arch", action="append", help=f"default: {' '.join(ARCHITECTURES)}")
    options = arguments.parse_args()
    architectures = options.arch or list(ARCHITECTURES)
    files = options.files or sorted(ROOT.glob("csrc/kernels/instances/*.cu"))

    log = options.log.read_text() if options.log else compile_all(files, architectures)
    kernels, failures = parse(log)
    names = demangle([kernel.name for kernel in kernels])
    print(f"{'arch':<8} {'registers':>9} {'spills':>7} {'stack':>6} {'shared':>7}  kernel")
    for name, kernel in sorted(zip(names, kernels, strict=True), key=lambda pair: (pair[0], pair[1].arch)):
        numbers = f"{kernel.registers:>9} {kernel.spills:>7} {kernel.stack:>6} {kernel.shared:>7}"
        print(f"{kernel.arch:<8} {numbers}  {name}")
        if kernel.spills:
            failures.append(f"{name} spills {kernel.spills} bytes on {kernel.arch}")
    for arch in architectures if not options.files else []:
        if not any(kernel.arch == arch for kernel in kernels):
            failures.append(f"no kernel was compiled for {arch}")
    if options.log:
        failures += [f"{file.name} was not compiled in {options.log}" for file in files if file.name not in log]
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"{len(kernels)} kernels, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
