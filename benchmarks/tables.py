"""The tables of a report: aligned Markdown, and what its columns say about one of ours and its rivals."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.cases import Case
from benchmarks.harness import Result

__all__ = [
    "Column",
    "Comparison",
    "compared",
    "milliseconds",
    "overview",
    "percent",
    "ratio_text",
    "rivals_of",
    "significant",
    "table",
]

# Whose error ours is divided by: the first of these that was timed.
TORCH_ITSELF = ("sdpa-flash", "sdpa-math", "sdpa", "nn.MultiheadAttention", "torch")


@dataclass(frozen=True)
class Comparison:
    """One of ours on one case (None: none of ours ran), beside everyone who was timed on it."""

    case: Case
    ours: Result | None
    timed: dict[str, Result]

    @property
    def rivals(self) -> dict[str, float]:
        """Seconds of everyone who computed the same."""
        return {
            name: result.seconds
            for name, result in self.timed.items()
            if result.seconds is not None and not result.ours and not result.yardstick
        }

    def speedup(self, rival: str | None) -> float | None:
        """Their time over ours."""
        theirs = self.rivals.get(rival or "")
        return None if theirs is None or self.ours is None or self.ours.seconds is None else theirs / self.ours.seconds

    def best_rival(self) -> str | None:
        """The fastest of them."""
        return min(self.rivals, key=lambda name: self.rivals[name], default=None)

    def error_ratio(self) -> float | None:
        """Our error over torch's own on the same inputs."""
        theirs = next((self.timed[name].error for name in TORCH_ITSELF if name in self.timed), None)
        return None if not theirs or self.ours is None or self.ours.error is None else self.ours.error / theirs

    def mask_cost(self) -> float | None:
        """By how much a visible pair takes longer than in the same call without the mask."""
        plain = self.timed.get(f"no mask, {self.ours.contender}") if self.ours else None
        if self.ours is None or self.ours.seconds is None or plain is None or plain.seconds is None:
            return None
        return self.ours.seconds / plain.seconds * (self.case.queries * self.case.length) / self.case.visible - 1

    def read_share(self) -> float | None:
        """How near the time is to that of a loop that only reads the keys and the values."""
        read = self.timed.get("read loop")
        if self.ours is None or self.ours.seconds is None or read is None or read.seconds is None:
            return None
        return read.seconds / self.ours.seconds


@dataclass(frozen=True)
class Column:
    """A heading, and what stands under it; `-` where that is None."""

    header: str
    text: Callable[[Comparison], str | None]


def compared(results: Iterable[Result]) -> list[Comparison]:
    """A comparison for each of ours that could run, in their order; one without, where there is none on a case."""
    by_case: dict[Case, list[Result]] = {}
    for result in results:
        by_case.setdefault(result.case, []).append(result)
    made = []
    for case, of_case in by_case.items():
        timed = {result.contender: result for result in of_case if result.seconds is not None}
        ours: list[Result | None] = [result for result in of_case if result.ours and result.status != "unavailable"]
        made += [Comparison(case, result, timed) for result in ours or [None]]
    return made


def rivals_of(comparisons: Iterable[Comparison]) -> list[str]:
    """Everyone who was timed beside ours, in order of appearance."""
    return list(dict.fromkeys(name for comparison in comparisons for name in comparison.rivals))


def overview(comparisons: Sequence[Comparison]) -> list[str]:
    """Per pass, dtype and rival: geometric mean and worst of our speed-up over all cases where both were timed.

    Where several of ours ran on a case, the first counts: it is what a call takes that asks for none by name.
    """
    firsts: dict[tuple[str, str], dict[Case, Comparison]] = {}
    for comparison in comparisons:
        if comparison.ours is not None and comparison.ours.seconds is not None:
            group = firsts.setdefault((comparison.case.pass_name, comparison.case.dtype_name), {})
            group.setdefault(comparison.case, comparison)
    rows = []
    for (pass_name, dtype), group in firsts.items():
        for rival in rivals_of(group.values()):
            found = {case: ratio for case, each in group.items() if (ratio := each.speedup(rival)) is not None}
            worst = min(found, key=lambda case: found[case])
            mean = math.exp(sum(map(math.log, found.values())) / len(found))
            rows.append(
                [f"{pass_name}, {dtype}", rival, str(len(found)), f"{mean:.2f}", f"{found[worst]:.2f}", worst.label]
            )
        errors = {case: ratio for case, each in group.items() if (ratio := each.error_ratio()) is not None}
        if errors:
            worst = max(errors, key=lambda case: errors[case])
            rows.append(
                [f"{pass_name}, {dtype}", "error / torch's", str(len(errors)), "-", f"{errors[worst]:.2f}", worst.label]
            )
    return table(["ours against", "", "cases", "geometric mean", "worst", "worst case"], rows) if rows else []


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


def milliseconds(seconds: float) -> str:
    """Three significant digits."""
    return significant(seconds * 1e3)


def significant(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def ratio_text(value: float | None) -> str | None:
    """Two decimals."""
    return None if value is None else f"{value:.2f}"


def percent(value: float | None) -> str | None:
    """A whole number of percent."""
    return None if value is None else f"{round(value, 2) + 0.0:.0%}"  # 0, not -0
