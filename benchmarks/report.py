"""What a run says: aligned tables, a JSON file with everything, a Markdown file (plot.py draws)."""

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import mha_ext
from benchmarks.cases import GROUPS, Case
from benchmarks.harness import Result
from benchmarks.roofline import Ceilings, case_bytes, case_flops

NOISY = 0.1  # half the interquartile range over the median

__all__ = ["Report", "ceilings_line", "environment_lines", "environment_of", "table"]

SPEEDUP = "speed-up = torch's time / ours: above 1, ours is faster; ± is half the interquartile range of the samples"
CONVENTION = (
    "TFLOP/s and GFLOP/s count 4 B H L L D for a forward, 3.5 times that with the backward, half of it when causal"
)


def environment_of(device: torch.device, command: str) -> dict[str, Any]:
    """Everything about the machine and the software that the numbers depend on."""
    from mha_ext._extension import build_info

    facts: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mha_ext": mha_ext.__version__,
        "mha_ext_at": str(Path(mha_ext.__file__).parent),
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
    lines = [
        f"{facts['device']}, {facts['threads']} CPU threads{more}",
        f"torch {facts['torch']}, mha_ext {facts['mha_ext']}, Python {facts['python']}, {facts['date']}",
    ]
    for name, reason in facts["backends"].items():
        lines.append(f"backend {name}: {reason or 'available'}")
    return lines


def ceilings_line(ceilings: Ceilings) -> str:
    """What the machine was measured to do."""
    rates = ", ".join(
        f"{str(dtype).removeprefix('torch.')} product {rate / 1e12:.0f} TFLOP/s"
        for dtype, rate in ceilings.flops_per_second.items()
    )
    return f"measured ceilings: copy {ceilings.bytes_per_second / 1e12:.2f} TB/s (read + write), {rates}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """An aligned Markdown table; the first column to the left, the others to the right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def joined(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = f"|{'-' * (widths[0] + 2)}|{''.join('-' * (width + 1) + ':|' for width in widths[1:])}"
    return [joined(lines[0]), rule, *[joined(line) for line in lines[1:]]]


@dataclass(frozen=True)
class Report:
    """One run."""

    environment: dict[str, Any]
    ceilings: Ceilings | None
    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()

    def tables(self) -> dict[tuple[str, str, str], dict[Case, list[Result]]]:
        """Results by table (group, pass, dtype) and case, the tables in the order of GROUPS."""
        made: dict[tuple[str, str, str], dict[Case, list[Result]]] = {}
        for group, kinds in GROUPS.items():
            members = [result for result in self.results if result.case.kind in kinds]
            for result in sorted(members, key=lambda result: kinds.index(result.case.kind)):
                table_of = made.setdefault((group, result.case.pass_name, result.case.dtype_name), {})
                table_of.setdefault(result.case, []).append(result)
        return made

    def on_gpu(self) -> bool:
        """Whether there is a GPU's memory and roofline to speak of."""
        return self.ceilings is not None

    def rate(self, result: Result) -> tuple[float, str]:
        """Work per second and its unit: operations, or bytes where a case only moves bytes."""
        assert result.seconds is not None
        flops = case_flops(result.case)
        if flops:
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

    def summary_lines(self) -> list[str]:
        """One table per group, pass and dtype: a row per case and backend of ours, against torch's contenders."""
        lines = []
        for names, members in self.tables().items():
            lines += ["", f"### {', '.join(names)}", "", *self.summary_table(members)]
        return [*lines, "", f"{SPEEDUP}. {CONVENTION}.", *self.note_lines()]

    def summary_table(self, members: dict[Case, list[Result]]) -> list[str]:
        """The rows of one group, pass and dtype."""
        timed = [result for results in members.values() for result in results if result.seconds is not None]
        rivals = list(dict.fromkeys(result.contender for result in timed if not result.ours))
        each = rivals if len(rivals) > 1 else []
        units = {self.rate(result)[1] for result in timed}
        unit = units.pop() if len(units) == 1 else None
        gpu = ["roofline", "MiB"] if self.on_gpu() else []
        header = ["case", "ours", "ms", "±", unit or "rate", *gpu, "best of torch", "ms", "speed-up"]
        header += [f"vs {name.removeprefix('sdpa-')}" for name in each]
        rows = []
        for case, results in members.items():
            theirs = {r.contender: r.seconds for r in results if not r.ours and r.seconds is not None}
            best = min(theirs, key=lambda name: theirs[name]) if theirs else None
            label = case.label if case.kind in ("attention", "module") else f"{case.kind} {case.label}"
            ours: list[Result | None] = [r for r in results if r.ours and r.status != "unavailable"]
            for result in ours or [None]:
                row = [label, *self.our_cells(result, with_unit=unit is None)]
                row += [best.removeprefix("sdpa-"), milliseconds(theirs[best])] if best else ["-", "-"]
                row.append(ratio(theirs.get(best or ""), result))
                row += [ratio(theirs.get(name), result) for name in each]
                rows.append(row)
        return table(header, rows)

    def our_cells(self, result: Result | None, with_unit: bool) -> list[str]:
        """Backend, ms, spread, rate and, on a GPU, share of the roofline and peak memory."""
        if result is None:
            return ["none available", *["-"] * (5 if self.on_gpu() else 3)]
        name = result.contender.removeprefix("ours-")
        if result.seconds is None:
            return [f"{name}: {result.status}", *["-"] * (5 if self.on_gpu() else 3)]
        return [name, *self.measured_cells(result, with_unit)]

    def measured_cells(self, result: Result, with_unit: bool = True) -> list[str]:
        """ms, spread, rate and, on a GPU, share of the roofline and peak memory."""
        assert result.seconds is not None
        value, unit = self.rate(result)
        cells = [
            milliseconds(result.seconds),
            f"{result.spread or 0:.0%}",
            f"{significant(value)} {unit}" if with_unit else significant(value),
        ]
        if self.on_gpu():
            cells += [f"{self.roofline_share(result) or 0:.0%}", f"{(result.peak_bytes or 0) / 2**20:.0f}"]
        return cells

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
        """Every contender of every case in one table."""
        gpu = ["roofline", "MiB"] if self.on_gpu() else []
        header = ["case", "dtype", "pass", "contender", "ms", "±", "rate", *gpu, "relative error", "samples x calls"]
        rows = []
        for result in self.results:
            case = result.case
            start = [f"{case.kind} {case.label}", case.dtype_name, case.pass_name, result.contender]
            if result.seconds is None:
                rows.append([*start, result.status, *["-"] * (len(header) - 5)])
            else:
                counts = f"{result.samples} x {result.launches}"
                rows.append([*start, *self.measured_cells(result), f"{result.error:.1e}", counts])
        return table(header, rows)

    def write_markdown(self, file: Path) -> None:
        """Environment, summary and every contender."""
        lines = [*environment_lines(self.environment), *([ceilings_line(self.ceilings)] if self.ceilings else [])]
        lines = [*(f"- {line}" for line in lines), f"- `{self.environment['command']}`", *self.summary_lines()]
        file.write_text("\n".join([*lines, "", "### every contender", "", *self.detail_lines()]) + "\n")

    def write_json(self, file: Path) -> None:
        """Everything, for other programs."""
        content = {
            "environment": self.environment,
            "ceilings": self.ceilings
            and {
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
            **{name: getattr(case, name) for name in ("kind", "batch", "length", "is_causal", "training")},
            **{"preset": case.preset.name, "dtype": case.dtype_name},
            **{f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "case"},
            "spread": result.spread,
            "flops": case_flops(case),
            "bytes": case_bytes(case),
            "roofline_share": self.roofline_share(result),
        }


def milliseconds(seconds: float) -> str:
    """Three significant digits."""
    return significant(seconds * 1e3)


def significant(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def ratio(theirs: float | None, ours: Result | None) -> str:
    """Their time over ours, `-` where one is missing."""
    if theirs is None or ours is None or ours.seconds is None:
        return "-"
    return f"{theirs / ours.seconds:.2f}"
