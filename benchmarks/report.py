"""What a run says: aligned tables, a JSON file with everything, a Markdown file (plot.py draws)."""

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mha_ext
from benchmarks.cases import GROUPS
from benchmarks.harness import Result
from benchmarks.roofline import Ceilings, case_bytes, case_flops
from benchmarks.tables import (
    Column,
    Comparison,
    compared,
    milliseconds,
    overview,
    percent,
    ratio_text,
    rivals_of,
    significant,
    table,
)

NOISY = 0.1  # half the interquartile range over the median

__all__ = ["Report", "environment_lines", "environment_of"]

SPEEDUP = "speed-up = their time / ours: above 1, ours is faster; ± is half the interquartile range of the samples"
CONVENTION = (
    "TFLOP/s and GFLOP/s count 4 B H L L D for a forward, 3.5 times that with the backward, half of it when causal, "
    "what is visible under other masks; peak is their share of what multiply-adds in registers reach, mask costs the "
    "time of a visible pair beyond that of the same call without a mask, error / torch's our relative error against "
    "fp64 over that of torch's own call"
)


def environment_of(device: torch.device, command: str) -> dict[str, Any]:
    """Everything about the machine and the software that the numbers depend on."""
    from mha_ext._extension import build_info, extension

    facts: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "device_type": device.type,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_target": extension.cpu_target() if extension else None,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnxruntime": version_of("onnxruntime"),
        "mha_ext": mha_ext.__version__,
        "build": build_info,
        "backends": mha_ext.backends.available(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "cpu": cpu_name(),
            "driver": nvidia_smi("driver_version"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "sm_clock_mhz_max": nvidia_smi("clocks.max.sm"),
        }
    return facts


def version_of(package: str) -> str | None:
    """Of an installed package; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name as Linux gives it, with its widest vector unit."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def nvidia_smi(field: str) -> str | None:
    """One field of the first GPU, read only; None where nvidia-smi cannot say."""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.splitlines()[0].strip() if answer.strip() else None


def environment_lines(facts: dict[str, Any]) -> list[str]:
    """The part of the environment that a reader wants first."""
    more = f", driver {facts['driver']}, CUDA {facts['cuda']}, cuDNN {facts['cudnn']}" if "driver" in facts else ""
    threads = f"{facts['threads']} CPU threads on {facts['cpus']} CPUs"
    ours = f"mha_ext {facts['mha_ext']}" + (f" ({facts['cpu_target']} on the CPU)" if facts["cpu_target"] else "")
    onnx = f", ONNX Runtime {facts['onnxruntime']}" if facts["onnxruntime"] else ""
    lines = [
        f"{facts['device']}, {threads}{more}",
        f"{ours}, torch {facts['torch']}{onnx}, Python {facts['python']}, {facts['date']}",
    ]
    for name, reason in facts["backends"].items():
        lines.append(f"backend {name}: {reason or 'available'}")
    return lines


@dataclass(frozen=True)
class Report:
    """One run."""

    environment: dict[str, Any]
    ceilings: Ceilings | None
    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()

    def tables(self) -> dict[tuple[str, str, str], list[Result]]:
        """Results by table (group, pass, dtype), the tables in the order of GROUPS."""
        made: dict[tuple[str, str, str], list[Result]] = {}
        for group, kinds in GROUPS.items():
            members = [result for result in self.results if result.case.kind in kinds]
            for result in sorted(members, key=lambda result: kinds.index(result.case.kind)):
                made.setdefault((group, result.case.pass_name, result.case.dtype_name), []).append(result)
        return made

    def on_gpu(self) -> bool:
        """Whether there is a GPU's memory to speak of."""
        return self.environment.get("device_type") == "cuda"

    def rate(self, result: Result) -> tuple[float, str]:
        """Work per second and its unit: operations, or bytes where a case is made of moving bytes."""
        assert result.seconds is not None
        flops = case_flops(result.case)
        if flops and result.case.kind != "decode":
            return (
                (flops / result.seconds / 1e12, "TFLOP/s")
                if self.on_gpu()
                else (flops / result.seconds / 1e9, "GFLOP/s")
            )
        return case_bytes(result.case) / result.seconds / 1e9, "GB/s"

    def roofline_share(self, result: Result) -> float | None:
        """Shortest possible time over measured time."""
        if self.ceilings is None or result.seconds is None:
            return None
        return self.ceilings.floor_seconds(result.case) / result.seconds

    def peak_share(self, result: Result) -> float | None:
        """Operations per second over the most that was measured."""
        flops = case_flops(result.case)
        if self.ceilings is None or result.seconds is None or not flops:
            return None
        return flops / result.seconds / self.ceilings.flops_per_second[result.case.dtype]

    def summary_lines(self) -> list[str]:
        """One table per group, pass and dtype: a row per case and backend of ours, against the others."""
        lines = []
        for names, members in self.tables().items():
            lines += ["", f"### {', '.join(names)}", "", *self.summary_table(names[0], members)]
        lines += self.together()
        return [*lines, "", f"{SPEEDUP}. {CONVENTION}.", *self.note_lines()]

    def together(self) -> list[str]:
        """Means and worst cases over several tables."""
        lines = []
        for kinds in (("attention", "mask", "decode"), ("module",)):
            told = overview(compared(result for result in self.results if result.case.kind in kinds))
            lines += ["", f"### all together: {', '.join(kinds)}", "", *told] if told else []
        return lines

    def summary_table(self, group: str, members: Sequence[Result]) -> list[str]:
        """The rows of one group, pass and dtype."""
        units = {self.rate(result)[1] for result in members if result.seconds is not None}
        columns = self.columns(group, units.pop() if len(units) == 1 else None, rivals_of(compared(members)))
        rows = [[column.text(row) or "-" for column in columns] for row in compared(members)]
        return table([column.header for column in columns], rows)

    def columns(self, group: str, unit: str | None, rivals: Sequence[str]) -> list[Column]:
        """What a table of this group shows; `unit` None: a unit of its own in each row."""

        def label(row: Comparison) -> str:
            return f"{row.case.kind} {row.case.label}" if group == "parts" else row.case.label

        def name(row: Comparison) -> str:
            if row.ours is None:
                return "none available"
            backend = row.ours.contender.removeprefix("ours-")
            return backend if row.ours.seconds is not None else f"{backend}: {row.ours.status}"

        def ours(text: Callable[[Result], str | None]) -> Callable[[Comparison], str | None]:
            return lambda row: None if row.ours is None or row.ours.seconds is None else text(row.ours)

        def time_of(result: Result) -> str:
            assert result.seconds is not None
            return significant(result.seconds * 1e6) if group == "call" else milliseconds(result.seconds)

        def rate(result: Result) -> str:
            value, its_unit = self.rate(result)
            return significant(value) if unit else f"{significant(value)} {its_unit}"

        def best(row: Comparison) -> str | None:
            rival = row.best_rival()
            return rival.removeprefix("sdpa-") if rival else None

        def best_time(row: Comparison) -> str | None:
            rival = row.best_rival()
            return time_of(row.timed[rival]) if rival else None

        time_unit = "µs" if group == "call" else "ms"
        columns = [
            Column("case", label),
            Column("ours", name),
            Column(time_unit, ours(time_of)),
            Column("±", ours(lambda result: percent(result.spread))),
        ]
        if group != "call":
            columns.append(Column(unit or "rate", ours(rate)))
        if self.on_gpu():
            columns.append(Column("roofline", ours(lambda result: percent(self.roofline_share(result)))))
            columns.append(Column("MiB", ours(lambda result: f"{(result.peak_bytes or 0) / 2**20:.0f}")))
        elif group in ("attention", "masks", "module"):
            columns.append(Column("peak", ours(lambda result: percent(self.peak_share(result)))))
        if group == "masks":
            columns.append(Column("mask costs", lambda row: percent(row.mask_cost())))
        if group == "decode":
            columns.append(Column("of read loop", lambda row: percent(row.read_share())))
        columns += [
            Column("best other", best),
            Column(time_unit, best_time),
            Column("speed-up", lambda row: ratio_text(row.speedup(row.best_rival()))),
        ]
        for rival in rivals if len(rivals) > 1 else ():
            columns.append(Column(f"vs {rival.removeprefix('sdpa-')}", partial(versus, rival)))
        columns.append(Column("error / torch's", lambda row: ratio_text(row.error_ratio())))
        return columns

    def note_lines(self) -> list[str]:
        """Why some were not timed, each reason once, and the notes of the run."""
        reasons: dict[tuple[str, str], dict[str, int]] = {}
        for result in self.results:
            if result.status != "timed":
                counts = reasons.setdefault((result.status, result.reason), {})
                counts[result.contender] = counts.get(result.contender, 0) + 1
        lines = [
            f"- {', '.join(f'{name} ({count})' for name, count in counts.items())}: {status}: {reason}"
            for (status, reason), counts in reasons.items()
        ]
        notes = list(self.notes)
        spreads = [result.spread or 0.0 for result in self.results if result.seconds is not None]
        noisy = sum(spread > NOISY for spread in spreads)
        if noisy > len(spreads) / 4:
            notes.append(
                f"UNRELIABLE: {noisy} of {len(spreads)} times vary by more than ±{NOISY:.0%}. Is the machine busy?"
            )
        if lines:
            lines = ["", "Not timed (in brackets: cases):", *lines]
        return [*lines, "", *notes] if notes else lines

    def detail_lines(self) -> list[str]:
        """Every contender of every case in one table, but those that could not be timed: the notes count them."""
        more = ["roofline", "MiB"] if self.on_gpu() else ["peak"]
        header = ["case", "dtype", "pass", "contender", "ms", "±", "rate", *more, "relative error", "samples x calls"]
        rows = []
        for result in self.results:
            case = result.case
            start = [f"{case.kind} {case.label}", case.dtype_name, case.pass_name, result.contender]
            if result.status == "unavailable":
                continue
            if result.seconds is None:
                rows.append([*start, result.status, *["-"] * (len(header) - 5)])
                continue
            value, unit = self.rate(result)
            rate = "-" if result.yardstick else f"{significant(value)} {unit}"
            shares = [percent(None if result.yardstick else self.peak_share(result)) or "-"]
            if self.on_gpu():
                shares = [percent(self.roofline_share(result)) or "-", f"{(result.peak_bytes or 0) / 2**20:.0f}"]
            counts = f"{result.samples} x {result.launches}"
            measured = [milliseconds(result.seconds), percent(result.spread) or "-", rate, *shares]
            rows.append([*start, *measured, f"{result.error:.1e}", counts])
        return table(header, rows)

    def write_markdown(self, file: Path) -> None:
        """Environment, summary and every contender."""
        lines = [*environment_lines(self.environment), *([self.ceilings.how] if self.ceilings else [])]
        lines = [*(f"- {line}" for line in lines), f"- `{self.environment['command']}`", *self.summary_lines()]
        file.write_text("\n".join([*lines, "", "### every contender", "", *self.detail_lines()]) + "\n")

    def write_json(self, file: Path) -> None:
        """Everything, for other programs."""
        content = {
            "environment": self.environment,
            "ceilings": self.ceilings
            and {
                "how": self.ceilings.how,
                "bytes_per_second": self.ceilings.bytes_per_second,
                "flops_per_second": {str(dtype): rate for dtype, rate in self.ceilings.flops_per_second.items()},
            },
            "notes": self.notes,
            "results": [self.record(result) for result in self.results],
        }
        file.write_text(json.dumps(content, indent=1, default=str) + "\n")

    def record(self, result: Result) -> dict[str, Any]:
        """One result with its case, its work and its rates."""
        case = result.case
        return {
            **{name: getattr(case, name) for name in ("kind", "batch", "queries", "length", "mask", "training")},
            **{"preset": case.preset.name, "dtype": case.dtype_name},
            **{f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "case"},
            "spread": result.spread,
            "flops": case_flops(case),
            "bytes": case_bytes(case),
            "roofline_share": self.roofline_share(result),
            "peak_share": self.peak_share(result),
        }


def versus(rival: str, row: Comparison) -> str | None:
    """How many times as long this rival takes."""
    return ratio_text(row.speedup(rival))
