"""report.html: one run, or several side by side, in one file that needs nothing else; readable on a phone."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

from distill.metrics.plot import compare, draw
from distill.metrics.samples import Decoder, Sample, figures, read_samples, shaded
from distill.metrics.summary import longest_waits, use_of_tokens
from sync.errors import ConfigError, DataError
from sync.jsonl import read_lines

STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933 }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem } img { width: 100%; height: auto }
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


class Run(NamedTuple):
    """What a run's folder holds."""

    folder: Path
    summary: dict[str, Any]
    """Empty while the run goes on."""
    lines: list[dict[str, Any]]
    """Of metrics.jsonl, without figures that are null."""
    samples: list[Sample]


def read_run(folder: Path) -> Run:
    """Raises DataError for a folder without metrics."""
    lines = read_lines(folder / "metrics.jsonl")
    if not lines:
        raise DataError(f"{folder} holds no metrics.jsonl with figures: name the folder of a run")
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {}
    present = [{name: value for name, value in line.items() if value is not None} for line in lines]
    return Run(folder, summary, present, read_samples(folder))


def write_page(folders: Sequence[Path], target: Path) -> Path:
    """Write the page of these runs, and report.png of a single one. Raises DataError for another folder."""
    runs = [read_run(folder) for folder in folders]
    title = " · ".join(run.folder.name for run in runs)
    if len(runs) == 1:
        picture = _image(draw(folders[0]).read_bytes(), "Quality, staleness and activity")
    else:
        picture = _image(
            compare({run.folder.name: run.lines for run in runs}), "Reverse KL and pass rate of every run"
        )
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


def _rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    def each(figure: Callable[[dict[str, Any]], Any], form: str = "") -> list[str]:
        return [_form(_or_none(figure, run.summary), form) for run in runs]

    rows = [
        ("steps", each(lambda s: s["steps"])),
        ("reverse KL before, nats per token", each(lambda s: s["before"]["reverse_kl"], ".3f")),
        ("reverse KL after", each(lambda s: s["after"]["reverse_kl"], ".3f")),
        ("pass rate before", each(lambda s: s["before"]["pass_rate"], ".1%")),
        ("pass rate after", each(lambda s: s["after"]["pass_rate"], ".1%")),
        ("tokens trained on", each(lambda s: s["tokens"]["trained"], ",")),
        ("seconds", each(lambda s: s["seconds"]["distill"], ",.0f")),
        ("mean age, versions", each(lambda s: s["staleness"]["mean"], ".2f")),
        ("bytes of a delta", each(lambda s: s["sync"]["bytes_delta"], ",.0f")),
        ("pause of a swap, ms", each(lambda s: 1e3 * s["sync"]["pause_seconds"], ".0f")),
    ]
    return [(name, cells) for name, cells in rows if any(cell != "–" for cell in cells)]


def _or_none(figure: Callable[[dict[str, Any]], Any], summary: dict[str, Any]) -> Any:
    try:
        return figure(summary)
    except (KeyError, TypeError):  # not shown by this run
        return None


def _form(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _details(run: Run, named: bool) -> Iterable[str]:
    if named:
        yield f"<h2>{escape(run.folder.name)}</h2>"
    if run.summary:
        yield f"<p>{escape(use_of_tokens(run.summary))}<br>waited: {escape(longest_waits(run.summary))}</p>"
        busy, idle = run.summary["busy_seconds"], run.summary["idle_seconds"]
        shares = [(role, [f"{busy[role] / max(1e-9, busy[role] + idle[role]):.0%}"]) for role in sorted(busy)]
        yield _table("Roles", ["busy"], shares)
        yield _table("Evaluations", ["reverse KL", "pass rate"], _evaluations(run))
    yield from _samples(run)
    yield _fold("Configuration", _text(run.folder / "config.json"))
    yield _fold("Versions", json.dumps(run.summary.get("versions", {}), indent=1))


def _evaluations(run: Run) -> list[tuple[str, list[str]]]:
    found = run.summary.get("evaluations") or []
    return [
        (one["version"], [_form(one.get("reverse_kl"), ".3f"), _form(one.get("pass_rate"), ".1%")])
        for one in found
    ]


def _samples(run: Run) -> Iterable[str]:
    """Of the first and of the newest batch that has samples."""
    if not run.samples:
        return
    try:
        decoder = Decoder(run.folder)
    except ConfigError as error:
        yield f"<p>samples cannot be shown as text: {escape(str(error))}</p>"
        return
    yield "<h2>Samples</h2><p>A token is shaded by log μ − log q: what the teacher finds unlikely.</p>"
    versions = list(dict.fromkeys(one.version for one in run.samples))
    for version in dict.fromkeys([versions[0], versions[-1]]):
        for sample in [one for one in run.samples if one.version == version][:MOST_SAMPLES]:
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
    return f'<img alt="{escape(what)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
