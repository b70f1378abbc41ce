"""The command line: choose cases, measure them one by one, write the report."""

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.cases import GROUPS, PLANS, PRESETS, Case, Plan, cases_of
from benchmarks.harness import DeviceLostError, Result, answers, first_line, measure
from benchmarks.plot import write_plot
from benchmarks.roofline import Ceilings, measure_ceilings

__all__ = ["main"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
PASSES = {"forward": (False,), "training": (True,), "both": (False, True)}
MASKS = {"model": None, "full": False, "causal": True}


def parser() -> argparse.ArgumentParser:
    """What `--help` says."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures mha_ext against every backend of torch's scaled_dot_product_attention, "
        "nn.MultiheadAttention and plain torch. Every answer is verified before it is timed.",
        epilog="Lists are separated by spaces, for example: --presets gpt2 llama-7b --lengths 512 2048 --dtypes bf16",
    )
    size = made.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", const="quick", dest="size", help="under two minutes (default)")
    size.add_argument("--full", action="store_const", const="full", dest="size", help="more lengths, dtypes, samples")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    made.add_argument("--groups", nargs="+", choices=tuple(GROUPS), default=tuple(GROUPS), help="default: all")
    made.add_argument(
        "--presets", nargs="+", choices=tuple(PRESETS), help="for every group; default: by size of the run"
    )
    made.add_argument("--lengths", nargs="+", type=positive, metavar="L", help="sequence lengths, for every group")
    made.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), help="default: fp32 on a CPU, bf16 first on a GPU")
    made.add_argument("--passes", choices=tuple(PASSES), default="both", help="training is forward and backward")
    made.add_argument("--mask", choices=tuple(MASKS), default="model", help="model: causal where the preset's model is")
    made.add_argument("--tokens", type=positive, metavar="N", help="batch = N / length; default: by size of the run")
    made.add_argument(
        "--contenders", nargs="+", default=(), metavar="NAME", help="parts of names, for example: ours flash"
    )
    made.add_argument("--repeats", type=positive, metavar="N", help="samples per contender, three at least")
    made.add_argument("--budget", type=float, metavar="SECONDS", help="start no further case after this time")
    made.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR",
        help="where results.json, report.md and attention.png go (default: benchmarks/results)",
    )  # fmt: skip
    return made


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {value}")
    return value


def plan_of(arguments: argparse.Namespace, device_type: str) -> Plan:
    """The plan for this device and size, with what the command line overrules."""
    plan = PLANS[device_type, arguments.size or "quick"]
    changes: dict[str, object] = {}
    if arguments.presets:
        changes |= dict.fromkeys(("presets", "module_presets", "part_presets"), tuple(arguments.presets))
    if arguments.lengths:
        changes |= dict.fromkeys(("lengths", "module_lengths", "part_lengths"), tuple(arguments.lengths))
    if arguments.dtypes:
        changes["dtypes"] = tuple(DTYPES[name] for name in arguments.dtypes)
    for name in ("tokens", "repeats", "budget"):
        if getattr(arguments, name) is not None:
            changes[name] = getattr(arguments, name)
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def device_of(name: str | None) -> torch.device:
    """The device asked for, or else the GPU where torch sees one."""
    if torch.cuda.is_available() and name != "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        parser().error("--device cuda: torch sees no GPU here")
    return torch.device("cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0, or 1 where one of ours was wrong or failed, or the GPU was lost."""
    began = time.monotonic()
    arguments = parser().parse_args(argv)
    device = device_of(arguments.device)
    plan = plan_of(arguments, device.type)
    cases = cases_of(plan, arguments.groups, PASSES[arguments.passes], MASKS[arguments.mask])
    command = "python -m benchmarks " + shlex.join(sys.argv[1:] if argv is None else argv)

    environment = report.environment_of(device, command.strip())
    print("\n".join(report.environment_lines(environment)))
    ceilings = measure_ceilings(device, plan.dtypes) if device.type == "cuda" else None
    if ceilings:
        print(report.ceilings_line(ceilings))
    print(f"{len(cases)} cases; every answer is verified before it is timed\n", flush=True)

    results, notes = run(cases, plan, device, arguments.contenders, began)
    return finish(environment, ceilings, results, notes, arguments.out, time.monotonic() - began)


def run(
    cases: Sequence[Case], plan: Plan, device: torch.device, only: Sequence[str], began: float
) -> tuple[list[Result], list[str]]:
    """All results, and what has to be said about the run as a whole."""
    results: list[Result] = []
    with progress(cases) as bar:
        for done, case in enumerate(cases):
            if plan.budget is not None and time.monotonic() - began > plan.budget:
                left = len(cases) - done
                return results, [
                    f"Stopped at the time budget of {plan.budget:g} s: {left} of {len(cases)} cases left out."
                ]
            bar(case)
            try:
                results += measure(case, device, repeats=plan.repeats, case_seconds=plan.case_seconds, only=only)
            except DeviceLostError as problem:
                return results, [f"STOPPED, the GPU reported an error: {problem}"]
            except torch.cuda.OutOfMemoryError:
                results.append(Result(case, "all", True, "no memory", "the inputs do not fit"))
            except (RuntimeError, ValueError, TypeError) as problem:
                if not answers(device):
                    return results, [f"STOPPED, the GPU reported an error: {case.label}: {first_line(problem)}"]
                results.append(Result(case, "all", True, "failed", first_line(problem)))
            except KeyboardInterrupt:
                return results, [f"Interrupted: {len(cases) - done} of {len(cases)} cases left out."]
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return results, []


def finish(
    environment: dict[str, object],
    ceilings: Ceilings | None,
    results: Sequence[Result],
    notes: list[str],
    out: Path,
    seconds: float,
) -> int:
    """Prints and writes everything."""
    made = report.Report(environment | {"seconds": round(seconds, 1)}, ceilings, tuple(results), tuple(notes))
    print("\n".join(made.summary_lines()))
    out.mkdir(parents=True, exist_ok=True)
    made.write_json(out / "results.json")
    made.write_markdown(out / "report.md")
    written = ["results.json", "report.md"]
    why_not = write_plot(results, made.rate, title_of(environment), out / "attention.png")
    print(f"\n{seconds:.0f} s. Written to {out}: {', '.join(written + ([] if why_not else ['attention.png']))}")
    if why_not:
        print(f"No plot: {why_not}")
    bad = any(result.ours and result.status in ("wrong", "failed") for result in results)
    return 1 if bad or any(note.startswith("STOPPED") for note in notes) else 0


def title_of(environment: dict[str, object]) -> str:
    """What the plot says about its origin."""
    place = f"{environment['device']}, {environment['threads']} CPU threads"
    return f"Attention on {place}: torch {environment['torch']}, {environment['date']} (more is better)"


@contextmanager
def progress(cases: Sequence[Case]) -> Iterator:  # type: ignore[type-arg]
    """Yields what to call when a case begins: a bar on a terminal, a line per case elsewhere."""
    if not sys.stderr.isatty():
        lines = (f"[{number}/{len(cases)}]" for number in range(1, len(cases) + 1))
        yield lambda case: print(next(lines), describe(case), file=sys.stderr, flush=True)
        return
    try:
        from tqdm import tqdm
    except ImportError:
        print("(for a progress bar: pip install tqdm)", file=sys.stderr)
        yield lambda case: print(describe(case), end="\033[K\r", file=sys.stderr, flush=True)
        return
    with tqdm(total=len(cases), unit="case", leave=False, bar_format="{desc:60} {bar} {n}/{total} {elapsed}") as bar:
        started = False

        def begin(case: Case) -> None:
            nonlocal started
            bar.update(int(started))
            started = True
            bar.set_description_str(describe(case))

        yield begin


def describe(case: Case) -> str:
    """One line about a case."""
    return f"{case.kind}: {case.label}, {case.dtype_name}, {case.pass_name}"
