"""report.html: one run, or several side by side, in one file that needs nothing else; readable on a phone."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from distill.metrics.plot import compare, draw
from distill.metrics.results import Run, read_run
from distill.metrics.samples import Decoder, Sample, figures, read_samples, shaded
from distill.metrics.summary import longest_waits, use_of_tokens
from sync.base.errors import ConfigError

STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933 }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem } img { width: 100%; min-width: 50rem; height: auto }
.wide { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .25rem .75rem; text-align: right }
td:first-child, th:first-child { text-align: left; padding-left: 0 } tr { border-bottom: 1px solid #e4e7eb }
.sample { border-left: 3px solid #e4e7eb; padding-left: 1rem; margin: 1rem 0; overflow-wrap: anywhere }
.prompt, .figures { color: #7b8794; white-space: pre-wrap } .tokens { white-space: pre-wrap }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem }
"""
REPORT: Final = "report.html"
MOST_SAMPLES: Final = 3
"""Of the first and of the newest batch with samples."""


def write_page(folders: Sequence[Path], target: Path) -> Path:
    """Write the page of these runs, and report.png of a single one. Raises DataError for another folder."""
    runs = [read_run(folder) for folder in folders]
    title = " · ".join(run.folder.name for run in runs)
    if len(runs) == 1:
        picture = _image(draw(runs[0]).read_bytes(), "Quality, staleness and activity")
    else:
        picture = _image(compare(runs), "Reverse KL and pass rate of every run")
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table("", [run.folder.name for run in runs], _rows(runs)),
        picture,
        *(part for run in runs for part in _details(run, len(runs) > 1)),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}'
    body = "\n".join(parts)
    target.write_text(
        f"<!doctype html><html lang=en><head>{head}</title><style>{STYLE}</style></head><body>{body}</body>\n"
    )
    return target


# --- figures ----------------------------------------------------------------------------------------------


ROWS: Final = (
    ("steps", "steps", ","),
    ("reverse KL before, nats per token", "before.reverse_kl", ".3f"),
    ("reverse KL after", "after.reverse_kl", ".3f"),
    ("pass rate before", "before.pass_rate", ".1%"),
    ("pass rate after", "after.pass_rate", ".1%"),
    ("reward before", "before.reward", ".3f"),
    ("reward after", "after.reward", ".3f"),
    ("completions that end, before", "before.behaviour.ended", ".1%"),
    ("completions that end, after", "after.behaviour.ended", ".1%"),
    ("tokens trained on", "train.tokens_total", ","),
    ("seconds", "seconds.distill", ",.0f"),
    ("mean age, versions", "buffer.age_mean", ".2f"),
    ("bytes of a delta", "sync.bytes_delta", ",.0f"),
    ("pause of a swap, seconds", "sync.pause_seconds", ".3f"),
)
"""Title, place in summary.json, form. A row without any figure is left out."""
SETS: Final = (
    ("pass@1", "pass_at_1.value", ".1%"),
    ("avg@k", "average.value", ".3f"),
    ("maj@k", "majority.value", ".1%"),
)
"""Title, figure of a named set, form."""
HELD_OUT: Final = (
    ("reverse KL", "reverse_kl", ".3f"),
    ("pass rate", "pass_rate", ".1%"),
    ("reward", "reward", ".3f"),
)
"""Title, figure of an evaluation, form."""
BEHAVIOUR: Final = (
    ("end", "behaviour.ended", ".1%"),
    ("tokens, mean", "behaviour.length_mean", ".1f"),
    ("tokens, 90th percentile", "behaviour.length_p90", ".0f"),
    ("repeat themselves", "behaviour.looping", ".1%"),
    ("distinct runs of four", "behaviour.distinct", ".1%"),
)
"""The same, of how held-out completions read."""


def _rows(runs: Sequence[Run]) -> Iterator[tuple[str, list[str]]]:
    for title, place, form in ROWS:
        values = [_at(run.summary, place) for run in runs]
        if any(value is not None for value in values):
            yield title, [_form(value, form) for value in values]


def _at(summary: Any, place: str) -> Any:
    """The value at a path of keys; None: this run does not show it."""
    for key in place.split("."):
        summary = (summary or {}).get(key)
    return summary


def _form(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _details(run: Run, named: bool) -> Iterable[str]:
    if named:
        yield f"<h2>{escape(run.folder.name)}</h2>"
    if run.summary:
        yield from (
            f"<p><strong>{escape(warning)}</strong></p>" for warning in run.summary.get("warnings", [])
        )
        yield f"<p>{escape(use_of_tokens(run.summary))}<br>waited: {escape(longest_waits(run.summary))}</p>"
        busy, idle = run.summary["perf"]["busy_seconds"], run.summary["perf"]["idle_seconds"]
        shares = [(role, [f"{busy[role] / max(1e-9, busy[role] + idle[role]):.0%}"]) for role in sorted(busy)]
        yield _table("Roles", ["busy"], shares)
        yield _table("Evaluations", [title for title, _, _ in (*HELD_OUT, *BEHAVIOUR)], _evaluations(run))
        yield _table("Named sets", [title for title, _, _ in SETS], _sets(run))
        for kind in ("sources", "teachers"):
            yield _table(f"Held out, by {kind[:-1]}", [title for title, _, _ in HELD_OUT], _parts(run, kind))
    yield from _samples(run)
    yield _fold("Configuration", _text(run.folder / "config.json"))
    yield _fold("Versions", json.dumps(run.summary.get("versions", {}), indent=1))


def _evaluations(run: Run) -> list[tuple[str, list[str]]]:
    evaluations = run.summary.get("evaluations") or []
    return [
        (
            evaluation["version"],
            [_form(_at(evaluation, key), form) for _, key, form in (*HELD_OUT, *BEHAVIOUR)],
        )
        for evaluation in evaluations
    ]


def _held_out(*reports: Any) -> list[str]:
    """Cells of HELD_OUT, of one report or of several after each other."""
    return [" → ".join(_form(_at(report, key), form) for report in reports) for _, key, form in HELD_OUT]


def _sets(run: Run) -> Iterator[tuple[str, list[str]]]:
    """A row for each named set and each version that it was measured at."""
    reports = run.summary.get("evaluations") or []
    for name in dict.fromkeys(name for report in reports for name in report.get("sets") or {}):
        for report in reports:
            if report_set := (report.get("sets") or {}).get(name):
                yield (
                    f"{name}, {report['version']}",
                    [_form(_at(report_set, key), form) for _, key, form in SETS],
                )


def _parts(run: Run, kind: str) -> list[tuple[str, list[str]]]:
    """The figures before and after the run by data source or teacher, where there are several."""
    before, after = run.summary.get("before") or {}, run.summary.get("after") or {}
    early, late = (report.get(kind) or {} for report in (before, after))
    return [(name, _held_out(early.get(name), late.get(name))) for name in late or early]


def _samples(run: Run) -> Iterable[str]:
    """Of the first and of the newest batch that has samples."""
    if not (samples := read_samples(run.folder)):
        return
    try:
        decoder = Decoder(run.folder)
    except ConfigError as error:
        yield f"<p>samples cannot be shown as text: {escape(str(error))}</p>"
        return
    yield "<h2>Samples</h2><p>A token is shaded by log μ − log q: what the teacher finds unlikely.</p>"
    for version in dict.fromkeys([samples[0].version, samples[-1].version]):
        for sample in [shown for shown in samples if shown.version == version][:MOST_SAMPLES]:
            yield _sample(sample, decoder)


def _sample(sample: Sample, decoder: Decoder) -> str:
    head = escape(f"{sample.version}  {sample.id}  {figures(sample)}")
    prompt, tokens = escape(decoder.text(sample.prompt)), shaded(sample, decoder)
    blocks = {"figures": head, "prompt": prompt, "tokens": tokens}
    inner = "".join(f"<div class={name}>{text}</div>" for name, text in blocks.items())
    return f"<div class=sample>{inner}</div>"


# --- pieces of a page -------------------------------------------------------------------------------------


def _table(title: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line((name, *cells), "td") for name, cells in rows)
    return f"<div class=wide><table>{line((title, *columns), 'th')}{body}</table></div>" if body else ""


def _fold(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _image(png: bytes, what: str) -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<div class=wide><img alt="{escape(what)}" src="{source}"></div>'
