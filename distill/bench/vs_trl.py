"""The same distillation by TRL's `DistillationTrainer` and by us, side by side on the same cores.

Same models, prompts in the same order, batch, steps, optimizer, schedule and objective (reverse KL over the
whole vocabulary, temperature 1). Ours is the asynchronous run of `distill bench async`; TRL gets both cores
for its one process, and at each size the precision that is faster in a few steps before. Both are timed from
the end of their first step. TRL lives in an environment of its own inside the folder, made once.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from distill import quickstart
from distill.bench import pipeline, runs
from distill.bench.runner import (
    Figures,
    Number,
    TrialCache,
    comparison,
    cores,
    medians,
    ratios,
    write_report,
)
from distill.config import RunConfig
from distill.loading import load
from distill.metrics.summary import versions
from distill.tasks import Models
from sync.errors import DistillError
from sync.jsonl import read_lines
from sync.wire import Version

log = logging.getLogger(__name__)
SCRIPT: Final = Path(__file__).with_name("trl_peer.py")
REQUIREMENTS: Final = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")
SAME: Final = ("torch", "transformers")
"""Installed for TRL in the very versions that we use."""
PRECISIONS: Final = ("fp32", "bf16")
PROBE_STEPS: Final = 8
"""Of the runs that choose TRL's precision."""
NUMBERS: Final = {
    "step_ms": Number("ms a step", ".0f", "lower"),
    "tokens_per_second": Number("tokens generated and trained on a second", ",.0f", "higher"),
    "seconds_to_target": Number("seconds to the target KL", ".1f", "lower"),
    "reverse_kl": Number("reverse KL at the end", ".3f"),
    "pass_rate": Number("pass rate at the end", ".3f"),
}


class Size(NamedTuple):
    """What both are run on."""

    name: str
    steps: int
    settled: int
    """Steps left out of step times and rates."""
    settings: tuple[str, ...] = ()
    """Of our run, over the quickstart and the asynchronous layout."""
    learns: bool = True
    """Whether versions are evaluated; else speed is all that is compared."""


TOY = Size("toy", steps=240, settled=runs.SETTLED)
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


def run(folder: Path = Path("runs/bench-peers"), seeds: Sequence[int] = (0, 1)) -> Figures:
    """Run what is missing in `folder`; every trial and the medians, there also as JSON and as a table.

    Raises DistillError when the environment cannot be made or a run fails.
    """
    folder = folder.absolute()
    python, cache = environment(folder / "trl"), TrialCache(folder / "trials.jsonl", str(SCRIPT))
    trials, precision = [], {}
    for size, of in ((TOY, seeds), (LARGE, seeds[:1])):
        precision[size.name] = faster_precision(cache, python, folder, size)
        for seed in of:
            trials.append(ours(cache, folder, size, seed))
            trials.append(theirs(cache, python, folder, size, seed, precision[size.name]))
    by_size = {size.name: summary(trials, size) for size in (TOY, LARGE)}
    report = {
        "benchmark": "peers",
        "target_kl": runs.TARGET_KL,
        "seeds": list(seeds),
        "cores": cores(),
        "trl_precision": precision,
        "trl": REQUIREMENTS[0],
        "versions": versions(),
        "parameters": {size.name: parameters(config_of(size, 0)) for size in (TOY, LARGE)},
        "medians": by_size,
        "ratios": {size: ratios(found["trl"], found["ours"], NUMBERS) for size, found in by_size.items()},
        "trials": trials,
    }
    return write_report(folder, "peers", report, table(report))


def summary(trials: Sequence[Mapping[str, Any]], size: Size) -> dict[str, Figures]:
    """Medians over the seeds of one size, by who ran."""
    return {
        who: medians([one for one in trials if (one["who"], one["size"]) == (who, size.name)], NUMBERS)
        for who in ("ours", "trl")
    }


def table(report: Mapping[str, Any]) -> str:
    """The medians side by side, as Markdown; the ratio is above 1 where ours is better."""
    rows = [f"{report['trl']}; {report['cores']} cores; target {report['target_kl']:g} nats a token"]
    for size, found in report["medians"].items():
        count = report["parameters"][size]
        about = (
            f"{size}: student {count['student'] / 1e6:.2f} M, teacher {count['teacher'] / 1e6:.2f} M "
            f"parameters; TRL in {report['trl_precision'][size]}"
        )
        rows += ["", about, "", *comparison(found, report["ratios"][size], NUMBERS)]
    return "\n".join(rows)


# --- what is run ------------------------------------------------------------------------------------------


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


def settings_of(size: Size, seed: int) -> list[str]:
    """Of our run, over the quickstart's."""
    words = [*pipeline.LAYOUT, *pipeline.OVERLAPPED, *size.settings]
    if size is LARGE:
        pair = large_pair(quickstart.CACHE, seed)
        words += [f"student.path={pair.student}", f"teachers.sorter.path={pair.teacher}"]
    return words


def large_pair(cache: Path, seed: int) -> Models:
    """A student of 14 M and a teacher of 25 M parameters with random weights, made once in `cache`."""
    from distill.tasks.sort_letters import letter_tokenizer, untaught
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


def parameters(config: RunConfig) -> dict[str, int]:
    """Of student and teacher, from their checkpoints in bf16."""
    from sync.snapshots.checkpoint import tensors

    (teacher,) = config.teachers.values()
    folders = {"student": Path(config.student.path), "teacher": Path(teacher.path)}
    return {
        role: sum(place.nbytes for place in tensors(path).values()) // 2 for role, path in folders.items()
    }


def ours(cache: TrialCache, folder: Path, size: Size, seed: int) -> Figures:
    """Our run, or what is kept of it."""
    name, words = f"{size.name}-ours-{seed}", settings_of(size, seed)
    who = {"who": "ours", "size": size.name, "seed": seed}

    def make() -> Figures:
        profile = runs.run_quickstart(folder, name, seed, size.steps, words)
        one = runs.measure(folder / name, name, seed, words, profile, size.learns, size.settled)
        kept = ("steps", "step_ms", "seconds_to_target", "reverse_kl", "pass_rate", "curve")
        figures = {key: value for key, value in one.items() if key in kept}
        return who | {"tokens_per_second": one["trained_tokens_per_second"]} | figures

    config = config_of(size, seed).model_dump(mode="json")
    return cache.get({**who, **size._asdict(), "config": config}, make)


def theirs(cache: TrialCache, python: Path, folder: Path, size: Size, seed: int, precision: str) -> Figures:
    """TRL's run, or what is kept of it."""
    config, output = config_of(size, seed), folder / f"{size.name}-trl-{precision}-{seed}"
    save_at = [*range(runs.EVERY, size.steps, runs.EVERY), size.steps] if size.learns else []
    task = job(config, size.steps, precision) | {"save_at": save_at}
    who = {"who": "trl", "size": size.name, "seed": seed}

    def make() -> Figures:
        lines = train(python, output, task)
        settled = lines[size.settled :]
        first, last = settled[0], settled[-1]
        weights = SavedSteps(output)
        points = runs.curve_points(config, weights, [0, *save_at]) if size.learns else []
        return who | {
            "steps": size.steps,
            "step_ms": runs.median_gap_ms(settled),
            "tokens_per_second": (last["generated"] - first["generated"]) / (last["time"] - first["time"]),
            **runs.learning(points, lines),
        }

    return cache.get({**who, **size._asdict(), "requirements": requirements(), "job": task}, make)


class SavedSteps(NamedTuple):
    """TRL's checkpoints as versions; step 0 is not among them: it is the student's own folder."""

    output: Path

    def folder(self, version: Version) -> Path:
        """Of a step that was saved."""
        return self.output / f"step-{version.step}"


def faster_precision(cache: TrialCache, python: Path, folder: Path, size: Size) -> str:
    """In which TRL makes its steps faster at this size."""

    def step_ms(precision: str) -> float:
        task = job(config_of(size, 0), PROBE_STEPS, precision) | {"save_at": []}
        output = folder / f"{size.name}-trl-try-{precision}"

        def make() -> Figures:
            return {"step_ms": runs.median_gap_ms(train(python, output, task)[PROBE_STEPS // 4 :])}

        return float(cache.get({"requirements": requirements(), "job": task}, make)["step_ms"])

    return min(PRECISIONS, key=step_ms)


def job(config: RunConfig, steps: int, precision: str) -> Figures:
    """The job of `trl_peer`: models, prompts in our order, and our optimizer's numbers."""
    from distill.prompts.sources import open_prompts
    from distill.prompts.stream import PromptStream
    from teacher_service.describe import load_tokenizer

    (teacher,) = config.teachers.values()
    split = open_prompts(config, load_tokenizer(config.student))
    prompts = PromptStream(split.train, config.run.seed).take(steps * config.rollout.batch)
    return {
        "student": config.student.path,
        "teacher": teacher.path,
        "prompts": [prompt.text for prompt in prompts],
        "first_prompt": prompts[0].token_ids,
        "threads": cores(),
        "seed": config.run.seed,
        "steps": steps,
        "batch": config.rollout.batch,
        "max_tokens": config.rollout.max_tokens,
        "rate": config.trainer.lr,
        "warmup": config.trainer.warmup_steps,
        "bf16": precision == "bf16",
    }


def train(python: Path, output: Path, task: Mapping[str, Any]) -> list[dict[str, float]]:
    """Run TRL on one job in `output`; a line per step. Raises DistillError with its errors when it fails."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "job.json").write_text(json.dumps({**task, "output": str(output)}))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_WAIT_POLICY")}
    env |= {"OMP_NUM_THREADS": str(task["threads"]), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(python), "-P", str(SCRIPT), str(output / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    lines = read_lines(output / "steps.jsonl")
    if done.returncode != 0 or len(lines) != task["steps"]:
        raise DistillError(f"TRL ended after {len(lines)} of {task['steps']} steps:\n{done.stderr[-2000:]}")
    return lines
