"""The plot of a run: the rate of every contender as bars, a panel per preset and mask, a row per dtype and pass."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmarks.cases import Preset
from benchmarks.harness import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_plot"]

T = TypeVar("T")
OUR_COLORS = ("#c2410c", "#f59e0b", "#be185d", "#7c2d12")  # warm
OTHER_COLORS = {
    "reference": "#e7d8b1",
    "sdpa-math": "#cbd5e1",
    "sdpa-flash": "#93c5fd",
    "sdpa-efficient": "#3b82f6",
    "sdpa-cudnn": "#1e3a8a",
    "onnxruntime": "#86b388",
}
GROUP_WIDTH = 0.8  # of the distance between two sequence lengths


def write_plot(
    results: Iterable[Result], rate: Callable[[Result], tuple[float, str]], title: str, file: Path
) -> str | None:
    """Draws the timed attention cases; returns why there is nothing to see, if so. `rate` gives value and unit."""
    timed = [r for r in results if r.case.kind == "attention" and r.seconds is not None]
    if not timed:
        return "no attention case was timed"
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return "matplotlib is not installed (pip install matplotlib)"

    layers = unique((result.case.preset, result.case.mask) for result in timed)
    rows = unique((result.case.pass_name, result.case.dtype_name) for result in timed)
    ours, theirs = (unique(r.contender for r in timed if r.ours is wanted) for wanted in (True, False))
    colors = dict(zip(ours, OUR_COLORS * len(ours), strict=False)) | {name: OTHER_COLORS[name] for name in theirs}

    figure = Figure(figsize=(max(6.5, 1 + 2 * len(layers)), 1.4 + 2 * len(rows)), dpi=150, layout="constrained")
    axes = figure.subplots(len(rows), len(layers), squeeze=False, sharey="row")
    for line, (pass_name, dtype) in zip(axes, rows, strict=True):
        of_row = [r for r in timed if (r.case.pass_name, r.case.dtype_name) == (pass_name, dtype)]
        for axis, layer in zip(line, layers, strict=True):
            draw_panel(axis, [r for r in of_row if (r.case.preset, r.case.mask) == layer], colors, rate)
        row = [rate(r)[0] for r in of_row]
        line[0].set_ylim(0, 1.15 * max(row))
        line[0].set_ylabel(f"{pass_name}\n{dtype}\n{rate(timed[0])[1]}", fontsize=8)
    for axis, (preset, mask) in zip(axes[0], layers, strict=True):
        axis.set_title(f"{preset.name}\n{heads_of(preset)}, {mask}", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length", fontsize=8)
    labels = {name: f"mha_ext {name.removeprefix('ours-')}" if name in ours else name for name in colors}
    handles = [Patch(color=color, label=labels[name]) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.suptitle(textwrap.fill(title, int(13 * figure.get_figwidth())), fontsize=9)
    figure.savefig(file)
    return None


def draw_panel(
    axis: "Axes", results: Sequence[Result], colors: dict[str, str], rate: Callable[[Result], tuple[float, str]]
) -> None:
    """Groups of bars, one per sequence length; a contender that was not timed leaves its place empty."""
    lengths = sorted({result.case.length for result in results})
    width = GROUP_WIDTH / len(colors)
    for slot, (name, color) in enumerate(colors.items()):
        mine = [result for result in results if result.contender == name]
        offset = (slot - (len(colors) - 1) / 2) * width
        axis.bar(
            [lengths.index(result.case.length) + offset for result in mine],
            [rate(result)[0] for result in mine],
            width=width * 0.92,
            color=color,
            yerr=list(zip(*(error_bar(result, rate) for result in mine), strict=True)) or None,
            error_kw={"linewidth": 0.7, "ecolor": "#475569"},
        )
    if not results:
        axis.text(
            0.5, 0.5, "not timed", ha="center", va="center", fontsize=7, color="#64748b", transform=axis.transAxes
        )
    axis.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axis.set_xlim(-0.6, len(lengths) - 0.4)
    axis.tick_params(labelsize=7, length=2)
    axis.grid(axis="y", linewidth=0.4, color="#e2e8f0")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def error_bar(result: Result, rate: Callable[[Result], tuple[float, str]]) -> tuple[float, float]:
    """How far the quartiles of the samples lie below and above the rate."""
    assert result.seconds is not None
    assert result.quartiles is not None
    fast, slow = result.quartiles
    value = rate(result)[0]
    return value - value * result.seconds / slow, value * result.seconds / fast - value


def heads_of(preset: Preset) -> str:
    """`12 heads of 64`, or `64/8 heads of 128` where key heads are shared."""
    shared = "" if preset.num_heads == preset.num_kv_heads else f"/{preset.num_kv_heads}"
    return f"{preset.num_heads}{shared} heads of {preset.head_dim}"


def unique(items: Iterable[T]) -> list[T]:
    """In order of first appearance."""
    return list(dict.fromkeys(items))
