"""report.html and report.png: one run, or several side by side, in one file that needs nothing else.

metrics.jsonl, timeline.jsonl, summary.json ─▶ report.png ─┐
config.json, samples.jsonl ────────────────────────────────┴▶ report.html, readable on a phone
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any, Final

from distill.config.evaluation import HELD_OUT as EVERY_RUN
from distill.evaluation.completions import TEACHER, file_of
from distill.metrics.card import facts
from distill.metrics.names import BEHAVIOUR, HELD_OUT, SETS
from distill.metrics.results import Row, Run, read_run
from distill.metrics.samples import decoder, figures, read_samples, shaded
from distill.metrics.summary import before_and_after, longest_waits, use_of_tokens
from distill.metrics.timeline import Span
from sync.base.errors import ConfigError
from sync.base.jsonl import read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933 }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem } img { width: 100%; min-width: 50rem; height: auto }
.wide { overflow-x: auto; margin: 1.5rem 0 } table { border-collapse: collapse }
td, th { padding: .25rem .75rem; text-align: right }
td:first-child, th:first-child { text-align: left; padding-left: 0 } tr { border-bottom: 1px solid #e4e7eb }
.sample { border-left: 3px solid #e4e7eb; padding-left: 1rem; margin: 1rem 0; overflow-wrap: anywhere }
.texts td, .texts th { text-align: left; vertical-align: top; white-space: pre-wrap; min-width: 14rem }
.prompt, .figures { color: #7b8794; white-space: pre-wrap } .tokens { white-space: pre-wrap }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem }
"""
REPORT: Final = "report.html"
MOST_SAMPLES: Final = 3
"""Of the first and of the newest batch with samples, and of the held-out prompts."""
ROWS: Final = (
    ("steps", "steps", ","),
    *(
        (f"{title}: {side}", f"{side}.{key}", form)
        for title, key, form in (*HELD_OUT, ("completions that end", *BEHAVIOUR[0][1:]))
        for side in ("before", "after")
    ),
    ("tokens trained on", "train.tokens_total", ","),
    ("seconds, of all starts", "seconds.distill", ",.0f"),
    ("mean age, versions", "buffer.age_mean", ".2f"),
    ("bytes of a delta", "sync.bytes_delta", ",.0f"),
    ("pause of a swap, seconds", "sync.pause_seconds", ".3f"),
)
"""Title, place in summary.json, form. A row without any figure is left out."""
SIDES: Final = ("before", "after", "teacher")


def write_page(folders: Sequence[Path], target: Path) -> Path:
    """Write the page of these runs, and report.png of a single one. Raises DataError for another folder."""
    runs = [read_run(folder) for folder in folders]
    title = " · ".join(run.folder.name for run in runs)
    if len(runs) == 1:
        picture = _image(draw(runs[0]).read_bytes(), "Quality, staleness and activity")
    else:
        picture = _image(compare(runs), "Reverse KL and pass rate of every run")
    cells = [(name, [_form(_at(run.summary, place), form) for run in runs]) for name, place, form in ROWS]
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table("", [run.folder.name for run in runs], [row for row in cells if {*row[1]} != {"–"}]),
        picture,
        *(part for run in runs for part in _details(run, len(runs) > 1)),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}'
    body = "\n".join(parts)
    target.write_text(
        f"<!doctype html><html lang=en><head>{head}</title><style>{STYLE}</style></head><body>{body}</body>\n"
    )
    return target


# --- parts of the page ------------------------------------------------------------------------------------


def _details(run: Run, named: bool) -> Iterator[str]:
    if named:
        yield f"<h2>{escape(run.folder.name)}</h2>"
    summary = run.summary
    try:
        told = facts(run.config, summary, summary.get("version"))
        yield _table("Made of", [""], [(name, [value]) for name, value in told])
    except ConfigError as error:
        yield f"<p>what it was made of is not shown: {escape(str(error))}</p>"
    if summary:
        yield from (f"<p><strong>{escape(warning)}</strong></p>" for warning in summary.get("warnings", []))
        yield f"<p>{escape(use_of_tokens(summary))}<br>waited: {escape(longest_waits(summary))}</p>"
        busy, idle = summary["perf"]["busy_seconds"], summary["perf"]["idle_seconds"]
        shares = [(role, [f"{busy[role] / max(1e-9, busy[role] + idle[role]):.0%}"]) for role in sorted(busy)]
        yield _table("Roles", ["busy, of all starts"], shares)
        columns, reports = (*HELD_OUT, *BEHAVIOUR), run.evaluations
        yield _table(
            "Evaluations", columns, [(report["version"], _cells(columns, report)) for report in reports]
        )
        names = dict.fromkeys(name for report in reports for name in report.get("sets") or {})
        of_set = [(title, f"{figure}.value", form) for title, figure, form in SETS]
        sets = [
            (f"{name}, {report['version']}", _cells(of_set, report["sets"][name]))
            for name in names
            for report in reports
            if (report.get("sets") or {}).get(name)
        ]
        yield _table("Named sets", of_set, sets)
        for kind in ("sources", "teachers"):
            early, late = ((summary.get(side) or {}).get(kind) or {} for side in ("before", "after"))
            parts = [(name, _cells(HELD_OUT, early.get(name), late.get(name))) for name in late or early]
            yield _table(f"Held out, by {kind[:-1]}", HELD_OUT, parts)
        yield from _beside_the_teacher(run)
    yield from _samples(run)
    config = run.folder / "config.json"
    yield _fold("Configuration", config.read_text() if config.is_file() else "")
    yield _fold("Versions", json.dumps(summary.get("versions", {}), indent=1))


def _beside_the_teacher(run: Run) -> Iterator[str]:
    """How held-out completions read before and after, and the teacher's; then some of them."""
    before, after = (run.summary.get(side) or {} for side in ("before", "after"))
    reference = after.get("reference") or before.get("reference")
    if before.get("behaviour") is None and after.get("behaviour") is None:
        return
    sides = (before, after, {"behaviour": reference})
    rows = [(title, [_form(_at(side, place), form) for side in sides]) for title, place, form in BEHAVIOUR]
    yield _table("Held-out completions", SIDES, rows)
    if reference is None and (after or before).get("reverse_kl", 0.0) is not None:
        yield (
            "<p>Completions of the teacher are not beside them: it generates none (engine vllm without "
            "generate_url), is another for other steps or prompts, or the prompts are an environment's.</p>"
        )
    texts = []
    for version in (before.get("version"), after.get("version"), TEACHER):
        lines = read_lines(file_of(run.folder, version, EVERY_RUN), dict[str, Any]) if version else []
        texts.append({line["index"]: line for line in lines if "completion" in line})
    shown = list(texts[1] or texts[0])[:MOST_SAMPLES]
    prompts = [(texts[1] or texts[0])[index]["prompt"] for index in shown]
    cells = [[of_side.get(index, {}).get("completion", "–") for of_side in texts] for index in shown]
    yield f"<div class=texts>{_table('Held-out prompt', SIDES, list(zip(prompts, cells, strict=True)))}</div>"


def _cells(columns: Sequence[tuple[str, str, str]], *reports: Any) -> list[str]:
    """A cell for each column: the figure of one report, or of several after each other."""
    return [" → ".join(_form(_at(report, place), form) for report in reports) for _, place, form in columns]


def _at(figures: Any, place: str) -> Any:
    """The value at a path of keys; None: it is not shown."""
    for key in place.split("."):
        figures = (figures or {}).get(key)
    return figures


def _form(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _samples(run: Run) -> Iterable[str]:
    """Of the first and of the newest batch that has samples."""
    if not (samples := read_samples(run.folder)):
        return
    try:
        decode = decoder(run.folder)
    except ConfigError as error:
        yield f"<p>samples cannot be shown as text: {escape(str(error))}</p>"
        return
    taught = any(sample.teacher_logprob is not None for sample in samples)
    shades = "<p>A token is shaded by log μ − log q: what the teacher finds unlikely.</p>" * taught
    yield f"<h2>Samples</h2>{shades}"
    for version in dict.fromkeys([samples[0].version, samples[-1].version]):
        for sample in [shown for shown in samples if shown.version == version][:MOST_SAMPLES]:
            head = escape(f"{sample.version}  {sample.id}  {figures(sample)}")
            prompt, tokens = escape(decode(sample.prompt)), shaded(sample, decode)
            blocks = {"figures": head, "prompt": prompt, "tokens": tokens}
            inner = "".join(f"<div class={name}>{text}</div>" for name, text in blocks.items())
            yield f"<div class=sample>{inner}</div>"


def _table(
    title: str, columns: Iterable[str | tuple[str, str, str]], rows: Iterable[tuple[str, Sequence[str]]]
) -> str:
    """A table with its rows' names at the left; "" without a row. A column is, or begins with, its title."""

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    titles = [column if isinstance(column, str) else column[0] for column in columns]
    body = "".join(line((name, *cells), "td") for name, cells in rows)
    return f"<div class=wide><table>{line((title, *titles), 'th')}{body}</table></div>" if body else ""


def _fold(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _image(png: bytes, what: str) -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<div class=wide><img alt="{escape(what)}" src="{source}"></div>'


# --- pictures ---------------------------------------------------------------------------------------------

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
TOKENS = "tokens trained on, thousands"


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
    rows = [f"{what} {early} → {late}" for what, early, late in before_and_after(summary)]
    known = ";  ".join(row for row in rows if "–" not in row)
    title = f"{run.folder.name}:  {known}" if known else run.folder.name
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold", color=INK)
    if "rollout" in summary:
        figure.supxlabel(use_of_tokens(summary), x=0.01, ha="left", fontsize=9, color=FAINT)
    path = run.folder / "report.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


def compare(runs: Sequence[Run]) -> bytes:
    """PNG of the held-out and the training reverse KL, and of the pass rate, of every run."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), dpi=130, layout="constrained")
    _dress(left, "Reverse KL on own completions", TOKENS, "nats per token")
    _dress(right, "Pass rate, held out", TOKENS, "share of completions")
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


def draw_quality(axes: Axes, lines: Sequence[Row]) -> None:
    """Reverse KL, without a teacher the reward, and pass rate over trained tokens: held-out prompts as dots,
    the training batches as a line."""
    what, unit, trained, held_out = "reverse KL", ", nats per token", "train/reverse_kl", "eval/reverse_kl"
    if not any(trained in line for line in lines) and any("train/reward_mean" in line for line in lines):
        what, unit, trained, held_out = "reward", "", "train/reward_mean", "eval/reward"
    _dress(axes, "Student on its own completions", TOKENS, f"{what}{unit}", BLUE)
    axes.plot(*_curve(lines, trained), color=BLUE, alpha=0.35, label=f"{what}, training batches")
    axes.plot(*_curve(lines, held_out), "o-", color=BLUE, label=f"{what}, held out")
    if what == "reverse KL":
        axes.set_ylim(bottom=0)
    curves, passed = axes.get_lines(), _curve(lines, "eval/pass_rate")
    if passed[0]:
        right = _right(axes, "pass rate, share of completions", GREEN)
        right.plot(*passed, "s-", color=GREEN, label="pass rate, held out")
        right.set_ylim(0, 1)
        curves = [*curves, *right.get_lines()]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}  # off the curves, wherever they end
    axes.legend(handles=curves, frameon=False, fontsize=8, ncols=3, **below)


def _curve(lines: Sequence[Row], figure: str) -> tuple[list[float], list[float]]:
    """A figure over thousands of trained tokens."""
    tokens_at = {
        line["step"]: line["train/tokens_total"] / 1e3 for line in lines if "train/tokens_total" in line
    }
    known = tokens_at.keys() | {0}  # an evaluation beyond is of steps that are being made anew
    points = [line for line in lines if figure in line and line["step"] in known]
    return [tokens_at.get(line["step"], 0.0) for line in points], [line[figure] for line in points]


def draw_cost(axes: Axes, lines: Sequence[Row]) -> None:
    """Mean and highest age of the rollouts of each step, and seconds that the trainer worked and waited."""
    _dress(
        axes,
        "Staleness of rollouts, and time of a step",
        "optimizer step",
        "age of rollouts, versions",
        ORANGE,
    )
    steps = [line for line in lines if "buffer/age_mean" in line and "buffer/age_max" in line]
    x, mean = [line["step"] for line in steps], [line["buffer/age_mean"] for line in steps]
    oldest = [line["buffer/age_max"] for line in steps]
    axes.fill_between(x, mean, oldest, color=ORANGE, alpha=0.2, linewidth=0, label="age, up to the oldest")
    axes.plot(x, mean, color=ORANGE, linewidth=1.2, label="age, mean")
    axes.set_ylim(0, 1.3 * max([1.0, *oldest]))
    right = _right(axes, "seconds a step", INK)
    wait = [line.get("perf/wait_seconds", 0.0) for line in steps]
    work = [line.get("perf/train_seconds", 0.0) + line.get("perf/publish_seconds", 0.0) for line in steps]
    right.plot(x, work, color=GREEN, linewidth=0.9, label="trainer works")
    right.plot(x, wait, color=GREY, linewidth=0.9, label="trainer waits")
    totals = [a + b for a, b in zip(wait, work, strict=True)]
    right.set_ylim(0, 4 * median_high(totals) if any(totals) else None)
    curves = [*axes.get_legend_handles_labels()[0], *right.get_lines()]
    axes.legend(handles=curves, frameon=False, fontsize=8, ncols=2, loc="upper center")


def draw_activity(axes: Axes, spans: Sequence[Row], summary: Mapping[str, Any]) -> None:
    """One row per role over a window in the middle of the run, with its busy share of the whole run."""
    from matplotlib.patches import Patch

    work = [span for span in spans if span["what"] in WORK_COLORS]
    if not work:
        axes.set_axis_off()
        return
    start, end = middle_window(work)
    order = {prefix: place for place, prefix in enumerate(ROLES)}
    roles = sorted({span["role"] for span in work}, key=lambda role: (order.get(role.split("-")[0], 9), role))
    labels, perf = [], summary.get("perf", {})
    for row, role in enumerate(roles):
        for what, color in WORK_COLORS.items():
            behind = what in BACKGROUND_WORK
            place = (row + 0.2, 0.18) if behind else (row - 0.38, 0.76)
            role_spans = [span for span in work if (span["role"], span["what"]) == (role, what)]
            bars = [(span["start"] - start, span["end"] - span["start"]) for span in role_spans]
            axes.broken_barh(bars, place, color=color, alpha=0.85, linewidth=0, zorder=1 + behind)
        idle, busy = (perf.get(what, {}).get(role) for what in ("idle_seconds", "busy_seconds"))
        known = idle is not None and busy is not None
        labels.append(f"{role}\nbusy {busy / max(1e-9, busy + idle):.0%}" if known else role)
    _dress(axes, "Activity by role", f"seconds, {end - start:.0f} of them from the middle of the run")
    axes.set_xlim(0, end - start)
    axes.set_ylim(len(roles) - 0.4, -0.6)
    axes.set_yticks(range(len(roles)), labels)
    axes.grid(visible=False, axis="y")
    used = {span["what"] for span in work}
    patches = [Patch(color=color, label=what) for what, color in WORK_COLORS.items() if what in used]
    style = {"frameon": False, "fontsize": 8, "loc": "lower right", "bbox_to_anchor": (1, 1)}
    axes.legend(handles=patches, ncols=len(patches), **style)


def middle_window(spans: Sequence[Row]) -> tuple[float, float]:
    """Start and end of WINDOW_SECONDS around the trainer's middle step (the middle span without one).

    A run that stood still between two starts is shown while it worked.
    """
    worked = [span for span in spans if span["what"] == "train"] or list(spans)
    first, last = min(span["start"] for span in worked), max(span["end"] for span in worked)
    length = min(WINDOW_SECONDS, max(last - first, 1e-3))
    middle = median_high((span["start"] + span["end"]) / 2 for span in worked)
    left = min(max(first, middle - length / 2), last - length)
    return left, left + length


def _right(axes: Axes, label: str, color: str) -> Axes:
    right = axes.twinx()
    right.set_ylabel(label, color=color)
    right.spines[["top"]].set_visible(False)
    return right


def _dress(axes: Axes, title: str, x_label: str, y_label: str = "", y_color: str = FAINT) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x_label, color=FAINT)
    axes.set_ylabel(y_label, color=y_color)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=FAINT)
