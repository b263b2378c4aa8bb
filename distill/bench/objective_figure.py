"""The pictures of `distill bench objective`: reverse KL and pass rate against tokens, and against lag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from distill.metrics.plot import BLUE, FAINT, GREEN, GREY, GRID, INK, ORANGE, PURPLE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS: Final = {
    "sampled": RED,
    "topk": BLUE,
    "student_topk": PURPLE,
    "forward_topk": ORANGE,
    "full": GREEN,
    "jsd": "#0f8b8d",
    "skew": "#b08900",
    "sft": GREY,
}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture; every curve is the mean of its seeds, the band reaches from least to most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if row["lag"] == min(report["lags"])]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), dpi=130, layout="constrained")
    for axes, key, title in (
        (left, "reverse_kl", "Exact reverse KL, nats a token"),
        (right, "pass_rate", "Pass rate at temperature 1"),
    ):
        for row in sorted(rows, key=lambda row: row[key]["mean"]):
            _curve(axes, row, key)
        _dress(axes, title)
    left.set_yscale("log")
    left.axhline(report["target_kl"], color=FAINT, linewidth=0.8, linestyle=":")
    right.legend(frameon=False, fontsize=8, labelcolor=INK)
    figure.savefig(path)
    pyplot.close(figure)


def draw_lags(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of several lags: what each objective ends at; bars reach from least to most seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2), dpi=130, layout="constrained")
    for axes, key, title in (
        (left, "reverse_kl", "Exact reverse KL at the end, nats a token"),
        (right, "pass_rate", "Pass rate at the end"),
    ):
        for name in dict.fromkeys(row["objective"] for row in report["rows"]):
            rows = sorted(
                (row for row in report["rows"] if row["objective"] == name), key=lambda row: row["lag"]
            )
            if len(rows) > 1:
                _points(axes, name, rows, key)
        _dress(axes, title)
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(sorted(report["lags"]), [str(lag) for lag in sorted(report["lags"])])
        axes.set_xlabel("forced lag, optimizer steps", color=FAINT)
    left.legend(frameon=False, fontsize=8, labelcolor=INK)
    figure.savefig(path)
    pyplot.close(figure)


def _points(axes: Axes, name: str, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    mean = np.array([row[key]["mean"] for row in rows])
    least, most = (np.array([of(row[key]["values"]) for row in rows]) for of in (min, max))
    reach = np.stack([mean - least, most - mean])
    lags = [row["lag"] for row in rows]
    axes.errorbar(lags, mean, yerr=reach, color=COLORS[name], marker="o", capsize=3, label=name)


def _curve(axes: Axes, row: Mapping[str, Any], key: str) -> None:
    curves: Sequence[Sequence[Mapping[str, float]]] = row["curves"]
    tokens = np.array([[point["tokens"] for point in curve] for curve in curves]).mean(0) / 1000
    values = np.array([[point[key] for point in curve] for curve in curves])
    color = COLORS[row["objective"]]
    axes.fill_between(tokens, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
    axes.plot(tokens, values.mean(0), color=color, linewidth=1.8, label=row["objective"])


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("tokens trained on, thousands", color=FAINT)
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(colors=FAINT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
