"""The same distillation by TRL's `DistillationTrainer`, by a plain loop of vLLM, transformers and PyTorch,
and by us, one after the other on the same cores.

Same models, prompts in the same order, batch, steps, optimizer, schedule and objective (reverse KL over the
whole vocabulary, temperature 1). Ours is the asynchronous run of `asynchronous`; the others get all cores for
their one process. Each has the precision that is faster in a few steps before, and is timed behind its first
steps. TRL lives in an environment of its own inside the folder, made once by pip. At the scale `rewards` its
`GRPOTrainer` stands beside configs/rewards.toml. Else the limit of a step follows (`asynchronous`).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from distill.config import RunConfig
from distill.config.loading import load
from distill.prompts.sources import open_prompts
from distill.prompts.stream import PromptStream
from sync.base.errors import DistillError
from sync.base.jsonl import read_lines
from sync.base.tokenizers import load_tokenizer
from tests.benchmarks import ROOT, asynchronous
from tests.benchmarks.asynchronous import OVERLAPPED, SCALES, Scale, TrialSteps
from tests.benchmarks.figures import (
    Figures,
    Folder,
    Seeds,
    TrialCache,
    command,
    comparison,
    cores,
    median_gap_ms,
    medians,
)

log = logging.getLogger(__name__)
SCRIPTS: Final = {"TRL": "trl_peer.py", "loop": "stock_loop.py"}
REQUIREMENTS: Final = (
    *("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0"),
    *(f"{name}=={metadata.version(name)}" for name in ("torch", "transformers")),
)
"""Of TRL's environment, with our own torch and transformers."""
PRECISIONS: Final = {
    "bf16": (),
    "fp32": (
        *("student.dtype=float32", "teachers.{}.dtype=float32"),
        'trainer.overrides={"bf16.enabled"=false}',
    ),
}
"""Our settings for each; TRL has a flag. The toy's teacher is fp32 in both."""
REWARDS: Final = Scale(24, 4, False, probe_steps=4, teacher="")
"""Rewards alone, 135 M parameters."""
PeerScale = Annotated[
    Literal["toy", "large", "real", "rewards"],
    typer.Option(help="Models as in `asynchronous`, or rewards alone at 135 M parameters."),
]
Against = Annotated[
    Literal["TRL", "loop", "both"], typer.Option(help="What ours is compared with; `loop` has no rewards.")
]
ROWS: Final = {
    name: asynchronous.ROWS[name] for name in ("step_ms", "trained_per_second", *asynchronous.CURVE)
}


def run(
    folder: Folder = Path("runs/bench-peers"),
    scale: PeerScale = "toy",
    seeds: Seeds = 2,
    steps: TrialSteps = 0,
    against: Against = "both",
) -> Figures:
    """Run the same distillation in TRL, in a plain loop and here; compare speed and what was learned."""
    cache, size = TrialCache(folder), REWARDS if scale == "rewards" else SCALES[scale]
    sides = ["TRL"] if scale == "rewards" else [side for side in SCRIPTS if against in (side, "both")]
    pythons = {"loop": Path(sys.executable)}
    if "TRL" in sides:
        pythons["TRL"] = environment(cache.folder / "trl")

    def trial(side: str, seed: int, precision: str, steps: int, size: Scale) -> Figures:
        path, overrides = source = rewards(seed) if scale == "rewards" else asynchronous.source(scale, seed)
        settings = [setting for setting in PRECISIONS[precision] if size.teacher or "{}" not in setting]
        words = [*OVERLAPPED, *(setting.replace("{}", size.teacher) for setting in settings)]
        config = load(path, [*overrides, *words])
        task = job(config, steps, precision, size.learns)
        if side == "ours":
            make = partial(asynchronous.trial, cache.folder / "ours", source, words, steps, size)
        else:
            program = [str(pythons[side]), "-P", str(Path(__file__).with_name(SCRIPTS[side]))]
            make = partial(theirs, program, cache.folder / "theirs", task, config, size)
        return cache.get({"side": side, "requirements": REQUIREMENTS, "job": task, "settings": words}, make)

    trials: dict[str, list[Figures]] = {}
    precision: dict[str, str] = {}
    for side in (*sides, "ours"):
        untaught = size._replace(learns=False)
        ms = {name: trial(side, 0, name, size.probe_steps, untaught)["step_ms"] for name in PRECISIONS}
        precision[side], trials[side] = min(ms, key=ms.__getitem__), []
    for seed in range(seeds):
        for side, of in trials.items():
            of.append(trial(side, seed, precision[side], steps or size.steps, size))
    by_side = {side: medians(of, ROWS) for side, of in trials.items()}
    report = {"cores": cores(), "precision": precision, "medians": by_side, "trials": trials}
    if scale == "rewards":
        return report
    path, words = asynchronous.source(scale, 0)
    words += [*OVERLAPPED, *(word.replace("{}", size.teacher) for word in PRECISIONS[precision["ours"]])]
    return report | {"limit": asynchronous.limit_of(cache, (path, words), size, trials["ours"][0])}


def table(report: Figures) -> str:
    """The medians side by side, as Markdown; a ratio above 1: ours is better."""
    precision = ", ".join(f"{side} in {name}" for side, name in report["precision"].items())
    lines = [precision]
    for side in [*report["medians"]][:-1]:
        lines += ["", *comparison(side, "ours", report["medians"], ROWS)]
    if "limit" in report:
        ours = report["trials"]["ours"][0]["mean_step_ms"]
        lines += ["", *asynchronous.limit_table(report["limit"], ours)]
    return "\n".join(lines)


def rewards(seed: int) -> tuple[Path, list[str]]:
    """configs/rewards.toml with the model that `make real` makes."""
    model, deepspeed = asynchronous.REAL / "teacher", ROOT / "configs/deepspeed/zero3_cpu.json"
    words = [f"student.path={model}", f"prompts.options.tokenizer={model}", f"trainer.deepspeed={deepspeed}"]
    return ROOT / "configs/rewards.toml", [f"run.seed={seed}", *words]


# --- TRL --------------------------------------------------------------------------------------------------


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
            why = done.stderr[-2000:]
            raise DistillError(
                f"{' '.join(words[:5])} … failed, and without TRL there is nothing to compare:\n{why}"
            )
    stamp.write_text(json.dumps(REQUIREMENTS))
    return python


def job(config: RunConfig, steps: int, precision: str, learns: bool) -> Figures:
    """The job of `trl_peer`: models, prompts in our order, and our optimizer's numbers."""
    teacher = next(iter(config.teachers.values()), None)
    tokenizer, asked = load_tokenizer(config.student), config.rollout.batch // config.rollout.per_prompt
    prompts = PromptStream(open_prompts(config, tokenizer).train, config.run.seed).take(steps * asked)
    task = config.objective.task
    return {
        "student": config.student.path,
        "teacher": teacher and teacher.path,
        "answers": [(prompt.answer or "").rpartition(" ")[2] for prompt in prompts],
        "per_prompt": config.rollout.per_prompt,
        "clip": task and task.clip,
        "prompts": [tokenizer.decode(prompt.token_ids) for prompt in prompts],
        "first_prompt": prompts[0].token_ids,
        "threads": cores(),
        "seed": config.run.seed,
        "steps": steps,
        "batch": config.rollout.batch,
        "max_tokens": config.rollout.max_tokens,
        "rate": config.trainer.lr,
        "warmup": config.trainer.warmup_steps,
        "bf16": precision == "bf16",
        "save_at": [*range(asynchronous.EVERY, steps, asynchronous.EVERY), steps] if learns else [],
    }


def theirs(program: list[str], output: Path, task: Figures, config: RunConfig, size: Scale) -> Figures:
    """Figures of a script's run in `output`, and its learning curve where there is one.

    Raises DistillError with its errors when it fails.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "job.json").write_text(json.dumps({**task, "output": str(output)}))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_WAIT_POLICY")}
    env |= {"OMP_NUM_THREADS": str(task["threads"]), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [*program, str(output / "job.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    lines = read_lines(output / "steps.jsonl")
    if done.returncode != 0 or len(lines) != task["steps"]:
        how = f"{program[-1]} ended after {len(lines)} of {task['steps']} steps"
        raise DistillError(f"{how}:\n{done.stderr[-2000:]}")
    timed = lines[min(size.settled, len(lines) // 4) :]
    tokens = timed[-1]["generated"] - timed[0]["generated"]
    pace = tokens / (timed[-1]["time"] - timed[0]["time"])
    learned = asynchronous.curve(config, lambda step: output / f"step-{step}", lines) if size.learns else None
    speed = {"step_ms": median_gap_ms(timed), "trained_per_second": pace}
    return speed | (learned or dict.fromkeys(asynchronous.CURVE))


if __name__ == "__main__":
    command(run, table)
