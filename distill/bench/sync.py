"""All parts of `distill bench sync`, one after the other; what is finished is kept in the folder.

    codec       bytes and speed of every format on a real trajectory          toy, large
    transports  publish and stage through every store                         toy, large
    swaps       pause, apply and lost engine time of a real replica           toy, large
    whole_run   what all of it costs a run that trains                        toy

`large` has 101 M parameters and comes with `full`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distill.bench import plot, runs, sync_codec, sync_replica, sync_stores
from distill.bench.runner import Figures, TrialCache, markdown
from distill.bench.sync_codec import EFFORTS, FORMATS
from sync.errors import ConfigError, DistillError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WHOLE_RUN_STEPS: Final = 80
SETTLED: Final = 20
"""Steps of the whole run that are left out: the first ones pay for warming up."""
PARTS: Final[dict[str, Callable[[bool, Path], Figures]]] = {
    "codec": lambda full, _: sync_codec.run(full),
    "transports": sync_stores.run,
    "swaps": sync_replica.run,
    "whole_run": lambda _, folder: whole_run(folder),
}


def run(
    folder: Path = Path("runs/bench-sync"), *, full: bool = False, only: Sequence[str] = ()
) -> dict[str, Figures]:
    """Size → part → figures, of what is missing in `folder` and what was kept; draws sync.png there.

    `only`: names of parts; empty: all. Raises ConfigError for another name, DistillError when an engine
    fails.
    """
    if unknown := set(only) - set(PARTS):
        raise ConfigError(f"--only names {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    cache, figures = TrialCache(folder / "trials.jsonl", sync_codec.__file__, sync_stores.__file__), {}
    for size in ("toy", "large") if full else ("toy",):
        figures[size] = {
            name: cache.get({"size": size, "part": name}, lambda: part(size == "large", folder))  # noqa: B023
            for name, part in PARTS.items()
            if (not only or name in only) and (size, name) != ("large", "whole_run")
        }
    draw(figures, folder / "sync.png")
    return figures


def whole_run(folder: Path, steps: int = WHOLE_RUN_STEPS) -> Figures:
    """What syncing costs a quickstart of `steps` steps. Raises DistillError when it fails."""
    settings = [f"evaluation.every={steps}", "evaluation.prompts=64"]
    runs.run_quickstart(folder, "quickstart", 0, steps, settings)
    return figures_of_run(folder / "quickstart")


def figures_of_run(run_dir: Path, settled: int = SETTLED) -> Figures:
    """From a finished run's own files. Raises DistillError when it has too few steps for medians."""
    steps = runs.step_lines(run_dir)[settled:]
    if len(steps) < 3:
        raise DistillError(f"{run_dir} has {len(steps)} steps after the first {settled}: run more steps")
    sync = json.loads((run_dir / "summary.json").read_text())["sync"]
    seconds = steps[-1]["time"] - steps[0]["time"]
    blocked = [line["seconds/publish"] for line in steps]
    kept = ("pause_seconds", "apply_seconds", "stage_seconds", "publish_seconds", "bytes_full", "bytes_delta")
    return {
        "steps": len(steps),
        "step_seconds": seconds / (len(steps) - 1),
        "swaps_per_step": sync["updates"] / sync["versions"],
        "trainer_blocked_seconds": median(blocked),
        "trainer_blocked_share": sum(blocked[1:]) / seconds,
        **{name: sync[name] for name in kept},
    }


# --- goals ------------------------------------------------------------------------------------------------


class Goal(NamedTuple):
    """A limit, and the measured figure: met when it is not above."""

    text: str
    limit: float
    reached: float


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    """Every goal whose figures are there."""
    toy = figures.get("toy", {})
    swaps, whole = toy.get("swaps"), toy.get("whole_run")
    if swaps:
        limit, pause = swaps["decode_step_seconds"] + 0.05, swaps["swaps"]["delta"]["pause_seconds"]
        yield Goal("pause of a delta, seconds (a decode step + 50 ms)", limit, pause)
    if swaps and whole:
        share = swaps["engine_seconds_per_swap"] / whole["step_seconds"]
        yield Goal("pause + recompute, share of engine time at one sync a step", 0.02, share)
    if whole:
        yield Goal("trainer time lost to publishing, share", 0.02, whole["trainer_blocked_share"])


# --- tables -----------------------------------------------------------------------------------------------


def table(figures: Mapping[str, Figures]) -> str:
    """Everything that was measured, one section per part and size, and the goals."""
    lines: list[str] = []
    for size, parts in figures.items():
        for name, section in _SECTIONS.items():
            if name in parts:
                lines += [*section(size, parts), ""]
    rows = [
        [one.text, f"≤ {one.limit:.3g}", f"{one.reached:.3g}", "yes" if one.reached <= one.limit else "no"]
        for one in goals(figures)
    ]
    return "\n".join([*lines, "### Goals, toy", "", *markdown(["goal", "limit", "reached", "met"], rows)])


def _codec(size: str, parts: Figures) -> list[str]:
    codec, columns = parts["codec"], (*FORMATS, *EFFORTS, "entropy")
    rows = []
    for row in codec["rows"]:
        sizes = row["bytes_per_parameter"]
        cells = [f"{row['lr']:.0e}, {row['steps']}", f"{row['changed']:.2%}", f"{row['by_one']:.0%}"]
        cells += [f"{sizes[name]:.3g}" for name in columns]
        rows.append(
            [*cells, *(f"{sizes['small'] / sizes[other]:.2f}" for other in ("PULSE-style", "entropy"))]
        )
    ways = [(effort, way) for effort in EFFORTS for way in ("encode", "decode")]
    speeds = [
        [f"{speed['density']:.0%}", _rate(speed["encode"]["compare"])]
        + [_rate(speed[way][effort]) for effort, way in ways]
        for speed in codec["speeds"]
    ]
    head = ["lr, steps", "changed", "by one ULP", *columns, "small / PULSE", "small / entropy"]
    return [
        f"### Codec, {size}: bytes per parameter, {codec['parameters']:,} parameters (dense bf16: 2)",
        "",
        *markdown(head, rows),
        "",
        "GB/s of dense bf16 on one core, median by wall (by CPU time)",
        "",
        *markdown(["changed", "compare", *(" ".join(one) for one in ways)], speeds),
    ]


def _rate(rate: Mapping[str, float]) -> str:
    return f"{rate['wall']:.2f} ({rate['cpu']:.2f})"


def _transports(size: str, parts: Figures) -> list[str]:
    """Pause and apply are the replica's: they read its mirror, whatever the store."""
    swaps = parts.get("swaps", {}).get("swaps", {})
    rows = []
    for one in parts["transports"]["transports"]:
        swap = swaps.get(one["kind"])
        last = [_ms(swap["pause_seconds"]), _ms(swap["apply_seconds"])] if swap else ["–", "–"]
        seconds = [_ms(one["publish_seconds"]), _ms(one["stage_seconds"])]
        rows.append([one["store"], one["kind"], f"{one['bytes']:,.0f}", *seconds, *last])
    head = ["store", "kind", "bytes", "publish, ms", "stage, ms", "pause, ms", "of which apply, ms"]
    skipped = [f"{name} left out: {reason}" for name, reason in parts["transports"]["skipped"].items()]
    note = "Pause and apply are of a vLLM replica on the directory store: they read its mirror."
    title = f"### Transports, {size}: medians of one version"
    return [title, "", *markdown(head, rows), "", *([note] if swaps else []), *skipped]


def _swaps(size: str, parts: Figures) -> list[str]:
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
    return [title, "", *markdown(["what", "median"], rows)]


def _whole_run(size: str, parts: Figures) -> list[str]:
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
    return [f"### A whole run, {size}: {run['steps']} steps", "", *markdown(["what", "figure"], rows)]


_SECTIONS: Final = {"codec": _codec, "transports": _transports, "swaps": _swaps, "whole_run": _whole_run}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


# --- picture ----------------------------------------------------------------------------------------------

COLORS: Final = {
    **dict(zip(FORMATS, (plot.GREY, plot.OCHRE, plot.ORANGE, plot.PURPLE), strict=True)),
    "fast": plot.BLUE,
    "small": plot.GREEN,
    "entropy": plot.RED,
}


def draw(figures: Mapping[str, Figures], path: Path) -> None:
    """Write the picture of the largest size that was measured; parts that were not stay empty."""
    size, parts = list(figures.items())[-1]
    with plot.panels(path, 2, 8.4) as (sizes, frontier, transports, swaps):
        if "codec" in parts:
            _draw_sizes(sizes, parts["codec"]["rows"])
            _draw_frontier(frontier, parts["codec"]["rows"])
        if "transports" in parts:
            rows = {f"{one['store']}, {one['kind']}": one for one in parts["transports"]["transports"]}
            kinds = {"full": plot.GREY, "delta": plot.BLUE, "lora": plot.GREEN}
            colors = {name: kinds[one["kind"]] for name, one in rows.items()}
            seconds = {name: (one["publish_seconds"], one["stage_seconds"]) for name, one in rows.items()}
            _draw_ms(transports, seconds, colors)
        if "swaps" in parts:
            _draw_swaps(swaps, parts["swaps"])
        plot.dress(sizes, "Bytes per parameter, one step apart", "learning rate")
        plot.dress(frontier, "Bytes against speed (lr 1e-6; ○ one step, □ eight)", "bytes per parameter")
        plot.dress(transports, f"Publish, then stage, {size}", "milliseconds, median")
        plot.dress(swaps, f"Pause at a swap, {size}", "milliseconds, median")


def _draw_sizes(axes: Axes, rows: Sequence[Figures]) -> None:
    one = [row for row in rows if row["steps"] == min(row["steps"] for row in rows)]
    for name, color in COLORS.items():
        values = [row["bytes_per_parameter"][name] for row in one]
        line = "--" if name == "entropy" else "-"
        axes.plot([row["lr"] for row in one], values, line, color=color, linewidth=1.8, label=name)
    plot.target_line(axes, 2.0, "dense bf16")
    axes.set_xscale("log")
    axes.set_yscale("log")
    plot.legend(axes, loc="lower right", ncols=2)


def _draw_frontier(axes: Axes, rows: Sequence[Figures]) -> None:
    """Encoding by CPU time, at the lowest learning rate; the bound is a line."""
    for row in (row for row in rows if row["lr"] == min(row["lr"] for row in rows)):
        for name, color in COLORS.items():
            x = row["bytes_per_parameter"][name]
            if name == "entropy":
                axes.axvline(x, color=color, linewidth=0.8, linestyle="--")
                continue
            at = x, row["encode"][name]["cpu"]
            axes.plot(*at, "o" if row["steps"] == 1 else "s", color=color, markersize=7)
            axes.annotate(name, at, xytext=(6, 3), textcoords="offset points", fontsize=8, color=color)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("encoding, GB/s of dense bf16 a core", color=plot.FAINT)
    axes.margins(x=0.2)


def _draw_swaps(axes: Axes, swaps: Figures) -> None:
    """Loading dark, the rest of the pause light; vLLM's own reload beside them."""
    seconds: dict[str, Sequence[float]] = {
        kind: (swap["apply_seconds"], swap["pause_seconds"] - swap["apply_seconds"])
        for kind, swap in swaps["swaps"].items()
    }
    colors = dict.fromkeys(seconds, plot.PURPLE) | {"vLLM's own\nfull reload": plot.GREY}
    if swaps["vllm_reload_seconds"] is not None:
        seconds["vLLM's own\nfull reload"] = (swaps["vllm_reload_seconds"],)
    _draw_ms(axes, seconds, colors)
    axes.axvline(1e3 * swaps["decode_step_seconds"], color=plot.RED, linewidth=0.8, linestyle="--")


def _draw_ms(axes: Axes, seconds: Mapping[str, Sequence[float]], colors: Mapping[str, str]) -> None:
    widths: dict[str, Any] = {name: [1e3 * one for one in parts] for name, parts in seconds.items()}
    plot.bars(axes, widths, colors)
