"""All parts of `distill bench sync`, one after the other; what is finished is kept in the folder.

    codec       bytes and speed of every format on a real trajectory          toy, large
    transports  publish and stage through every store                         toy, large
    swaps       pause, apply and lost engine time of a real replica           toy, large
    whole_run   what all of it costs a run that trains                        toy

`large` has 101 M parameters and comes with `full`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from distill.bench import pipeline, sync_codec, sync_transports
from distill.bench.runner import COLORS, Figures, TrialCache, bar, dress, markdown, panels
from distill.bench.sync_codec import EFFORTS, FORMATS
from distill.metrics.plot import BLUE, GREEN, GREY, PURPLE

WHOLE_RUN_STEPS: Final = 80
SETTLED: Final = 20
"""Steps of the whole run that are left out: the first ones pay for warming up."""
PARTS: Final[dict[str, Callable[[bool, Path], Figures]]] = {
    "codec": lambda large, _: sync_codec.run(sync_codec.LARGE if large else sync_codec.SMALL),
    "transports": lambda large, folder: {"rows": sync_transports.run_stores(_shape(large), folder)},
    "swaps": lambda large, folder: sync_transports.run_swaps(_shape(large), folder),
    "whole_run": lambda _, folder: whole_run(folder),
}


def _shape(large: bool) -> sync_transports.Shape:
    return sync_transports.LARGE if large else sync_transports.TOY


def run(folder: Path, full: bool) -> dict[str, Figures]:
    """Size → part → figures, of what is missing in `folder` and what was kept; draws sync.png there.

    Raises DistillError when an engine or a store's server fails.
    """
    cache, figures = TrialCache(folder / "trials.jsonl"), {}
    for size in ("toy", "large") if full else ("toy",):
        large = size == "large"
        figures[size] = {
            name: cache.get({"size": size, "part": name}, lambda: part(large, folder))  # noqa: B023
            for name, part in PARTS.items()
            if (size, name) != ("large", "whole_run")
        }
    draw(figures[size], folder / "sync.png")
    return figures


def whole_run(folder: Path, steps: int = WHOLE_RUN_STEPS) -> Figures:
    """What syncing costs a quickstart of `steps` steps. Raises DistillError when it fails."""
    settings = [f"evaluation.every={steps}", "evaluation.prompts=64"]
    pipeline.run_quickstart(folder, "quickstart", 0, steps, settings)
    return figures_of_run(folder / "quickstart")


def figures_of_run(run_dir: Path, settled: int = SETTLED) -> Figures:
    """From a finished run's own files."""
    steps = pipeline.step_lines(run_dir)[settled:]
    summary = json.loads((run_dir / "summary.json").read_text())
    seconds = steps[-1]["time"] - steps[0]["time"]
    return {
        "steps": len(steps),
        "step_seconds": seconds / (len(steps) - 1),
        "trainer_blocked_share": sum(line["seconds/publish"] for line in steps[1:]) / seconds,
        "pause_seconds": summary["sync"]["pause_seconds"],
    }


# --- tables -----------------------------------------------------------------------------------------------


def table(figures: Mapping[str, Figures]) -> str:
    """Everything that was measured, one section per part and size, and the goals."""
    lines: list[str] = []
    for size, parts in figures.items():
        lines += _codec(size, parts["codec"]) + _transports(size, parts["transports"]["rows"])
        lines += _swaps(size, parts["swaps"])
    rows = [
        [text, f"≤ {limit:.3g}", f"{reached:.3g}", "yes" if reached <= limit else "no"]
        for text, limit, reached in goals(figures["toy"])
    ]
    whole = figures["toy"]["whole_run"]
    lines += [
        f"A run of {whole['steps']} steps of {_ms(whole['step_seconds'])} ms, with a version per step: "
        f"pause {_ms(whole['pause_seconds'])} ms"
    ]
    return "\n".join([*lines, "", *markdown(["goal", "limit", "reached", "met"], rows)])


def goals(toy: Figures) -> Iterator[tuple[str, float, float]]:
    """(goal, limit, reached): met when it is not above the limit."""
    swaps, whole = toy["swaps"], toy["whole_run"]
    limit, pause = swaps["decode_step_seconds"] + 0.05, swaps["swaps"]["delta"]["pause_seconds"]
    yield "pause of a delta, seconds (one decode step + 50 ms)", limit, pause
    share = swaps["engine_seconds_per_swap"] / whole["step_seconds"]
    yield "pause and recomputed KV cache, share of engine time at a version per step", 0.02, share
    yield "trainer's time lost to publishing, share", 0.02, whole["trainer_blocked_share"]


def _codec(size: str, codec: Figures) -> list[str]:
    columns, rows = (*FORMATS, *EFFORTS, "entropy"), []
    for row in codec["rows"]:
        sizes = row["bytes_per_parameter"]
        rows.append(
            [f"{row['lr']:.0e}, {row['steps']}", f"{row['changed']:.2%}"]
            + [f"{sizes[name]:.3g}" for name in columns]
            + [f"{sizes['small'] / sizes['PULSE-style']:.2f}"]
        )
    speeds = codec["speeds"]
    ways = [name for name in speeds[0] if name != "density"]
    cells = [[f"{speed['density']:.0%}", *(f"{speed[way]:.2f}" for way in ways)] for speed in speeds]
    return [
        f"### Codec, {size}: bytes per parameter, {codec['parameters']:,} parameters (dense bf16: 2)",
        "",
        *markdown(["lr, steps apart", "changed", *columns, "small / PULSE-style"], rows),
        "",
        "GB/s of dense bf16 on one core, medians",
        "",
        *markdown(["changed", *ways], cells),
        "",
    ]


def _transports(size: str, rows: list[Figures]) -> list[str]:
    cells = [
        [
            one["store"],
            one["kind"],
            f"{one['bytes']:,.0f}",
            _ms(one["publish_seconds"]),
            _ms(one["stage_seconds"]),
        ]
        for one in rows
    ]
    head = ["store", "kind", "bytes", "publish, ms", "stage, ms"]
    return [f"### Transports, {size}: medians of one version", "", *markdown(head, cells), ""]


def _swaps(size: str, swaps: Figures) -> list[str]:
    rows = [
        [f"{kind}: pause, of it loading", f"{_ms(swap['pause_seconds'])}, {_ms(swap['apply_seconds'])}"]
        for kind, swap in swaps["swaps"].items()
    ]
    rows += [
        ["decode step", _ms(swaps["decode_step_seconds"])],
        ["engine time that a delta costs in all", _ms(swaps["engine_seconds_per_swap"])],
        ["vLLM's own reload from disk", _ms(swaps["vllm_reload_seconds"])],
    ]
    title = f"### Swaps, {size}: {swaps['in_flight']} completions in flight; medians in ms"
    return [title, "", *markdown(["", "ms"], rows), ""]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


# --- picture ----------------------------------------------------------------------------------------------

KINDS: Final = {"full": GREY, "delta": BLUE, "lora": GREEN}


def draw(parts: Figures, path: Path) -> None:
    """Write the picture of one size."""
    with panels(path, 2, 8.4) as (sizes, speeds, transports, swaps):
        rows = [row for row in parts["codec"]["rows"] if row["steps"] == 1]
        for name, color in zip((*FORMATS, *EFFORTS, "entropy"), COLORS, strict=False):
            values = [row["bytes_per_parameter"][name] for row in rows]
            sizes.plot([row["lr"] for row in rows], values, color=color, label=name)
        taken = parts["codec"]["speeds"]
        for name in taken[0].keys() - {"density"}:
            speeds.plot([one["density"] for one in taken], [one[name] for one in taken], label=name)
        sizes.loglog()
        speeds.loglog()
        for one in parts["transports"]["rows"]:
            name, color = f"{one['store']}, {one['kind']}", KINDS[one["kind"]]
            bar(transports, name, color, one["publish_seconds"], one["stage_seconds"])
        for kind, swap in parts["swaps"]["swaps"].items():
            rest = swap["pause_seconds"] - swap["apply_seconds"]
            bar(swaps, kind, KINDS[kind], swap["apply_seconds"], rest)
        bar(swaps, "vLLM's own reload", PURPLE, parts["swaps"]["vllm_reload_seconds"])
        dress(sizes, "Bytes per parameter, one step apart", "learning rate")
        dress(speeds, "GB/s of dense bf16 on one core", "share of elements that changed")
        dress(transports, "Publish, then stage", "seconds, median")
        dress(swaps, "Pause at a swap: loading, then the rest", "seconds, median")
