"""The command line: choose cases, measure them one by one, write the report."""

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.cases import GROUPS, PLANS, PRESETS, Case, Plan, Sweep, cases_of, sizes_of
from benchmarks.harness import DeviceLostError, Result, answers, first_line, measure
from benchmarks.plot import write_plot
from benchmarks.roofline import Ceilings, measure_ceilings
from benchmarks.roofline_plot import write_roofline

__all__ = ["main"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
PASSES = {"forward": (False,), "training": (True,), "both": (False, True)}
MASKS = ("model", "full", "causal")


def parser() -> argparse.ArgumentParser:
    """What `--help` says."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures mha_ext against every backend of torch's scaled_dot_product_attention, "
        "nn.MultiheadAttention, plain torch and, on a CPU where it is installed, ONNX Runtime. "
        "Every answer is verified before it is timed.",
        epilog="What is not said depends on the device and the size of the run (benchmarks/cases.py). "
        "Lists are separated by spaces, for example: --presets gpt2 llama-7b --lengths 512 2048 --dtypes bf16",
    )
    size = made.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", const="quick", dest="size", help="under two minutes")
    size.add_argument("--full", action="store_const", const="full", dest="size", help="more cases and samples")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    made.add_argument("--threads", type=positive, metavar="N", help="CPU threads, of all contenders; default: torch's")
    several(made, "--groups", GROUPS, f"of {', '.join(GROUPS)}; default: all", default=tuple(GROUPS))
    several(made, "--presets", PRESETS, f"for every group but call, of {', '.join(PRESETS)}")
    made.add_argument("--lengths", nargs="+", type=positive, metavar="L", help="tokens, for every group but call")
    several(made, "--dtypes", DTYPES, f"of {', '.join(DTYPES)}")
    made.add_argument("--passes", choices=tuple(PASSES), default="both", help="training is forward and backward")
    made.add_argument("--mask", choices=MASKS, default="model", help="model: causal where the preset's model is")
    made.add_argument("--tokens", type=positive, metavar="N", help="batch = N / length, at least 1")
    made.add_argument(
        "--contenders", nargs="+", default=(), metavar="NAME", help="parts of names, for example: ours flash"
    )
    made.add_argument("--repeats", type=positive, metavar="N", help="samples per contender, three at least")
    made.add_argument("--budget", type=float, metavar="SECONDS", help="start no further case after this time")
    made.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR",
        help="for results.json, report.md, attention.png and roofline.png (default: benchmarks/results)",
    )  # fmt: skip
    return made


def several(
    made: argparse.ArgumentParser, option: str, names: Iterable[str], text: str, default: tuple[str, ...] = ()
) -> None:
    """An option that takes one or more of some names."""
    made.add_argument(option, nargs="+", choices=tuple(names), default=default, metavar="NAME", help=text)


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {value}")
    return value


def plan_of(arguments: argparse.Namespace, device_type: str) -> Plan:
    """The plan for this device and size, with what the command line overrules."""
    plan = PLANS[device_type, arguments.size or "default"]
    given = {name: getattr(arguments, name) for name in ("tokens", "repeats", "budget")}
    plan = dataclasses.replace(plan, **{name: value for name, value in given.items() if value is not None})
    return dataclasses.replace(plan, sweeps=tuple(overruled(sweep, arguments, plan.tokens) for sweep in plan.sweeps))


def overruled(sweep: Sweep, arguments: argparse.Namespace, tokens: int) -> Sweep:
    """The sweep with what the command line says in place of its own; of a short call there is but one size."""
    changes: dict[str, object] = {}
    if arguments.dtypes:
        changes["dtypes"] = tuple(DTYPES[name] for name in arguments.dtypes)
    of_model = sweep.group in ("attention", "module", "parts")
    if arguments.presets and sweep.group != "call":
        changes["presets"] = tuple(arguments.presets)
        changes["masks"] = () if of_model else sweep.masks
    if (arguments.lengths or arguments.tokens) and sweep.group != "call":
        lengths = arguments.lengths or [length for _, length in sweep.sizes]
        changes["sizes"] = sizes_of(tokens, *lengths)
    if arguments.mask != "model" and of_model:
        changes["masks"] = (arguments.mask,)
    return dataclasses.replace(sweep, **changes)  # type: ignore[arg-type]


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
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    plan = plan_of(arguments, device.type)
    cases = cases_of(plan, arguments.groups, PASSES[arguments.passes])
    command = "python -m benchmarks " + shlex.join(sys.argv[1:] if argv is None else argv)

    environment = report.environment_of(device, command.strip())
    print("\n".join(report.environment_lines(environment)))
    ceilings, no_ceilings = measure_ceilings(device, dict.fromkeys(case.dtype for case in cases))
    print(ceilings.how if ceilings else f"no peaks were measured: {no_ceilings}")
    print(f"{len(cases)} cases; every answer is verified before it is timed\n", flush=True)

    results, notes = run(cases, plan, device, arguments.contenders, began)
    if ceilings is None:
        notes.append(f"No shares of a peak: {no_ceilings}.")
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
    title = title_of(environment)
    no_plot = {
        "attention.png": write_plot(results, made.rate, title, out / "attention.png"),
        "roofline.png": write_roofline(results, ceilings, title, out / "roofline.png"),
    }
    written += [name for name, why_not in no_plot.items() if why_not is None]
    print(f"\n{seconds:.0f} s. Written to {out}: {', '.join(written)}")
    for name, why_not in no_plot.items():
        if why_not:
            print(f"No {name}: {why_not}")
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
