"""The same distillation by TRL, by a plain loop of vLLM and PyTorch, and by us, in turns on the same cores.

Same models, prompts in the same order, batch, steps, optimizer, schedule and objective (reverse KL over the
whole vocabulary, temperature 1). Ours is the asynchronous run of `asynchronous`; the others get all cores for
their one process. Each is timed behind its first steps, in the precision that is faster in a few before (fp32
where bare products are). pip makes TRL's environment inside the folder, once. At the scale `rewards` its
`GRPOTrainer` stands beside configs/rewards.toml. Else the limit of a step follows (`asynchronous`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from distill.config import RunConfig
from distill.config.loading import load
from distill.hardware import core
from distill.prompts.sources import open_prompts
from distill.prompts.stream import PromptStream
from sync.base.errors import DistillError
from sync.base.jsonl import read_lines
from sync.base.tokenizers import load_tokenizer
from tests.benchmarks import asynchronous, figures
from tests.benchmarks.asynchronous import CURVE, EVERY, OVERLAPPED, SCALES, Scale
from tests.benchmarks.figures import Figures, TrialCache, cores

REQUIREMENTS: Final = (
    *("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0"),
    *(f"{name}=={metadata.version(name)}" for name in ("torch", "transformers")),
)
"""Of TRL's environment, with our own torch and transformers."""
PeerScale = Annotated[
    Literal["toy", "large", "real", "rewards"],
    typer.Option(help="Models as in `asynchronous`, or rewards alone at 135 M parameters."),
]
Against = Annotated[Literal["TRL", "loop", "both"], typer.Option(help="Rewards alone: always TRL.")]
ROWS: Final = {name: asynchronous.ROWS[name] for name in ("step_ms", "trained_per_second", *CURVE)}


def run(
    folder: figures.Folder = Path("runs/bench-peers"),
    scale: PeerScale = "toy",
    seeds: figures.Seeds = 2,
    against: Against = "both",
) -> Figures:
    """Run the same distillation in TRL, in a plain loop and here; compare speed and what was learned."""
    cache, size = TrialCache(folder), SCALES[scale]
    sides = ["TRL"] if scale == "rewards" else [side for side in ("TRL", "loop") if against in (side, "both")]
    pythons = {"TRL": environment(cache.folder / "trl") if "TRL" in sides else "", "loop": sys.executable}

    def trial(side: str, seed: int, precision: str, size: Scale) -> Figures:
        path, overrides = source = asynchronous.source(scale, seed)
        words = settings(size, precision)
        if side == "ours":
            name = f"ours-{scale}-{seed}-{precision}-{size.steps}"
            return asynchronous.trial(cache, name, source, words, size)
        config = load(path, [*overrides, *words])
        task = job(config, size, precision == "bf16")
        program = [pythons[side], "-P", str(Path(__file__).with_name("peer_loops.py")), side]
        make = partial(theirs, program, cache.folder / "theirs", task, config, size)
        return cache.get({"side": side, "requirements": REQUIREMENTS, "job": task}, make)

    trials, precision = dict[str, list[Figures]](), dict[str, str]()
    for side in (*sides, "ours"):
        probe = size._replace(learns=False, steps=size.probe_steps)
        precisions = ("fp32",) if core().gain < 1 else ("bf16", "fp32")
        ms = {name: trial(side, 0, name, probe)["step_ms"] for name in precisions}
        precision[side], trials[side] = min(ms, key=ms.__getitem__), []
    for seed in range(seeds):
        for side, of in trials.items():
            of.append(trial(side, seed, precision[side], size))
    by_side = {side: figures.medians(of, ROWS) for side, of in trials.items()}
    report = {"cores": cores(), "precision": precision, "medians": by_side, "trials": trials}
    if scale != "rewards":
        report["limit"] = asynchronous.limit(cache, trials["ours"][0], size)
    return report


def settings(size: Scale, precision: str) -> list[str]:
    """Of our run in a precision; TRL and the loop have a flag. The toy's teacher is fp32 in both."""
    fp32 = ["student.dtype=float32", 'trainer.overrides={"bf16.enabled"=false}']
    fp32 += [f"teachers.{size.teacher}.dtype=float32"] if size.teacher else []
    return [*OVERLAPPED, "run.precision=as_set", *(fp32 if precision == "fp32" else ())]


def table(report: Figures) -> str:
    """The medians side by side, as Markdown; a ratio above 1: ours is better."""
    lines = [", ".join(f"{side} in {name}" for side, name in report["precision"].items())]
    for side in [*report["medians"]][:-1]:
        lines += ["", *figures.comparison(side, "ours", report["medians"], ROWS)]
    if "limit" in report:
        lines += ["", *asynchronous.limit_table(report["limit"], report["trials"]["ours"][0])]
    return "\n".join(lines)


def environment(folder: Path) -> str:
    """The Python of an environment with TRL, made by pip as it is configured here unless it is there."""
    python, stamp = str(folder / "bin" / "python"), folder / "installed.json"
    if not stamp.is_file() or json.loads(stamp.read_text()) != list(REQUIREMENTS):
        finish([sys.executable, "-m", "venv", "--clear", str(folder)])
        finish([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS])
        stamp.write_text(json.dumps(REQUIREMENTS))
    return python


def finish(words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a command. Raises DistillError with its errors when it fails."""
    if (done := subprocess.run(words, capture_output=True, text=True, check=False, env=env)).returncode:
        raise DistillError(f"{' '.join(words[:5])} … failed:\n{done.stderr[-2000:]}")


def job(config: RunConfig, size: Scale, bf16: bool) -> Figures:
    """The job of `peer_loops`: models, prompts in our order, and our optimizer's numbers."""
    teacher, task = next(iter(config.teachers.values()), None), config.objective.task
    steps, rollout, tokenizer = size.steps, config.rollout, load_tokenizer(config.student)
    stream = PromptStream(open_prompts(config, tokenizer).train, config.run.seed)
    prompts = stream.take(steps * rollout.batch // rollout.per_prompt)
    return {
        "student": config.student.path,
        "teacher": teacher and teacher.path,
        "prompts": [tokenizer.decode(prompt.token_ids) for prompt in prompts],
        "first_prompt": prompts[0].token_ids,
        "answers": [(prompt.answer or "").rpartition(" ")[2] for prompt in prompts],
        "clip": task and task.clip,
        **{name: getattr(rollout, name) for name in ("batch", "per_prompt", "max_tokens")},
        **{name: getattr(config.trainer, name) for name in ("lr", "warmup_steps")},
        "seed": config.run.seed,
        "steps": steps,
        "threads": cores(),
        "bf16": bf16,
        "save_at": [*range(EVERY, steps, EVERY), steps] if size.learns else [],
    }


def theirs(program: list[str], output: Path, task: Figures, config: RunConfig, size: Scale) -> Figures:
    """Figures of a loop's run in `output`, and its learning curve where there is one."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "job.json").write_text(json.dumps({**task, "output": str(output)}))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_WAIT_POLICY")}
    env |= {"OMP_NUM_THREADS": str(task["threads"]), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    finish([*program, str(output / "job.json")], env)
    lines = read_lines(output / "steps.jsonl")
    return asynchronous.measured(lines, size, config, lambda step: output / f"step-{step}")


if __name__ == "__main__":
    figures.command(run, table)
