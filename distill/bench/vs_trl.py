"""The same distillation by TRL's `DistillationTrainer` and by us, side by side on the same cores.

Same models, prompts in the same order, batch, steps, optimizer, schedule and objective (reverse KL over the
whole vocabulary, temperature 1). Ours is the asynchronous run of `distill bench async`; TRL gets both cores
for its one process, and at each size the precision that is faster in a few steps before. Both are timed from
the end of their first step. TRL lives in an environment of its own inside the folder, made once. A finished
trial is kept there too, and made again when anything that decides it has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from distill import quickstart
from distill.bench import cpu_profile as watched
from distill.bench import pipeline
from distill.bench.eval_curve import Folders, crossing, curve_points
from distill.config import RunConfig
from distill.loading import load
from distill.metrics.plot import read_lines
from distill.metrics.results import versions
from distill.tasks import Models
from sync.errors import DistillError

log = logging.getLogger(__name__)
SCRIPT: Final = Path(__file__).with_name("trl_peer.py")
REQUIREMENTS: Final = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")
SAME: Final = ("torch", "transformers")
"""Installed for TRL in the very versions that we use."""
PRECISIONS: Final = ("fp32", "bf16")
PROBE_STEPS: Final = 8
"""Of the runs that choose TRL's precision."""


@dataclass(frozen=True)
class Size:
    """What both are run on."""

    name: str
    steps: int
    settled: int
    """Steps left out of step times and rates."""
    settings: tuple[str, ...] = ()
    """Of our run, over the quickstart and the asynchronous layout."""
    learns: bool = True
    """Whether versions are evaluated; else speed is all that is compared."""


TOY = Size("toy", steps=240, settled=pipeline.SETTLED)
LARGE = Size(
    "large",
    steps=24,
    settled=8,
    settings=(
        "rollout.batch=64",
        "rollout.max_tokens=48",
        "rollout.request_size=16",
        "rollout.max_in_flight=64",
        "buffer.score_batch=32",
        "teachers.sorter.dtype=bfloat16",
        "trainer.lr=1e-4",
    ),
    learns=False,
)


@dataclass(frozen=True)
class Trial:
    """One run of ours or of TRL's."""

    who: str
    size: str
    seed: int
    settings: str
    """Digest of everything that decides it."""
    steps: int
    step_ms: float
    """Median wall time between two steps, after the settled ones."""
    tokens_per_second: float
    """Completion tokens that were generated and trained on."""
    seconds_to_target: float | None = None
    """From the end of the first step to `pipeline.TARGET_KL`; None: never reached, or not evaluated."""
    reverse_kl: float | None = None
    pass_rate: float | None = None
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    """Seconds since the first step, reverse KL, pass rate."""


def run(folder: Path = Path("runs/bench-peers"), seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Run what is missing in `folder`; every trial and the medians, there also as JSON and as a table.

    Raises DistillError when the environment cannot be made or a run fails.
    """
    from sync.durable import write_json

    folder = folder.absolute()
    python = environment(folder / "trl")
    trials, precision = [], {}
    for size, of in ((TOY, seeds), (LARGE, seeds[:1])):
        precision[size.name] = faster_precision(python, folder, size)
        for seed in of:
            trials.append(ours(folder, size, seed))
            trials.append(theirs(python, folder, size, seed, precision[size.name]))
    report = {
        "benchmark": "peers",
        "target_kl": pipeline.TARGET_KL,
        "seeds": list(seeds),
        "cores": pipeline.cores(),
        "trl_precision": precision,
        "trl": REQUIREMENTS[0],
        "versions": versions(),
        "parameters": {size.name: parameters(config_of(size, 0)) for size in (TOY, LARGE)},
        "medians": {size.name: medians(trials, size) for size in (TOY, LARGE)},
        "trials": [asdict(one) for one in trials],
    }
    write_json(folder / "peers.json", report)
    (folder / "peers.md").write_text(table(report) + "\n")
    return report


def requirements() -> list[str]:
    """What TRL is run with."""
    return [*(f"{name}=={metadata.version(name)}" for name in SAME), *REQUIREMENTS]


def environment(folder: Path) -> Path:
    """The Python of an environment with TRL, made by pip as it is configured here unless it is there."""
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    wanted = requirements()
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return python
    log.info("installing %s", ", ".join(wanted))
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], install):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise DistillError(f"{' '.join(command[:5])} … failed:\n{done.stderr[-2000:]}")
    stamp.write_text(json.dumps(wanted))
    return python


# --- what is run ------------------------------------------------------------------------------------------


def settings_of(size: Size, seed: int) -> list[str]:
    """Of our run, over the quickstart's."""
    words = [*pipeline.LAYOUT, *pipeline.OVERLAPPED, *size.settings]
    if size is LARGE:
        pair = large_pair(quickstart.CACHE, seed)
        words += [f"student.path={pair.student}", f"teachers.sorter.path={pair.teacher}"]
    return words


def large_pair(cache: Path, seed: int) -> Models:
    """A student of 14 M and a teacher of 25 M parameters with random weights, made once in `cache`."""
    from distill.tasks.making import letter_tokenizer, untaught
    from distill.tasks.teaching import Recipe, made_once, recipe_hash, save_pair

    shape = {"layers": 8, "steps": 0, "rows": 0, "rate": 0.0, "muon": False, "both_choices": False}
    student = Recipe(width=384, heads=12, kv_heads=6, feed_forward=1152, **shape)  # type: ignore[arg-type]
    teacher = Recipe(width=512, heads=16, kv_heads=8, feed_forward=1536, **shape)  # type: ignore[arg-type]

    def make(unfinished: Path) -> None:
        import torch

        torch.manual_seed(seed)
        save_pair(unfinished, letter_tokenizer(), teacher=untaught(teacher), student=untaught(student))

    digest = recipe_hash((teacher, student), seed, (__file__,))
    return made_once(cache.absolute() / f"large-{digest}", make)


def config_of(size: Size, seed: int) -> RunConfig:
    """The configuration that our run of `size` resolves to."""
    path, ours = quickstart.source(seed)
    return load(path, [*ours, *settings_of(size, seed)])


def ours(folder: Path, size: Size, seed: int) -> Trial:
    """Our run, or what is kept of it."""
    name, words = f"{size.name}-ours-{seed}", settings_of(size, seed)
    settings = digest(asdict(size), words, config_of(size, seed).model_dump(mode="json"))

    def make() -> Trial:
        seen = watched.run(pipeline.arguments(folder, name, seed, size.steps, words))
        one = pipeline.measure(folder / name, name, seed, words, seen, size.learns, size.settled)
        return Trial(
            "ours",
            size.name,
            seed,
            settings,
            one.steps,
            one.step_ms,
            one.trained_tokens_per_second,
            one.seconds_to_target,
            one.reverse_kl,
            one.pass_rate,
            one.curve,
        )

    return kept(folder / f"{name}.json", settings, make)


def theirs(python: Path, folder: Path, size: Size, seed: int, precision: str) -> Trial:
    """TRL's run, or what is kept of it."""
    name, config = f"{size.name}-trl-{precision}-{seed}", config_of(size, seed)
    save_at = [*range(pipeline.EVERY, size.steps, pipeline.EVERY), size.steps] if size.learns else []
    told = job(config, folder / name, size.steps, precision) | {"save_at": save_at}
    settings = digest(asdict(size), requirements(), {**told, "output": None})
    return kept(
        folder / f"{name}.json", settings, lambda: _theirs(python, config, told, size, seed, settings)
    )


def _theirs(
    python: Path, config: RunConfig, told: dict[str, Any], size: Size, seed: int, settings: str
) -> Trial:
    lines, output, save_at = train(python, told), Path(told["output"]), told["save_at"]
    began, settled = lines[0]["time"], lines[size.settled :]
    wall, times = settled[-1]["time"] - settled[0]["time"], [line["time"] for line in settled]
    folders = Folders({step: output / f"step-{step}" for step in save_at})
    held_out = curve_points(config, folders, [0, *save_at]) if size.learns else []
    curve = [(pipeline.at_step(mark.step, lines) - began, *mark[1:]) for mark in held_out]
    return Trial(
        "trl",
        size.name,
        seed,
        settings,
        size.steps,
        1000 * median(b - a for a, b in pairwise(times)),
        pipeline.rise(settled, "generated") / wall,
        crossing([point[:2] for point in curve], pipeline.TARGET_KL),
        held_out[-1].reverse_kl if held_out else None,
        held_out[-1].pass_rate if held_out else None,
        curve,
    )


def digest(*what: Any) -> str:
    """Of JSON values: it changes when they do."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def kept(path: Path, settings: str, make: Callable[[], Trial]) -> Trial:
    """The trial of these settings in `path`; what is not there, or was of others, is made."""
    if path.is_file():
        found = json.loads(path.read_text())
        if found.get("settings") == settings:
            return Trial(**found)
        log.info("%s was made with other settings: it is made again", path.stem)
    trial = make()
    log.info("%s: %.0f ms a step, %.0f tokens/s", path.stem, trial.step_ms, trial.tokens_per_second)
    path.write_text(json.dumps(asdict(trial), indent=2))
    return trial


def faster_precision(python: Path, folder: Path, size: Size) -> str:
    """In which TRL makes its steps faster at this size, tried once."""
    path, config = folder / f"{size.name}-trl-precision.json", config_of(size, 0)
    told = {one: job(config, folder / f"{size.name}-trl-try-{one}", PROBE_STEPS, one) for one in PRECISIONS}
    settings = digest(requirements(), [{**one, "output": None} for one in told.values()])
    found = json.loads(path.read_text()) if path.is_file() else {}
    if found.get("settings") != settings:
        found = {"settings": settings}
        for precision, one in told.items():
            times = [line["time"] for line in train(python, one | {"save_at": []})[PROBE_STEPS // 4 :]]
            found[precision] = median(b - a for a, b in pairwise(times))
        path.write_text(json.dumps(found))
    return min(PRECISIONS, key=lambda one: found[one])


def job(config: RunConfig, output: Path, steps: int, precision: str) -> dict[str, Any]:
    """What `trl_peer` is told: models, prompts in our order, and our optimizer's numbers."""
    from distill.models import longest_sequence
    from distill.prompts.held_out import open_prompts
    from distill.prompts.stream import PromptStream
    from teacher_service.describe import load_tokenizer

    (teacher,) = config.teachers.values()
    tokenizer = load_tokenizer(config.student)
    split = open_prompts(config, tokenizer, longest_sequence(config))
    prompts = PromptStream(split.train, config.run.seed).take(steps * config.rollout.batch)
    return {
        "student": config.student.path,
        "teacher": teacher.path,
        "output": str(output),
        "prompts": [prompt.text for prompt in prompts],
        "first_prompt": prompts[0].token_ids,
        "threads": pipeline.cores(),
        "seed": config.run.seed,
        "steps": steps,
        "batch": config.rollout.batch,
        "max_tokens": config.rollout.max_tokens,
        "rate": config.trainer.lr,
        "warmup": config.trainer.warmup_steps,
        "bf16": precision == "bf16",
    }


def train(python: Path, told: Mapping[str, Any]) -> list[dict[str, float]]:
    """Run TRL on one job; a line per step. Raises DistillError with what it said when it fails."""
    output = Path(told["output"])
    output.mkdir(parents=True, exist_ok=True)
    (output / "job.json").write_text(json.dumps(told))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_WAIT_POLICY")}
    env |= {"OMP_NUM_THREADS": str(told["threads"]), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(python), "-P", str(SCRIPT), str(output / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    lines = read_lines(output / "steps.jsonl")
    if done.returncode != 0 or len(lines) != told["steps"]:
        raise DistillError(f"TRL ended after {len(lines)} of {told['steps']} steps:\n{done.stderr[-2000:]}")
    return lines


# --- what comes of it -------------------------------------------------------------------------------------

NUMBERS: Final = {
    "step_ms": ("ms a step", ".0f"),
    "tokens_per_second": ("tokens generated and trained on a second", ",.0f"),
    "seconds_to_target": ("seconds to the target KL", ".1f"),
    "reverse_kl": ("reverse KL at the end", ".3f"),
    "pass_rate": ("pass rate at the end", ".3f"),
}


def parameters(config: RunConfig) -> dict[str, int]:
    """Of student and teacher, from their checkpoints."""
    from sync.snapshots.checkpoint import tensors

    (teacher,) = config.teachers.values()
    folders = {"student": Path(config.student.path), "teacher": Path(teacher.path)}
    return {
        role: sum(place.nbytes for place in tensors(path).values()) // 2 for role, path in folders.items()
    }


def medians(trials: Sequence[Trial], size: Size) -> dict[str, dict[str, float | None]]:
    """Of each number over the seeds of one size, None where a seed has none, by who ran."""
    found: dict[str, dict[str, float | None]] = {}
    for who in ("ours", "trl"):
        mine = [one for one in trials if (one.who, one.size) == (who, size.name)]
        values = {name: [getattr(one, name) for one in mine] for name in NUMBERS}
        found[who] = {name: None if None in of else median(of) for name, of in values.items()}
    return found


def table(report: Mapping[str, Any]) -> str:
    """The medians side by side, as Markdown; the ratio is above 1 where ours is better."""
    rows = [f"{report['trl']}; {report['cores']} cores; target {report['target_kl']:g} nats a token"]
    for size, found in report["medians"].items():
        count = report["parameters"][size]
        rows += [
            "",
            f"{size}: student {count['student'] / 1e6:.2f} M, teacher {count['teacher'] / 1e6:.2f} M "
            f"parameters; TRL in {report['trl_precision'][size]}",
            "",
            "| | ours | TRL | ratio |",
            f"|{' --- |' * 4}",
        ]
        rows += [
            _row(title, form, found["ours"][name], found["trl"][name], upward=name == "tokens_per_second")
            for name, (title, form) in NUMBERS.items()
            if found["ours"][name] is not None
        ]
    return "\n".join(rows)


def _row(title: str, form: str, ours: float, trl: float | None, upward: bool) -> str:
    if trl is None:
        return f"| {title} | {ours:{form}} | – | |"
    ratio = f"{ours / trl if upward else trl / ours:.2f}" if "at the end" not in title else ""
    return f"| {title} | {ours:{form}} | {trl:{form}} | {ratio} |"
