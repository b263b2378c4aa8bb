"""The picture of `distill bench sync`: bytes, the frontier of bytes and speed, every road, and swaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from distill.bench.sync.formats import FORMATS
from distill.metrics.plot import BLUE, FAINT, GREEN, GREY, GRID, INK, ORANGE, PURPLE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS: Final = {
    **dict(zip(FORMATS, (GREY, "#b08900", ORANGE, PURPLE), strict=True)),
    "fast": BLUE,
    "small": GREEN,
    "entropy": RED,
}
MARKS: Final = {1: "o", 8: "s"}
"""Of the frontier, by steps between two versions."""


def draw(figures: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write the picture of the largest size that was measured; parts that were not stay empty."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size, parts = list(figures.items())[-1]
    figure, ((sizes, frontier), (transports, swaps)) = pyplot.subplots(
        2, 2, figsize=(12, 8.4), dpi=130, layout="constrained"
    )
    if "codec" in parts:
        _sizes(sizes, parts["codec"]["rows"])
        _frontier(frontier, parts["codec"]["rows"])
    if "roads" in parts:
        _roads(transports, parts["roads"]["roads"])
    if "swaps" in parts:
        _swaps(swaps, parts["swaps"])
    _dress(sizes, "Bytes per parameter, one step apart", "learning rate")
    _dress(frontier, "Bytes against speed (lr 1e-6; ○ one step, □ eight)", "bytes per parameter")
    _dress(transports, f"Publish, then stage, {size}", "milliseconds, median")
    _dress(swaps, f"Pause at a swap, {size}", "milliseconds, median")
    figure.savefig(path)
    pyplot.close(figure)


def _sizes(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    one = [row for row in rows if row["steps"] == min(row["steps"] for row in rows)]
    for name, color in COLORS.items():
        values = [row["bytes_per_parameter"][name] for row in one]
        line = "--" if name == "entropy" else "-"
        axes.plot([row["lr"] for row in one], values, line, color=color, linewidth=1.8, label=name)
    axes.axhline(2.0, color=FAINT, linewidth=0.8, linestyle=":", label="dense bf16")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower right", ncols=2)


def _frontier(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Encoding by CPU time."""
    lowest = min(row["lr"] for row in rows)
    for row in (row for row in rows if row["lr"] == lowest):
        for name, color in COLORS.items():
            if name == "entropy":
                axes.axvline(row["bytes_per_parameter"][name], color=RED, linewidth=0.8, linestyle="--")
                continue
            at = row["bytes_per_parameter"][name], row["encode"][name]["cpu"]
            axes.plot(*at, MARKS.get(row["steps"], "o"), color=color, markersize=7)
            axes.annotate(name, at, xytext=(6, 3), textcoords="offset points", fontsize=8, color=color)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("encoding, GB/s of dense bf16 a core", color=FAINT)
    low, high = axes.get_ylim()
    ticks = [tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.margins(x=0.2)


def _roads(axes: Axes, transports: Sequence[Mapping[str, Any]]) -> None:
    colors = {"full": GREY, "delta": BLUE, "lora": GREEN}
    names = [f"{transport['store']}, {transport['kind']}" for transport in transports]
    for place, transport in enumerate(transports):
        publish, stage = 1e3 * transport["publish_seconds"], 1e3 * transport["stage_seconds"]
        axes.barh(place, publish, color=colors[transport["kind"]])
        axes.barh(place, stage, left=publish, color=colors[transport["kind"]], alpha=0.45)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()


def _swaps(axes: Axes, swaps: Mapping[str, Any]) -> None:
    """Loading dark, the rest of the pause light; vLLM's own reload beside them."""
    for place, (_, swap) in enumerate(swaps["swaps"].items()):
        axes.barh(place, 1e3 * swap["apply_seconds"], color=PURPLE)
        rest = swap["pause_seconds"] - swap["apply_seconds"]
        axes.barh(place, 1e3 * rest, left=1e3 * swap["apply_seconds"], color=PURPLE, alpha=0.45)
    names = list(swaps["swaps"])
    if swaps["vllm_reload_seconds"] is not None:
        axes.barh(len(names), 1e3 * swaps["vllm_reload_seconds"], color=GREY)
        names.append("vLLM's own\nfull reload")
    axes.axvline(1e3 * swaps["decode_step_seconds"], color=RED, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()


def _dress(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(label, color=FAINT)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
