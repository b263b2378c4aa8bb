"""The figures of `distill bench sync` as Markdown tables, and the goals that they are held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from distill.bench.sync.formats import FORMATS

Figures = Mapping[str, Mapping[str, Any]]
MODES: Final = ("fast", "small")
_COLUMNS: Final = (*FORMATS, *MODES, "entropy")


class Goal(NamedTuple):
    """What was asked for, and what was measured."""

    text: str
    limit: float
    reached: float
    at_least: bool = False
    """The figure may not be below the limit; else not above."""

    @property
    def met(self) -> bool:
        """Whether the figure is on the right side of the limit."""
        return self.reached >= self.limit if self.at_least else self.reached <= self.limit


def table(figures: Figures) -> str:
    """Everything that was measured, one section per part and size, and the goals."""
    lines: list[str] = []
    for size, parts in figures.items():
        for name, section in _SECTIONS.items():
            if name in parts:
                lines += [*section(size, parts), ""]
    return "\n".join([*lines, *_goals(goals(figures))])


def goals(figures: Figures) -> list[Goal]:
    """Every goal whose figures are there."""
    found: list[Goal] = []
    for size, parts in figures.items():
        found += _codec_goals(size, parts["codec"]) if "codec" in parts else []
    toy = figures.get("toy", {})
    if "swaps" in toy:
        swaps = toy["swaps"]
        limit = swaps["decode_step_seconds"] + 0.05
        pause = swaps["swaps"]["delta"]["pause_seconds"]
        found.append(Goal("toy: pause of a delta, seconds (a decode step + 50 ms)", limit, pause))
    if "swaps" in toy and "whole_run" in toy:
        share = toy["swaps"]["engine_seconds_per_swap"] / toy["whole_run"]["step_seconds"]
        found.append(Goal("toy: pause + recompute, share of engine time at one sync a step", 0.02, share))
    if "whole_run" in toy:
        blocked = toy["whole_run"]["trainer_blocked_share"]
        found.append(Goal("toy: trainer time lost to publishing, share", 0.02, blocked))
    return found


def _codec_goals(size: str, codec: Mapping[str, Any]) -> Iterator[Goal]:
    for row in codec["rows"]:
        sizes = row["bytes_per_parameter"]
        if row["lr"] < 5e-6 and row["steps"] == 1:
            ratio = sizes["small"] / sizes["PULSE-style"]
            yield Goal(f"{size}: small / PULSE-style at lr {row['lr']:.0e}, one step", 0.30, ratio)
    rows = [row["bytes_per_parameter"] for row in codec["rows"]]
    yield Goal(f"{size}: small / entropy, worst row", 1.25, max(r["small"] / r["entropy"] for r in rows))
    yield Goal(f"{size}: bytes a parameter, worst row", 2.0, max(max(r[m] for m in MODES) for r in rows))
    for speed in codec["speeds"]:
        if speed["density"] > 0.1:
            continue
        limit = 4.0 if speed["density"] < 0.05 else 1.0
        for way in ("encode", "decode"):
            reached = speed[way]["fast"]["cpu"]
            yield Goal(
                f"{size}: fast {way}, GB/s per core at {speed['density']:.0%}", limit, reached, at_least=True
            )


def _goals(found: Sequence[Goal]) -> list[str]:
    rows = [
        [goal.text, f"{'≥' if goal.at_least else '≤'} {goal.limit:.3g}", f"{goal.reached:.3g}", _word(goal)]
        for goal in found
    ]
    return ["### Goals", "", *_markdown(["goal", "limit", "reached", "met"], rows)]


def _word(goal: Goal) -> str:
    return "yes" if goal.met else "no"


def _codec(size: str, parts: Mapping[str, Any]) -> list[str]:
    codec = parts["codec"]
    rows = []
    for row in codec["rows"]:
        sizes = row["bytes_per_parameter"]
        ratios = [f"{sizes['small'] / sizes[other]:.2f}" for other in ("PULSE-style", "entropy")]
        cells = [f"{sizes[name]:.3g}" for name in _COLUMNS]
        changed = [f"{row['changed']:.2%}", f"{row['by_one']:.0%}"]
        rows.append([f"{row['lr']:.0e}, {row['steps']}", *changed, *cells, *ratios])
    speeds = []
    for speed in codec["speeds"]:
        cells = [f"{speed['density']:.0%}", _rate(speed["encode"]["compare"])]
        for mode in MODES:
            cells += [_rate(speed["encode"][mode]), _rate(speed["decode"][mode])]
        speeds.append(cells)
    head = ["changed", "compare", *(f"{mode} {way}" for mode in MODES for way in ("encode", "decode"))]
    return [
        f"### Codec, {size}: bytes per parameter, {codec['parameters']:,} parameters (dense bf16: 2)",
        "",
        *_markdown(
            ["lr, steps", "changed", "by one ULP", *_COLUMNS, "small / PULSE", "small / entropy"], rows
        ),
        "",
        "GB/s of dense bf16 on one core, median by wall (by CPU time)",
        "",
        *_markdown(head, speeds),
    ]


def _rate(rate: Mapping[str, float]) -> str:
    return f"{rate['wall']:.2f} ({rate['cpu']:.2f})"


def _roads(size: str, parts: Mapping[str, Any]) -> list[str]:
    """Pause and apply are the replica's: they read its mirror, whatever the store."""
    swaps = parts.get("swaps", {}).get("swaps", {})
    rows = []
    for transport in parts["roads"]["roads"]:
        swap = swaps.get(transport["kind"])
        last = ["–", "–"] if swap is None else [_ms(swap["pause_seconds"]), _ms(swap["apply_seconds"])]
        seconds = [_ms(transport["publish_seconds"]), _ms(transport["stage_seconds"])]
        rows.append([transport["store"], transport["kind"], f"{transport['bytes']:,.0f}", *seconds, *last])
    head = ["store", "kind", "bytes", "publish, ms", "stage, ms", "pause, ms", "of which apply, ms"]
    skipped = [f"{name} left out: {reason}" for name, reason in parts["roads"]["skipped"].items()]
    lines = [f"### Roads, {size}: medians of one version", "", *_markdown(head, rows)]
    note = (
        "Pause and apply are of a vLLM replica on the directory store: they read its mirror, not the store."
    )
    return [*lines, "", *([note] if swaps else []), *skipped]


def _swaps(size: str, parts: Mapping[str, Any]) -> list[str]:
    swaps = parts["swaps"]
    reload = swaps["vllm_reload_seconds"]
    rows = [
        ["decode step, ms", _ms(swaps["decode_step_seconds"])],
        ["tokens a second, no swaps", f"{swaps['tokens_per_second']:,.0f}"],
        ["engine time that a swap of a delta costs in all, ms", _ms(swaps["engine_seconds_per_swap"])],
        ["plain full reload by vLLM itself, ms", "failed" if reload is None else _ms(reload)],
    ]
    for kind, swap in swaps["swaps"].items():
        cells = [_ms(swap[f"{name}_seconds"]) for name in ("stage", "pause", "apply")]
        rows.append([f"{kind}: stage, pause, apply in the replica, ms", ", ".join(cells)])
    title = f"### Swaps, {size}: {swaps['in_flight']} completions of 12 tokens in flight"
    return [title, "", *_markdown(["what", "median"], rows)]


def _whole_run(size: str, parts: Mapping[str, Any]) -> list[str]:
    run = parts["whole_run"]
    paused = run["pause_seconds"] * run["swaps_per_step"] / run["step_seconds"]
    rows = [
        ["step, ms", _ms(run["step_seconds"])],
        ["pause at a swap, of which apply, ms", f"{_ms(run['pause_seconds'])}, {_ms(run['apply_seconds'])}"],
        ["pause alone, share of a step", f"{paused:.1%}"],
        ["swaps a published version", f"{run['swaps_per_step']:.2f}"],
        ["publishing in the background, ms a version", _ms(run["publish_seconds"])],
        ["trainer blocked by it, ms a step (median)", _ms(run["trainer_blocked_seconds"])],
        ["trainer blocked by it, share of time", f"{run['trainer_blocked_share']:.2%}"],
    ]
    return [f"### A whole run, {size}: {run['steps']} steps", "", *_markdown(["what", "figure"], rows)]


_SECTIONS: Final = {"codec": _codec, "roads": _roads, "swaps": _swaps, "whole_run": _whole_run}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
