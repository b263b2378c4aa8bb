"""The picture of `distill bench async`: reverse KL against wall time, and what a step costs by role."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from distill.metrics.plot import BLUE, FAINT, GREEN, GREY, GRID, INK, ORANGE, PURPLE

COLORS: Final = {"synchronous": GREY, "asynchronous": BLUE}
ROLES: Final = (BLUE, ORANGE, GREEN, PURPLE)


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture; every trial is a line, the bars are medians."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 4.2), dpi=130, layout="constrained", width_ratios=(3, 2)
    )
    for trial in report["trials"]:
        label = trial["way"] if trial["seed"] == report["seeds"][0] else None
        seconds, kl = [point[0] for point in trial["curve"]], [point[1] for point in trial["curve"]]
        left.plot(seconds, kl, color=COLORS[trial["way"]], linewidth=1.6, label=label)
    left.axhline(report["target_kl"], color=FAINT, linewidth=0.8, linestyle=":")
    left.set_yscale("log")
    left.set_title("Exact reverse KL, held out, nats a token", loc="left", fontsize=11, color=INK)
    left.set_xlabel("seconds since the first step", color=FAINT)
    left.legend(frameon=False, labelcolor=INK)
    _bars(right, report["medians"])
    for axes in (left, right):
        axes.grid(color=GRID, linewidth=0.8, axis="both" if axes is left else "x")
        axes.tick_params(colors=FAINT)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def _bars(axes: Any, medians: Mapping[str, Mapping[str, Any]]) -> None:
    """Processor time of a step by role, and its wall time as a line."""
    for height, found in enumerate(medians.values()):
        start = 0.0
        for (role, used), color in zip(found["cpu_ms_per_step"].items(), ROLES, strict=False):
            axes.barh(height, used, left=start, color=color, height=0.5, label=None if height else role)
            start += used
        wall = found["mean_step_ms"]
        axes.plot([wall, wall], [height - 0.4, height + 0.4], color=INK, linewidth=2)
        axes.text(wall, height + 0.42, f"{wall:.0f} ms", ha="center", color=INK)
    axes.set_yticks(range(len(medians)), list(medians))
    axes.set_title("A step: processor time by role, and wall time, ms", loc="left", fontsize=11, color=INK)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.08), "ncols": 4}
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, **place)
