"""Faults put into copies of the package's kernels on purpose: its tests, run on the simulator, must notice each.

python -m tests.gpusim.mutations              every fault of the table: who noticed it, and caught / all
python -m tests.gpusim.mutations swizzle      those whose name contains a word
python -m tests.gpusim.mutations --deletions  every synchronising instruction deleted from the PTX in turn
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.gpusim.build import ROOT, build_package
from tests.gpusim.mutation_table import MUTATIONS, Mutation
from tests.gpusim.profile import readable

# ---- building a copy and running the tests on it ----


class MutationError(RuntimeError):
    """The table does not fit the sources, or something else than the tests failed."""


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: "reported" by a check, "wrong" by a test, "hangs", "survived"; "error" of the attempt."""

    kind: str
    story: str = ""

    @property
    def caught(self) -> bool:
        return self.kind in ("reported", "wrong", "hangs")


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of all that a build and a test need, from which both run by themselves."""
    with tempfile.TemporaryDirectory(prefix="mha_ext-mutant-") as folder:
        root = Path(folder)
        for name in ("csrc", "tests"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for name in ("build_backend.py", "pyproject.toml"):
            shutil.copy(ROOT / name, root / name)
        yield root


def apply(root: Path, mutation: Mutation) -> None:
    """Put the fault into the copy. Only the named instances see it, so that nothing else has to be compiled."""
    csrc, mutant = root / "csrc", root / "csrc" / "mutant"

    def redirected(text: str) -> str:
        return re.sub(r'#include "([^"]+)"', r'#include "mutant/\1"', text)

    for path in [*csrc.rglob("*.h"), *csrc.rglob("*.cuh")]:
        text = path.read_text()
        if path == csrc / mutation.file:
            if text.count(mutation.old) != mutation.times:
                raise MutationError(f"{mutation.file} has {text.count(mutation.old)} times {mutation.old!r}")
            text = text.replace(mutation.old, mutation.new)
        target = mutant / path.relative_to(csrc)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(redirected(text))
    for name in mutation.instances:
        path = csrc / "kernels" / "instances" / f"{name}.cu"
        path.write_text(redirected(path.read_text()))


def environment() -> dict[str, str]:
    """Without a GPU."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def build(root: Path) -> Path:
    """The library of a copy."""
    code = "from tests.gpusim.build import build_package; print(build_package())"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise MutationError(f"the copy does not compile\n{done.stdout}{done.stderr}")
    return Path(done.stdout.split()[-1])


def run_tests(root: Path, tests: tuple[str, ...], timeout: float = 300) -> Outcome:
    """Run tests of a copy until the first fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Outcome("hangs", f"more than {timeout:.0f} s")
    if done.returncode == 0 and " skipped" not in done.stdout:
        return Outcome("survived", done.stdout.strip().splitlines()[-1])
    story = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("E  ")]
    if done.returncode != 1 or not story:
        raise MutationError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return Outcome("reported" if "at PTX line" in done.stdout else "wrong", story[0].removeprefix("RuntimeError: "))


def try_mutation(mutation: Mutation) -> Outcome:
    """Build a copy with the fault, and see whether a test fails."""
    with copied() as root:
        apply(root, mutation)
        library = build(root)
        try:
            return run_tests(root, mutation.tests)
        finally:
            library.unlink(missing_ok=True)  # the objects stay in the cache, the linked library is large


def try_or_tell(mutation: Mutation) -> Outcome:
    """`try_mutation`, in a run that shall go on."""
    try:
        return try_mutation(mutation)
    except MutationError as error:
        return Outcome("error", str(error))


def try_nothing() -> Outcome:
    """All tests of the table on an unchanged copy: what they notice is noticed because of a fault."""
    with copied() as root:
        tests = sorted({mutation.tests for mutation in MUTATIONS.values()})
        outcomes = [run_tests(root, arguments) for arguments in tests]
    return next((outcome for outcome in outcomes if outcome.caught), outcomes[0])


# ---- deleting instructions of the PTX ----

SYNCHRONIZING = re.compile(
    rb"^[ \t]*((?:@!?%\w+[ \t]+)?"
    rb"(?:bar\.|barrier\.|cp\.async\.(?:bulk\.)?(?:commit|wait|mbarrier)|mbarrier\.|wgmma\.(?:fence|commit|wait)|fence\."
    rb"|membar\.|griddepcontrol\.)[^;{}\n]*;)",
    re.MULTILINE,
)
ENTRY = re.compile(rb"\.entry[ \t]+(\w+)\(")


@dataclass(frozen=True)
class Deletion:
    """An instruction of a kernel: its place in the library, which holds the PTX as text."""

    kernel: str
    text: str
    number: int  # among the same instructions of the kernel, from 0
    begin: int
    end: int

    @property
    def name(self) -> str:
        return f"{readable([self.kernel])[0]}: {self.text} #{self.number}"


def deletions(library: Path) -> list[Deletion]:
    """Every synchronising instruction of every kernel."""
    data = library.read_bytes()
    entries = [(match.start(), match[1].decode()) for match in ENTRY.finditer(data)]
    found: list[Deletion] = []
    for (begin, kernel), (end, _) in itertools.pairwise([*entries, (len(data), "")]):
        seen: dict[str, int] = {}
        body_end = data.find(b"\0", begin, end)
        for match in SYNCHRONIZING.finditer(data, begin, end if body_end < 0 else body_end):
            text = " ".join(match[1].decode().split())
            seen[text] = seen.get(text, -1) + 1
            found.append(Deletion(kernel, text, seen[text], match.start(1), match.end(1)))
    return found


# Why a kernel does without an instruction: (part of the kernel's name, instruction, number) -> the reason.
_LAST = "the barrier behind the last reduction protects the next one, and there is none"
_GLOBAL = "it orders global memory between the lanes of a warp, which run in step here and are not judged"
SURVIVORS = {
    ("masked_softmax_kernel", "bar.sync 0;", 5): _LAST,
    ("masked_softmax_long_kernel", "bar.sync 0;", 5): _LAST,
    ("masked_softmax_backward_kernel", "bar.sync 0;", 3): _LAST,
    ("masked_softmax_backward_long_kernel", "bar.sync 0;", 3): _LAST,
    ("AttentionBwd<__half, 64, true>", "bar.sync 0;", 5): _LAST,
    ("AttentionBwd<__half, 128, true>", "bar.sync 0;", 5): _LAST,
    ("AttentionBwd<__half, 256, true>", "bar.sync 0;", 6): _LAST,
    ("AttentionBwd<__nv_bfloat16, 64, true>", "bar.sync 0;", 5): _LAST,
    ("AttentionBwd<__nv_bfloat16, 128, true>", "bar.sync 0;", 5): _LAST,
    ("AttentionBwd<__nv_bfloat16, 256, true>", "bar.sync 0;", 6): _LAST,
    ("attention_bwd_sm80_kernel", "bar.warp.sync -1;", 1): _GLOBAL,
    ("attention_bwd_sm80_kernel", "bar.warp.sync -1;", 2): _GLOBAL,
}

ORDERS = ((0, "late"), (0, "at_once"), (1, "late"), (2, "random"), (3, "late"), (4, "at_once"))


def calls() -> dict[str, Callable[[], Any]]:
    """Calls that together reach every kernel that synchronises, by name."""
    import torch

    import mha_ext

    ops = torch.ops.mha_ext
    found: dict[str, Callable[[], Any]] = {}

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)

    def multiply(dtype: torch.dtype, tf32: bool, layout: str, m: int, n: int, heads: tuple[int, int]) -> torch.Tensor:
        k, transpose_a, transpose_b = 200, layout == "tn", layout == "nt"
        a = normal((1, heads[0], *((k, m) if transpose_a else (m, k))), dtype)
        b = normal((1, heads[0], *((n, k) if transpose_b else (k, n))), dtype)
        return ops.matmul(a, b, transpose_a, transpose_b, 0.5, heads[1], dtype, tf32, None)

    def softmax(dtype: torch.dtype, length: int, rows: int, dropout_p: float) -> list[torch.Tensor]:
        scores, rng_state = normal((1, 1, rows, length), dtype), torch.tensor([1, 2])
        sinks = torch.ones(1, dtype=dtype)
        rule = (None, None, None, None, sinks, rng_state, 0, -1, -1, 0.0, dropout_p)
        forward = ops.masked_softmax(scores, *rule, dtype, True)
        weights, lse = forward[0], forward[2]
        grad_dropped = normal(scores.shape, dtype) if dropout_p else None
        grads = (normal(scores.shape, dtype), grad_dropped, normal(lse.shape, dtype))
        rule = (None, sinks, rng_state, 0, 0.0, dropout_p)
        backward = ops.masked_softmax_backward(*grads, weights, None, lse, *rule, dtype, True, True, True)
        return [*forward, *backward]

    def attend(dtype: torch.dtype, tf32: bool, head_dim: int, rule: str) -> list[torch.Tensor]:
        """Fused attention, forward and backward: two heads of one key head, several tiles of queries and of keys."""
        seqlen_q, seqlen_kv = (150, 200) if head_dim <= 64 else (140, 150)
        query, key = normal((1, 2, seqlen_q, head_dim), dtype), normal((1, 1, seqlen_kv, head_dim), dtype)
        inputs = [query, key, key + 1]
        arguments: dict[str, Any] = {"is_causal": True, "q_offset": "end", "return_lse": True}
        if rule == "bias":
            inputs += [normal((seqlen_q, seqlen_kv), dtype), normal((2,), torch.float32), normal((2,), torch.float32)]
            arguments |= {"softcap": 3.0, "return_stats": True}
        for x in inputs:
            x.requires_grad_()
        named = dict(zip(("query", "key", "value", "attn_mask", "alibi_slopes", "sinks"), inputs, strict=False))
        if rule == "mask":
            named["attn_mask"] = normal((seqlen_q, seqlen_kv), torch.float32) > 0
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        try:
            result = mha_ext.attention(**named, **arguments, backend="fused")
            grads = torch.autograd.grad(result.output.sum() + result.lse.sum(), inputs)
        finally:
            torch.set_float32_matmul_precision(before)
        return [x.detach().contiguous() for x in (*result, *grads) if x is not None]

    def attend_packed(dtype: torch.dtype, head_dim: int) -> list[torch.Tensor]:
        """Sequences of 0, 70 and 80 rows, one behind the other."""
        inputs = [normal((150, 1, head_dim), dtype).requires_grad_() for _ in range(3)]
        cu_seqlens = torch.tensor([0, 70, 70, 150], dtype=torch.int32)
        results: list[torch.Tensor] = []
        for softcap in (None, 3.0):  # plain and general scores
            output = mha_ext.attention_varlen(
                *inputs, cu_seqlens, cu_seqlens, is_causal=True, softcap=softcap, backend="fused"
            )
            results += (output, *torch.autograd.grad(output.sum(), inputs))
        return [x.detach().contiguous() for x in results]

    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}
    kinds |= {"fp32": torch.float32, "fp64": torch.float64}
    for (kind, dtype), layout in itertools.product(kinds.items(), ("nn", "nt", "tn")):
        arguments = dtype, kind == "tf32", layout
        found[f"matmul {kind} {layout}"] = functools.partial(multiply, *arguments, 136, 72, (4, 2))
        if dtype.itemsize == 2:  # enough heads for the wider tile
            found[f"matmul {kind} {layout} wide"] = functools.partial(multiply, *arguments, 136, 72, (64, 64))
    for (kind, dtype), head_dim in itertools.product(kinds.items(), (64, 128, 256)):
        if dtype.itemsize == 2:
            found[f"attention {kind} {head_dim} packed"] = functools.partial(attend_packed, dtype, head_dim)
    for (kind, dtype), head_dim, rule in itertools.product(kinds.items(), (64, 128, 256), ("plain", "bias", "mask")):
        if kind != "fp64":
            found[f"attention {kind} {head_dim} {rule}"] = functools.partial(
                attend, dtype, kind == "tf32", head_dim, rule
            )
    for dtype, length, dropout_p in itertools.product((torch.float32, torch.float64), (1500, 4800, 9000), (0.0, 0.5)):
        found[f"softmax {dtype} {length} {dropout_p}"] = functools.partial(softmax, dtype, length, 2, dropout_p)
    return found


def _exercise(pipe: Connection, library: str, names: list[str] | None, expected: dict[str, list[bytes]]) -> None:
    """In a process of its own: run the calls and send (results, kernels launched), or what went wrong."""
    import torch

    from tests.gpusim.simulator import Simulator

    torch.set_num_threads(1)
    import mha_ext  # noqa: F401  defines the operators

    torch.ops.load_library(library)
    simulator = Simulator(Path(library))
    results: dict[str, list[bytes]] = {}
    launched: dict[str, set[str]] = {}
    try:
        for name, call in calls().items():
            if names is not None and name not in names:
                continue
            for seed, arrival in ORDERS:
                with simulator.using(seed=seed, arrival=arrival):
                    result = call()
                tensors = [result] if isinstance(result, torch.Tensor) else result
                bits = [x.flatten().view(torch.uint8).numpy().tobytes() for x in tensors]
                if name in expected and bits != expected[name]:
                    pipe.send(Outcome("wrong", f"{name}, seed {seed}, copies arrive {arrival}"))
                    return
                results[name] = bits
                launched[name] = {record.kernel for record in simulator.take_records()}
    except RuntimeError as error:
        pipe.send(Outcome("reported", str(error).splitlines()[0]))
        return
    pipe.send((results, launched) if not expected else Outcome("survived"))


def _in_process(library: Path, names: list[str] | None, expected: dict[str, list[bytes]], timeout: float = 300) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "mha_ext", "tests.gpusim.simulator"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_exercise, args=(sender, str(library), names, expected))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return Outcome("hangs", f"more than {timeout:.0f} s")
        return receiver.recv()
    except EOFError:
        return Outcome("reported", "the process died")
    finally:
        process.kill()
        process.join()
        receiver.close()


def try_deletions(part: str = "", workers: int = 2) -> Iterator[tuple[Deletion, Outcome]]:
    """Delete each synchronising instruction in turn."""
    library = build_package()
    with tempfile.TemporaryDirectory(prefix="mha_ext-deletions-") as folder:
        answer = _in_process(library, None, {})
        if isinstance(answer, Outcome):
            raise MutationError(f"the kernels as they are: {answer}")
        expected, launched = answer
        data = library.read_bytes()
        chosen = [deletion for deletion in deletions(library) if part in deletion.name]

        def attempt(number_and_deletion: tuple[int, Deletion]) -> Outcome:
            number, deletion = number_and_deletion
            names = [name for name, kernels in launched.items() if deletion.kernel in kernels]
            if not names:
                raise MutationError(f"no call reaches {deletion.name}")
            changed = bytearray(data)
            changed[deletion.begin : deletion.end] = b" " * (deletion.end - deletion.begin)
            path = Path(folder) / f"{number}.so"
            path.write_bytes(changed)
            try:
                return _in_process(path, names, {name: expected[name] for name in names})
            finally:
                path.unlink()

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for deletion, outcome in zip(chosen, pool.map(attempt, enumerate(chosen)), strict=True):
                yield deletion, outcome if outcome.caught else Outcome("survived", reason(deletion) or "unexplained")


def reason(deletion: Deletion) -> str | None:
    """Why the kernel does without this instruction, where that is known."""
    for (kernel, text, number), why in SURVIVORS.items():
        if kernel in deletion.name and text == deletion.text and number == deletion.number:
            return why
    return None


# ---- the command ----


def main() -> None:
    """Try what was asked for, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="only those whose name contains this")
    parser.add_argument("--deletions", action="store_true", help="of instructions, instead of the table")
    arguments = parser.parse_args()
    if arguments.deletions:
        tried: Iterator[tuple[str, Outcome]] = (
            (deletion.name, outcome) for deletion, outcome in try_deletions(arguments.part)
        )
    else:
        names = [name for name in MUTATIONS if arguments.part in name]
        pool = concurrent.futures.ThreadPoolExecutor(2)
        tried = zip(names, pool.map(lambda name: try_or_tell(MUTATIONS[name]), names), strict=True)
    outcomes = []
    for name, outcome in tried:
        outcomes.append(outcome)
        print(f"{outcome.kind:9s} {name}\n          {outcome.story[:160]}", flush=True)
    print(f"{sum(outcome.caught for outcome in outcomes)} caught of {len(outcomes)}")


if __name__ == "__main__":
    main()
