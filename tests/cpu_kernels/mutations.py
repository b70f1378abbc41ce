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


_VALUES, _GRADIENTS = "values_follow", "gradients_follow"

MUTATIONS = {
    # memory
    "overrun: a row is read in whole vectors": Mutation(
        "cpu/kernel/elements.h",
        "for (; i + kLanes <= count; i += kLanes) store(to + i, load_as_float(from + i));",
        "for (; i < count; i += kLanes) store(to + i, load_as_float(from + i));",
        "avx2_sanitized",
        f"{_VALUES} and q63",
    ),
    "overrun: a row is written in whole vectors": Mutation(
        "cpu/kernel/elements.h",
        "for (; i + kLanes <= count; i += kLanes) store_rounded(",
        "for (; i < count; i += kLanes) store_rounded(",
        "portable_sanitized",
        f"{_VALUES} and q1_k97",
    ),
    "overrun: the last tile has as many queries as every other": Mutation(
        "cpu/work_plan.h",
        "static_cast<int>(std::min<int64_t>(kTileRows, queries.length - tile.first_query))",
        "kTileRows",
        "avx2_sanitized",
        f"{_VALUES} and q70_k197",
    ),
    "overrun: pairs of bf16 beyond the last column": Mutation(
        "cpu/kernel/attention_bf16.h",
        "left >= 2 * kLanes ? ~0u : (1u << left) - 1",
        "~0u",
        "avx512_bf16_sanitized",
        f"{_VALUES} and bfloat16 and q17",
    ),
    "overrun: the last run of keys is as long as every other": Mutation(
        "cpu/kernel/backward.h",
        "std::min(first + plan.run_keys, keys.length)",
        "first + plan.run_keys",
        "avx2_sanitized",
        f"{_GRADIENTS} and q70_k197",
    ),
    "aligned: a vector is loaded from where floats may lie": Mutation(
        "cpu/kernel/simd.h",
        "typedef float VecInMemory __attribute__((vector_size(MHA_CPU_VECTOR_BYTES), aligned(2), may_alias));",
        "typedef Vec VecInMemory;",
        "avx2_sanitized",
        f"{_VALUES} and q70_k197",
    ),
    "never written: sums start with what memory holds": Mutation(
        "cpu/kernel/tile.h",
        "rows.sum[r] = rows.weighted[r] = 0;",
        "rows.weighted[r] = 0;",
        "portable_sanitized",
        f"{_VALUES} and full_tile",
    ),
    "threads: one scratch for all": Mutation(
        "cpu/kernel/tile.h",
        "thread_local std::unique_ptr<Scratch>",
        "static std::unique_ptr<Scratch>",
        "avx2_sanitized",
        f"{_VALUES} and (swin or q130 or q75)",
    ),
    # masks
    "mask: one key beyond the window": Mutation(
        "cpu/kernel/scores.h", "(key < end)", "(key <= end)", "portable_sanitized", f"{_VALUES} and q63"
    ),
    "mask: one key beyond the length, in a decode": Mutation(
        "cpu/kernel/few_rows.h",
        "int k = end > 0 ? end : 0;",
        "int k = end >= 0 ? end + 1 : 0;",
        "avx2_sanitized",
        f"{_VALUES} and q2_k99",
    ),
    "mask: a hidden value meets a weight of 0": Mutation(
        "cpu/kernel/few_rows.h",
        "if (!hidden) {",
        "if (true) {",
        "avx2_sanitized",
        "hidden_keys and key_padding",
    ),
    # numbers
    "softmax: the sum so far is not rescaled": Mutation(
        "cpu/kernel/softmax.h",
        "store(rows.sum + at, rescale * old_sum + sum)",
        "store(rows.sum + at, old_sum + sum)",
        "portable_sanitized",
        f"{_VALUES} and q70_k197",
    ),
    "splits: a sum keeps the scale of its own split": Mutation(
        "cpu/kernel/finish.h", "sum += factor * part[1];", "sum += part[1];", "avx2_sanitized", "splits and one_query"
    ),
    "dropout: the word of the key eight before": Mutation(
        "cpu/kernel/softmax.h", "random_word(i, each)", "random_word(i, j)", "avx2_sanitized", "dropout"
    ),
    "backward: gradients of keys are those of the last tile": Mutation(
        "cpu/kernel/backward.h", "  written = true;\n", "", "avx2_sanitized", f"{_GRADIENTS} and q130"
    ),
    "AVX-512: the lower half of a vector is added twice": Mutation(
        "cpu/kernel/simd.h",
        "_mm512_extractf32x8_ps(x, 1)",
        "_mm512_extractf32x8_ps(x, 0)",
        "avx512_sanitized",
        f"{_VALUES} and q8_k95",
    ),
    "bf16: the second rows of pairs are the first": Mutation(
        "cpu/kernel/pairs.h",
        "kPlaces(kLanes, 2 * kLanes)",
        "kPlaces(0, 2 * kLanes)",
        "avx512_bf16_sanitized",
        f"{_VALUES} and bfloat16 and q9_k70",
    ),
    "aarch64: factors and sum change places": Mutation(
        "cpu/kernel/simd.h", "vfmaq_f32(c, a, b)", "vfmaq_f32(a, b, c)", "aarch64", f"{_VALUES} and q9_k70"
    ),
}


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
