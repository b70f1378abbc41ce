"""Faults put into copies of the CPU kernels on purpose: test_cpu_targets.py must notice each.

python -m tests.cpu_kernels.mutations            every fault: what noticed it, and caught / all
python -m tests.cpu_kernels.mutations overrun    those whose name contains a word
"""

from __future__ import annotations

import argparse
import concurrent.futures
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.cpu_kernels.build import ROOT


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in a file of csrc, becomes `new`; a test of `build` must notice."""

    file: str
    old: str
    new: str
    build: str
    tests: str  # pytest's -k, beside the build


MUTATIONS: dict[str, Mutation] = {}


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: "reported" by a sanitizer, "wrong" by a test, "survived"; "error" of the attempt."""

    kind: str
    story: str = ""

    @property
    def caught(self) -> bool:
        return self.kind in ("reported", "wrong")


def try_mutation(mutation: Mutation | None, name_of_build: str, tests: str) -> Outcome:
    """Run tests on a copy of the sources, with a fault in it or without."""
    with tempfile.TemporaryDirectory(prefix="mha_ext-mutant-") as folder:
        root = Path(folder)
        for name in ("csrc", "tests"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("build_backend.py", "pyproject.toml"):
            shutil.copy(ROOT / name, root / name)
        if mutation is not None:
            path = root / "csrc" / mutation.file
            text = path.read_text()
            if text.count(mutation.old) != 1:
                return Outcome("error", f"{mutation.file} has {text.count(mutation.old)} times {mutation.old!r}")
            path.write_text(text.replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
        command += ["tests/test_cpu_targets.py", "-k", f"{name_of_build} and ({tests})"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0:
        kind = "error" if " skipped" in done.stdout else "survived"
        return Outcome(kind, lines[-1])
    story = [line[1:].strip() for line in lines if line.startswith("E  ") and line[1:].strip()]
    if done.returncode != 1 or not story or "did not compile" in done.stdout:
        return Outcome("error", f"pytest ended with {done.returncode}: {(story or lines or [done.stderr])[-1]}")
    said = next((line for line in story if "runtime error" in line or "ERROR: AddressSanitizer" in line), None)
    return Outcome("wrong", story[0]) if said is None else Outcome("reported", said)


def main() -> None:
    """Try what was asked for, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="only those whose name contains this")
    names = [name for name in MUTATIONS if parser.parse_args().part in name]
    caught = 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:

        def attempt(name: str) -> Outcome:
            mutation = MUTATIONS[name]
            return try_mutation(mutation, mutation.build, mutation.tests)

        for number, (name, outcome) in enumerate(zip(names, pool.map(attempt, names), strict=True), 1):
            caught += outcome.caught
            bar = "#" * (30 * number // len(names))
            print(f"{outcome.kind:9s} {name}\n          {outcome.story[:150]}")
            print(f"[{bar:<30}] {number}/{len(names)}", file=sys.stderr, flush=True)
    print(f"{caught} caught of {len(names)}")


if __name__ == "__main__":
    main()
