"""Verify first, then time: every contender of a case in turn, in one process, in an order shuffled for each round."""

import gc
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.cases import Case
from benchmarks.contenders import Contender, Inputs, Workload
from benchmarks.workloads import workload_of

__all__ = ["DeviceLostError", "Result", "free_bytes", "measure", "tolerance"]

SAMPLE_SECONDS = {"cpu": 0.01, "cuda": 0.01}  # one sample is as many calls as fill this
MAX_LAUNCHES = {"cpu": 5000, "cuda": 200}  # a GPU's queue is not endless
SETTLE_SECONDS = 0.01  # before a sample, where contenders have threads of their own: idle ones spin before they sleep
MAX_INPUT_SETS = 16


class DeviceLostError(RuntimeError):
    """The GPU reported an error after which nothing in this process can be trusted."""


@dataclass(frozen=True)
class Result:
    """One contender on one case."""

    case: Case
    contender: str
    ours: bool
    status: str  # timed, wrong, unavailable, no memory, failed
    reason: str = ""  # why it was not timed
    error: float | None = None  # relative, against fp64
    seconds: float | None = None  # median over samples, of one call
    quartiles: tuple[float, float] | None = None  # lower and upper, of the samples
    fastest: float | None = None
    samples: int = 0
    launches: int = 0  # calls per sample
    input_sets: int = 0  # rotated, so that the inputs do not all stay in the L2 cache
    peak_bytes: int | None = None  # GPU memory above the inputs, at the worst moment of a call
    yardstick: bool = False  # no rival, but what the case is compared with: another answer's time

    @property
    def spread(self) -> float | None:
        """Half the interquartile range over the median."""
        if self.seconds is None or self.quartiles is None:
            return None
        return (self.quartiles[1] - self.quartiles[0]) / 2 / self.seconds


@dataclass
class Entry:
    """A contender that was verified and will be timed."""

    contender: Contender
    error: float
    peak_bytes: int | None
    launches: int = 1
    estimate: float = 0.0
    times: list[float] | None = None


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative error that is accepted: what the dtype's arithmetic explains, with a margin."""
    if dtype == torch.float32:
        return 1e-4 if torch.get_float32_matmul_precision() == "highest" else 3e-3  # TF32 only where it was asked for
    return {torch.float64: 1e-10, torch.float16: 5e-3, torch.bfloat16: 2e-2}[dtype]


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 1 << 60  # unknown: do not refuse


def measure(
    case: Case,
    device: torch.device,
    *,
    repeats: int,
    case_seconds: float,
    only: Sequence[str] = (),
    select: Callable[[Workload], list[Contender]] = lambda workload: workload.contenders(),
) -> list[Result]:
    """Every contender's result on this case, in the order in which the workload lists them.

    `only`: parts of names; contenders that match none are left out. Raises `DeviceLostError`.
    """
    free = free_bytes(device)
    results: dict[str, Result] = {}
    workload = workload_of(case, device)
    chosen = [c for c in select(workload) if not only or any(part in c.name for part in only)]

    def put(contender: Contender, status: str, reason: str, error: float | None = None) -> None:
        results[contender.name] = Result(
            case, contender.name, contender.ours, status, reason, error, yardstick=contender.judge is not None
        )

    sets: list[Inputs] = []
    entries = []
    for contender in chosen:
        if contender.unavailable:
            put(contender, "unavailable", contender.unavailable)
        elif (contender.holds_scores or workload.inputs_hold_scores) and workload.matrix_bytes() > free:
            need, have = (f"{size / 2**30:.1f} GiB" for size in (workload.matrix_bytes(), free))
            put(contender, "no memory", f"score matrices would need {need}, {have} are free")
        else:
            sets = sets or [workload.inputs()]
            entry = verify(workload, contender, sets[0], put)
            if entry is not None:
                entries.append(entry)

    if entries:
        sets += [workload.inputs() for _ in range(more_sets(sets[0], device, free))]
        time_entries(workload, entries, sets, repeats, case_seconds)
    for entry in entries:
        assert entry.times is not None
        median = statistics.median(entry.times)
        low, _, high = statistics.quantiles(entry.times, n=4, method="inclusive")
        results[entry.contender.name] = Result(
            case, entry.contender.name, entry.contender.ours, "timed", error=entry.error, seconds=median,
            quartiles=(low, high), fastest=min(entry.times), samples=len(entry.times),
            launches=entry.launches, input_sets=len(sets), peak_bytes=entry.peak_bytes,
            yardstick=entry.contender.judge is not None,
        )  # fmt: skip
    return [results[contender.name] for contender in chosen]


def verify(workload: Workload, contender: Contender, inputs: Inputs, put: Callable[..., None]) -> Entry | None:
    """Runs a contender, judges its answer, notes its peak memory; None where it is not to be timed."""
    device, training = workload.device, workload.case.training
    peak = None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before_all = contender.asked or (contender.pinned if device.type == "cuda" else None)
            if before_all:  # may refuse; on a GPU it also loads and compiles, and keeps library workspaces
                with torch.set_grad_enabled(training), before_all():
                    workload.run(contender, inputs)
            with torch.set_grad_enabled(training), contender.pinned():
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                    torch.cuda.reset_peak_memory_stats(device)
                    before = torch.cuda.memory_allocated(device)
                outputs = workload.run(contender, inputs)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                    peak = torch.cuda.max_memory_allocated(device) - before
            judge = contender.judge or workload.error
            error = judge(inputs, tuple(output.detach() for output in outputs))
    except torch.cuda.OutOfMemoryError as problem:
        put(contender, "no memory", first_line(problem))
        return None
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as problem:
        if not answers(device):
            raise DeviceLostError(f"{contender.name} on {workload.case.label}: {first_line(problem)}") from problem
        refused = not contender.ours or isinstance(problem, (ValueError, NotImplementedError))
        reason = refusal([str(item.message) for item in caught]) or first_line(problem)
        put(contender, "unavailable" if refused else "failed", reason)
        return None
    if not error <= tolerance(workload.case.dtype):
        limit = tolerance(workload.case.dtype)
        put(contender, "wrong", f"relative error {error:.2g}, at most {limit:.2g} is accepted", error)
        return None
    return Entry(contender, error, peak)


def answers(device: torch.device) -> bool:
    """Whether the device still computes: after some errors a GPU does nothing more in this process."""
    try:
        return bool(torch.ones(8, device=device).sum().item() == 8)
    except RuntimeError:
        return False


def more_sets(inputs: Inputs, device: torch.device, free: int) -> int:
    """How many further input sets make all of them together at least twice the GPU's L2 cache."""
    if device.type != "cuda":
        return 0
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = min(MAX_INPUT_SETS, math.ceil(2 * cache / inputs.nbytes), int(free / 8 / inputs.nbytes))
    return max(0, wanted - 1)


def time_entries(
    workload: Workload, entries: list[Entry], sets: list[Inputs], repeats: int, case_seconds: float
) -> None:
    """Fills `times`. The first round only warms up and says how many calls make a sample."""
    goal, most = SAMPLE_SECONDS[workload.device.type], MAX_LAUNCHES[workload.device.type]
    settle = SETTLE_SECONDS if any(entry.contender.own_threads for entry in entries) else 0.0
    for entry in entries:
        entry.times = []
        entry.estimate = sample(workload, entry, sets)
        if entry.estimate < goal:  # the first call after another contender's says little about a short one
            entry.launches = max(1, min(most, int(goal / entry.estimate)))
            entry.estimate = sample(workload, entry, sets)
            entry.launches = max(1, min(most, int(goal / entry.estimate)))
    round_seconds = sum(entry.estimate * entry.launches + settle for entry in entries)
    rounds = max(3, min(repeats, int(case_seconds / round_seconds)))
    order = random.Random(0)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for entry in order.sample(entries, len(entries)):
                assert entry.times is not None
                time.sleep(settle)
                entry.times.append(sample(workload, entry, sets))
    finally:
        if collecting:
            gc.enable()


def sample(workload: Workload, entry: Entry, sets: list[Inputs]) -> float:
    """Seconds per call over `entry.launches` calls in a row."""
    contender, cuda = entry.contender, workload.device.type == "cuda"
    step = workload.step(contender)
    with torch.set_grad_enabled(workload.case.training), contender.pinned():
        if cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for index in range(entry.launches):
                step(sets[index % len(sets)])
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / entry.launches
        begin = time.perf_counter()
        for index in range(entry.launches):
            step(sets[index % len(sets)])
        return (time.perf_counter() - begin) / entry.launches


def refusal(messages: list[str]) -> str:
    """What torch's warnings give as reasons, without those that only say that the others are switched off."""
    told = dict.fromkeys(short(message) for message in messages)
    return "; ".join(text for text in told if "runtime disabled" not in text and not text.endswith("because:"))


def first_line(problem: BaseException) -> str:
    """The first line of an exception's text, with its type where there is no text."""
    lines = str(problem).strip().splitlines()
    return short(lines[0]) if lines else type(problem).__name__


def short(text: str, width: int = 160) -> str:
    """At most `width` characters, without the place in torch's sources that its warnings end with."""
    text = " ".join(text.split("(Triggered internally")[0].split())
    return text if len(text) <= width else text[: width - 1] + "…"
