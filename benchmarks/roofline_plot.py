"""The roofline of a run on a CPU: rate against arithmetic intensity, under what the processor was measured to do."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Result
from benchmarks.roofline import Ceilings, case_bytes, case_flops

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_roofline"]

OURS, TORCH = "#c2410c", "#3b82f6"
MARKERS = {"attention": "o", "mask": "s", "decode": "D"}
RIVAL = "sdpa-flash"


def write_roofline(results: Sequence[Result], ceilings: Ceilings | None, title: str, file: Path) -> str | None:
    """A panel per dtype and pass, a point per case, ours and torch's; returns why there is nothing to see, if so."""
    drawn = [
        r for r in results if r.seconds is not None and r.case.kind in MARKERS and (r.ours or r.contender == RIVAL)
    ]
    if not drawn:
        return "no attention case was timed"
    if ceilings is None:
        return "no peaks were measured"
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        return "matplotlib is not installed (pip install matplotlib)"

    panels = list(dict.fromkeys((r.case.pass_name, r.case.dtype) for r in drawn))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(max(6.5, 4.2 * columns), 1.2 + 3.2 * lines), dpi=150, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axis, (pass_name, dtype) in zip(axes, panels, strict=False):
        members = [r for r in drawn if (r.case.pass_name, r.case.dtype) == (pass_name, dtype)]
        peak = ceilings.flops_per_second[dtype]
        name = members[0].case.dtype_name
        axis.set_title(f"{pass_name}, {name}: peak {peak / 1e9:.0f} GFLOP/s", fontsize=8)
        draw_roof(axis, drawn, peak, ceilings.bytes_per_second)
        for result in members:
            draw_point(axis, result)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for index, axis in enumerate(axes):
        axis.tick_params(labelsize=7, labelbottom=index + columns >= len(panels))
        if index + columns >= len(panels):
            axis.set_xlabel("FLOP per byte that has to move", fontsize=8)
        if index % columns == 0:
            axis.set_ylabel("GFLOP/s", fontsize=8)
    kinds = [kind for kind in MARKERS if any(result.case.kind == kind for result in drawn)]
    handles = [
        Line2D([], [], marker="o", linestyle="", color=OURS, label="mha_ext"),
        Line2D([], [], marker="o", linestyle="", color=TORCH, label=RIVAL),
        Line2D([], [], color="#475569", label=f"measured peak, read {ceilings.bytes_per_second / 1e9:.1f} GB/s"),
        *(Line2D([], [], marker=MARKERS[kind], linestyle="", color="#94a3b8", label=kind) for kind in kinds),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8, frameon=False)
    figure.suptitle(textwrap.fill(title, int(13 * figure.get_figwidth())), fontsize=9)
    figure.savefig(file)
    return None


def draw_roof(axis: "Axes", drawn: Sequence[Result], peak: float, bandwidth: float) -> None:
    """The lower of the peak and of what the memory feeds, over the intensities of all panels."""
    intensities = [case_flops(result.case) / case_bytes(result.case) for result in drawn]
    ridge = peak / bandwidth
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    axis.loglog([low, ridge, high], [low * bandwidth / 1e9, peak / 1e9, peak / 1e9], color="#475569", linewidth=1)
    axis.grid(which="major", linewidth=0.4, color="#e2e8f0")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def draw_point(axis: "Axes", result: Result) -> None:
    """One result; a point above the slope is what a cache feeds."""
    assert result.seconds is not None
    flops = case_flops(result.case)
    axis.plot(
        flops / case_bytes(result.case),
        flops / result.seconds / 1e9,
        marker=MARKERS[result.case.kind],
        markersize=4,
        color=OURS if result.ours else TORCH,
        linestyle="",
        alpha=0.85,
        markeredgewidth=0,
    )
