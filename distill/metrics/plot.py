"""report.png: quality, staleness and time of a step, activity of roles; `distill report` redraws it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

from distill.metrics.results import Run
from distill.metrics.summary import use_of_tokens
from distill.metrics.timeline import Span
from sync.base.jsonl import read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#2f6fde", "#e07b1a", "#2e9e6b", "#8457d6", "#cc3f5a", "#9aa5b1"
TEAL, BROWN = "#12a5b8", "#8a5a2b"
RUN_COLORS = (BLUE, RED, GREEN, PURPLE, ORANGE, TEAL, BROWN)
WORK_COLORS = {
    "generate": BLUE,
    "score": ORANGE,
    "teacher_generate": BROWN,
    "train": GREEN,
    "publish": PURPLE,
    "update": TEAL,
    "evaluate": RED,
    "checkpoint": GREY,
}
BACKGROUND_WORK = ("update", "teacher_generate")
"""Drawn as a thin bar over the others."""
ROLES = ("student", "replica", "teacher", "trainer", "evaluator")
"""Order of the rows."""
WINDOW_SECONDS = 12.0
"""Of the activity rows: long enough to show the rhythm, short enough to show single steps."""

Line = dict[str, Any]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(run: Run) -> Path:
    """Draw report.png of a run."""
    pyplot, summary = _pyplot(), run.summary
    figure = pyplot.figure(figsize=(12, 8), dpi=130, facecolor="white", layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    draw_quality(figure.add_subplot(grid[0, 0]), run.metrics)
    draw_cost(figure.add_subplot(grid[0, 1]), run.metrics)
    draw_activity(figure.add_subplot(grid[1, :]), read_lines(run.folder / "timeline.jsonl", Span), summary)
    title = {"x": 0.01, "ha": "left", "fontsize": 15, "fontweight": "bold", "color": INK}
    figure.suptitle(_title(run.folder.name, summary), **title)
    if "rollout" in summary:
        figure.supxlabel(use_of_tokens(summary), x=0.01, ha="left", fontsize=9, color=FAINT)
    path = run.folder / "report.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _title(name: str, summary: Mapping[str, Any]) -> str:
    before, after = summary.get("before") or {}, summary.get("after") or {}
    if before.get("reverse_kl") is None or after.get("reverse_kl") is None:
        return name
    words = f"reverse KL {before['reverse_kl']:.2f} → {after['reverse_kl']:.2f} nats per token"
    if before.get("pass_rate") is not None and after.get("pass_rate") is not None:
        words += f",  pass rate {before['pass_rate']:.0%} → {after['pass_rate']:.0%}"
    return f"{name}:  {words}"


def draw_quality(axes: Axes, lines: Sequence[Line]) -> None:
    """Reverse KL and pass rate over trained tokens: exact ones as dots, the training batches' as a line."""
    _dress(axes, "Student on its own completions", "tokens trained on, thousands")
    axes.plot(
        *_curve(lines, "train/reverse_kl"), color=BLUE, alpha=0.35, label="reverse KL, training batches"
    )
    axes.plot(*_curve(lines, "eval/reverse_kl"), "o-", color=BLUE, label="reverse KL, held out")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("reverse KL, nats per token", color=BLUE)
    curves, passed = axes.get_lines(), _curve(lines, "eval/pass_rate")
    if passed[0]:
        right = axes.twinx()
        right.plot(*passed, "s-", color=GREEN, label="pass rate, held out")
        right.set_ylim(0, 1)
        right.set_ylabel("pass rate", color=GREEN)
        right.spines[["top"]].set_visible(False)
        curves = [*curves, *right.get_lines()]
    labels = [str(curve.get_label()) for curve in curves]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}  # off the curves, wherever they end
    axes.legend(curves, labels, frameon=False, fontsize=8, ncols=3, **below)


def _curve(lines: Sequence[Line], figure: str) -> tuple[list[float], list[float]]:
    """A figure over thousands of trained tokens."""
    tokens_at = {
        line["step"]: line["train/tokens_total"] / 1e3 for line in lines if "train/tokens_total" in line
    }
    known = tokens_at.keys() | {0}  # an evaluation beyond is of steps that are being made anew
    points = [line for line in lines if figure in line and line["step"] in known]
    return [tokens_at.get(line["step"], 0.0) for line in points], [line[figure] for line in points]


def compare(runs: Sequence[Run]) -> bytes:
    """PNG of the held-out and the training reverse KL, and of the pass rate, of every run."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), dpi=130, layout="constrained")
    _dress(left, "Reverse KL on own completions, nats per token", "tokens trained on, thousands")
    _dress(right, "Pass rate, held out", "tokens trained on, thousands")
    for run, color in zip(runs, cycle(RUN_COLORS), strict=False):
        left.plot(*_curve(run.metrics, "train/reverse_kl"), color=color, alpha=0.3)
        left.plot(*_curve(run.metrics, "eval/reverse_kl"), "o-", color=color, label=run.folder.name)
        right.plot(*_curve(run.metrics, "eval/pass_rate"), "s-", color=color)
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer)
    pyplot.close(figure)
    return buffer.getvalue()


def draw_cost(axes: Axes, lines: Sequence[Line]) -> None:
    """Mean and highest age of the rollouts of each step, and seconds that the trainer worked and waited."""
    _dress(axes, "Staleness of rollouts, and time of a step", "optimizer step")
    steps = [line for line in lines if "buffer/age_mean" in line and "buffer/age_max" in line]
    x, mean = [line["step"] for line in steps], [line["buffer/age_mean"] for line in steps]
    oldest = [line["buffer/age_max"] for line in steps]
    axes.fill_between(x, mean, oldest, color=ORANGE, alpha=0.2, linewidth=0, label="age, up to the oldest")
    axes.plot(x, mean, color=ORANGE, linewidth=1.2, label="age, mean")
    axes.set_ylabel("age of rollouts, versions", color=ORANGE)
    axes.set_ylim(0, 1.3 * max([1.0, *oldest]))
    right = axes.twinx()
    wait = [line.get("perf/wait_seconds", 0.0) for line in steps]
    work = [line.get("perf/train_seconds", 0.0) + line.get("perf/publish_seconds", 0.0) for line in steps]
    right.plot(x, work, color=GREEN, linewidth=0.9, label="trainer works")
    right.plot(x, wait, color=GREY, linewidth=0.9, label="trainer waits")
    right.set_ylabel("seconds a step", color=INK)
    totals = [a + b for a, b in zip(wait, work, strict=True)]
    right.set_ylim(0, 4 * median_high(totals) if any(totals) else None)
    right.spines[["top"]].set_visible(False)
    curves = [*axes.get_legend_handles_labels()[0], *right.get_lines()]
    labels = [str(curve.get_label()) for curve in curves]
    axes.legend(curves, labels, frameon=False, fontsize=8, ncols=2, loc="upper center")


def draw_activity(axes: Axes, spans: Sequence[Line], summary: Mapping[str, Any]) -> None:
    """One row per role over a window in the middle of the run, with its busy share of the whole run."""
    from matplotlib.patches import Patch

    work = [span for span in spans if span["what"] in WORK_COLORS]
    if not work:
        axes.set_axis_off()
        return
    start, end = middle_window(work)
    order = {prefix: place for place, prefix in enumerate(ROLES)}
    roles = sorted({span["role"] for span in work}, key=lambda role: (order.get(role.split("-")[0], 9), role))
    for row, role in enumerate(roles):
        for what, color in WORK_COLORS.items():
            behind = what in BACKGROUND_WORK
            place = (row + 0.2, 0.18) if behind else (row - 0.38, 0.76)
            role_spans = [span for span in work if (span["role"], span["what"]) == (role, what)]
            bars = [(span["start"] - start, span["end"] - span["start"]) for span in role_spans]
            axes.broken_barh(bars, place, color=color, alpha=0.85, linewidth=0, zorder=1 + behind)
    _dress(axes, "Activity by role", f"{end - start:.0f} seconds from the middle of the run")
    axes.set_xlim(0, end - start)
    axes.set_ylim(len(roles) - 0.4, -0.6)
    axes.set_yticks(range(len(roles)), [_row_label(role, summary) for role in roles])
    axes.grid(visible=False, axis="y")
    used = {span["what"] for span in work}
    patches = [Patch(color=color, label=what) for what, color in WORK_COLORS.items() if what in used]
    style = {"frameon": False, "fontsize": 8, "loc": "lower right", "bbox_to_anchor": (1, 1)}
    axes.legend(handles=patches, ncols=len(patches), **style)


def _row_label(role: str, summary: Mapping[str, Any]) -> str:
    perf = summary.get("perf", {})
    idle, busy = (perf.get(what, {}).get(role) for what in ("idle_seconds", "busy_seconds"))
    if idle is None or busy is None:
        return role
    return f"{role}\nbusy {busy / max(1e-9, busy + idle):.0%}"


def middle_window(spans: Sequence[Line]) -> tuple[float, float]:
    """Start and end of WINDOW_SECONDS around the middle of the trainer's work (of all work without one)."""
    trained = [span for span in spans if span["what"] == "train"] or list(spans)
    start, end = min(s["start"] for s in trained), max(s["end"] for s in trained)
    length = min(WINDOW_SECONDS, max(end - start, 1e-3))
    left = (start + end - length) / 2
    return left, left + length


def _dress(axes: Axes, title: str, x_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x_label, color=FAINT)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=FAINT)
