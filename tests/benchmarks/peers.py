"""The same distillation by TRL's `DistillationTrainer` and by us, side by side on the same cores.

Same models, prompts in the same order, batch, steps, optimizer, schedule and objective (reverse KL over the
whole vocabulary, temperature 1). Ours is the asynchronous run of `asynchronous`; TRL gets both cores for its
one process. At each size either has the precision that is faster in a few steps before. Both are
timed from the end of their first step. TRL lives in an environment of its own inside the folder, made once.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from distill import quickstart
from distill.config import RunConfig
from distill.config.loading import load
from distill.prompts.sources import open_prompts
from distill.prompts.stream import PromptStream
from sync.base.errors import DistillError
from sync.base.jsonl import read_lines
from sync.base.tokenizers import load_tokenizer
from sync.wire import Version
from tests.benchmarks import asynchronous
from tests.benchmarks.figures import Figures, Row, TrialCache, command, comparison, cores, medians

log = logging.getLogger(__name__)
SCRIPT: Final = Path(__file__).with_name("trl_peer.py")
REQUIREMENTS: Final = (
    *("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0"),
    *(f"{name}=={metadata.version(name)}" for name in ("torch", "transformers")),
)
"""Of TRL's environment, with our own torch and transformers."""
PRECISIONS: Final = {
    "bf16": (),
    "fp32": (
        *("student.dtype=float32", "teachers.sorter.dtype=float32"),
        'trainer.overrides={"bf16.enabled"=false}',
    ),
}
"""Our settings for each; TRL has a flag. The toy's teacher is fp32 in both."""
PROBE_STEPS: Final = 12
"""Of the runs that choose a precision."""
ROWS: Final = {
    "step_ms": Row("ms per step", ",.0f", -1),
    "tokens_per_second": Row("tokens generated and trained per second", ",.0f", 1),
    "seconds_to_target": Row(f"seconds to a reverse KL of {asynchronous.TARGET_KL}", ".1f", -1),
    "reverse_kl": Row("reverse KL at the end", ".3f"),
    "pass_rate": Row("pass rate at the end", ".1%"),
}


class Size(NamedTuple):
    """What both are run on."""

    steps: int
    settled: int
    """Steps left out of step times and rates."""
    learns: bool
    """Whether versions are evaluated; else speed is all that is compared."""


SIZES: Final = {
    "toy": Size(steps=240, settled=asynchronous.SETTLED, learns=True),
    "large": Size(steps=asynchronous.LARGE_STEPS, settled=asynchronous.LARGE_SETTLED, learns=False),
}


def run(folder: Path = Path("runs/bench-peers"), seeds: int = 2) -> Figures:
    """Run what is missing in `folder`; every trial, and the medians. `large` takes one seed.

    Raises DistillError when the environment cannot be made or a run fails.
    """
    folder = folder.absolute()
    python, cache = environment(folder / "trl"), TrialCache(folder / "trials.jsonl")
    report: Figures = {"cores": cores(), "requirements": REQUIREMENTS, "sizes": {}}
    for name, size in SIZES.items():
        trl = partial(theirs, cache, python, folder, name)
        sides = {"TRL": trl, "ours": partial(ours, cache, folder, name)}
        precision = {side: faster(run) for side, run in sides.items()}
        trials: dict[str, list[Figures]] = {side: [] for side in sides}
        for seed in range(seeds if size.learns else 1):
            for side, run in sides.items():
                trials[side].append(run(seed, precision[side], size.steps))
        by_side = {side: medians(of, ROWS) for side, of in trials.items()}
        report["sizes"][name] = {"precision": precision, "medians": by_side, "trials": trials}
    return report


def faster(side: Callable[[int, str, int], Figures]) -> str:
    """The precision that a side is faster in."""
    tries = {one: side(0, one, PROBE_STEPS)["step_ms"] for one in PRECISIONS}
    return min(tries, key=lambda one: tries[one])


def table(report: Figures) -> str:
    """The medians side by side, as Markdown; a ratio above 1: ours is better."""
    lines = []
    for name, found in report["sizes"].items():
        rows = comparison(found["medians"], ROWS)
        precision = ", ".join(f"{side} in {one}" for side, one in found["precision"].items())
        lines += [f"{name}; {precision}", "", *rows, ""]
    return "\n".join(lines)


# --- what is run ------------------------------------------------------------------------------------------


def environment(folder: Path) -> Path:
    """The Python of an environment with TRL, made by pip as it is configured here unless it is there."""
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == list(REQUIREMENTS):
        return python
    log.info("installing %s", ", ".join(REQUIREMENTS))
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS]
    for words in ([sys.executable, "-m", "venv", "--clear", str(folder)], install):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise DistillError(f"{' '.join(words[:5])} … failed:\n{done.stderr[-2000:]}")
    stamp.write_text(json.dumps(REQUIREMENTS))
    return python


def settings_of(name: str, seed: int) -> list[str]:
    """Of our run, over the quickstart's."""
    return [*asynchronous.OVERLAPPED, *(asynchronous.large_settings(seed) if name == "large" else ())]


def settled(size: Size, steps: int) -> int:
    """Steps of a run to leave out; one of PROBE_STEPS has few."""
    return size.settled if steps == size.steps else steps // 4


def ours(cache: TrialCache, folder: Path, name: str, seed: int, precision: str, steps: int) -> Figures:
    """Our run, or what is kept of it; one of PROBE_STEPS is for speed alone."""
    size, words = SIZES[name], [*settings_of(name, seed), *PRECISIONS[precision]]

    def figures(run_dir: Path, profile: asynchronous.CpuProfile) -> Figures:
        found = asynchronous.measure(run_dir, profile, settled(size, steps))
        speed = {"step_ms": found["step_ms"], "tokens_per_second": found["trained_per_second"]}
        return learned(speed, asynchronous.learned(run_dir) if size.learns and steps == size.steps else None)

    return asynchronous.trial(cache, folder, words, seed, steps, figures)


def learned(speed: Figures, curve: Figures | None) -> Figures:
    """Speed, and the learning curve where there is one."""
    return speed | (curve or dict.fromkeys(("seconds_to_target", "reverse_kl", "pass_rate")))


def theirs(
    cache: TrialCache, python: Path, folder: Path, name: str, seed: int, precision: str, steps: int
) -> Figures:
    """TRL's run, or what is kept of it; one of PROBE_STEPS is for speed alone."""
    path, words = quickstart.source(seed)
    config = load(path, [*words, *settings_of(name, seed)])
    output, size = folder / "theirs", SIZES[name]
    learns = size.learns and steps == size.steps
    task = job(config, steps, precision)
    task["save_at"] = [*range(asynchronous.EVERY, steps, asynchronous.EVERY), steps] if learns else []

    def saved(version: Version) -> Path:
        return output / f"step-{version.step}"

    def make() -> Figures:
        lines = train(python, output, task)
        timed = lines[settled(size, steps) :]
        first, last = timed[0], timed[-1]
        pace = (last["generated"] - first["generated"]) / (last["time"] - first["time"])
        speed = {"step_ms": asynchronous.median_gap_ms(timed), "tokens_per_second": pace}
        return learned(speed, asynchronous.curve(config, saved, lines) if learns else None)

    return cache.get({"side": "TRL", "requirements": REQUIREMENTS, "job": task}, make)


def job(config: RunConfig, steps: int, precision: str) -> Figures:
    """The job of `trl_peer`: models, prompts in our order, and our optimizer's numbers."""
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


def train(python: Path, output: Path, task: Figures) -> Sequence[dict[str, Any]]:
    """Run TRL on one job in `output`; a line per step. Raises DistillError with its errors when it fails."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "job.json").write_text(json.dumps({**task, "output": str(output)}))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_WAIT_POLICY")}
    env |= {"OMP_NUM_THREADS": str(task["threads"]), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [str(python), "-P", str(SCRIPT), str(output / "job.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    lines = read_lines(output / "steps.jsonl")
    if done.returncode != 0 or len(lines) != task["steps"]:
        raise DistillError(f"TRL ended after {len(lines)} of {task['steps']} steps:\n{done.stderr[-2000:]}")
    return lines


if __name__ == "__main__":
    command("peers", run, table)
