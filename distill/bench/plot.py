"""Draw the figures of the benchmarks: panels of one look, written to one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill.metrics.plot import BLUE, FAINT, GREEN, GREY, GRID, INK, ORANGE, PURPLE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BLUE", "FAINT", "GREEN", "GREY", "INK", "OCHRE", "ORANGE", "PURPLE", "RED", "TEAL"]
__all__ += ["bars", "dress", "legend", "panels", "target_line"]
OCHRE, TEAL = "#b08900", "#0f8b8d"


@contextmanager
def panels(path: Path, rows: int, height: float, **layout: Any) -> Iterator[list[Axes]]:
    """Axes of `rows` × 2 panels, row by row; the picture is written when they are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(rows, 2, figsize=(12, height), dpi=130, layout="constrained", **layout)
    try:
        yield list(axes.flat)
        figure.savefig(path)
    finally:
        pyplot.close(figure)


def dress(axes: Axes, title: str, x_label: str = "", grid: Literal["both", "x"] = "both") -> None:
    """Title, label and grid of a panel."""
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x_label, color=FAINT)
    axes.grid(color=GRID, linewidth=0.8, axis=grid)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Axes, **place: Any) -> None:
    """Names of the curves, without a frame."""
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, **place)


def target_line(axes: Axes, value: float, label: str | None = None) -> None:
    """A dotted line across the panel."""
    axes.axhline(value, color=FAINT, linewidth=0.8, linestyle=":", label=label)


def bars(axes: Axes, parts: Mapping[str, Sequence[float]], colors: Mapping[str, str]) -> None:
    """One horizontal bar per name, top down: its parts end to end, all but the first one light."""
    for height, (name, widths) in enumerate(parts.items()):
        left = 0.0
        for number, width in enumerate(widths):
            axes.barh(height, width, left=left, color=colors[name], alpha=0.45 if number else 1.0)
            left += width
    axes.set_yticks(range(len(parts)), list(parts), fontsize=8)
    axes.invert_yaxis()
