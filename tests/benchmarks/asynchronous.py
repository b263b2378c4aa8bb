"""What overlapping is worth: the quickstart one stage after the other, and all stages at once.

All ways are the same code on the same models, prompts and seed, on the same cores; `buffer.max_staleness`
tells them apart. The synchronous side gets a thread per stage or two, and is shown by whichever is faster.
Trials take turns: noise hurts all alike.

Each is a quickstart as a user starts it, profiled from outside. Its versions are evaluated after the run:
while it is timed, no evaluator works beside it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import psutil
import torch
import typer
from torch import Tensor

from distill import api, quickstart, tasks
from distill.config import RunConfig
from distill.config.loading import load_run_dir
from distill.config.prompts import TaskPrompts
from distill.evaluation.models import load_model, load_student
from distill.evaluation.probes import LanguageModel, log_probs
from distill.launch.preflight import claim_of
from distill.prompts.sources import open_prompts
from distill.prompts.stream import Prompt
from sync.base.tokenizers import load_tokenizer, vocab_size
from sync.weights.subscribe import Subscriber
from sync.wire import ScoreSequence, Version, pack
from teacher_service.engines.head import find_head
from teacher_service.engines.transformers import completions, grow
from tests.benchmarks import limit
from tests.benchmarks.figures import (
    POLL_SECONDS,
    Figures,
    Folder,
    Seeds,
    TrialCache,
    command,
    comparison,
    cores,
    cpu_seconds,
    listing,
    median_gap_ms,
    medians,
    role_families,
    run_quickstart,
    step_lines,
)
from tests.benchmarks.limit import SCALES, ScaleName

TARGET_KL: Final = 0.25
"""Nats per token, held out: every way gets there before the end."""
EVERY: Final = 20
"""Steps between the versions that are evaluated."""
LIST_EVERY: Final = round(5 / POLL_SECONDS)
"""Samples between two listings of processes: listing costs more than reading their clocks."""
LAYOUT: Final = ("trainer.ranks=1", "evaluation=false", "tracking.wandb=disabled")
"""Every way: one rank, as two would share two cores with the other roles."""
OVERLAPPED: Final = (*LAYOUT, "buffer.max_staleness=2")
ONE_THREAD: Final = (*LAYOUT, "buffer.max_staleness=0", "rollout.request_size=128")
TWO_THREADS: Final = ("teachers.sorter.threads=2", "trainer.threads=2", 'student.env.OMP_NUM_THREADS="2"')
WAYS: Final = {
    "synchronous, a thread per stage": ONE_THREAD,
    "synchronous, two threads": (*ONE_THREAD, *TWO_THREADS),
    "asynchronous": OVERLAPPED,
}
ROWS: Final[dict[str, tuple[str, int]]] = {
    "step_ms": ("ms per step, median", -1),
    "mean_step_ms": ("ms per step, mean", -1),
    "seconds_to_target": (f"seconds to a reverse KL of {TARGET_KL}", -1),
    "reverse_kl": ("reverse KL at the end", 0),
    "pass_rate": ("pass rate at the end", 0),
    "generated_per_second": ("tokens generated per second", 1),
    "trained_per_second": ("tokens trained per second", 1),
    "others_share": ("share of the cores that other programs used", 0),
    "age": ("mean age, versions", 0),
}
TrialSteps = Annotated[int, typer.Option(min=0, help="Steps of a trial; 0: 240 of the toy, 24 of the other.")]


def run(
    folder: Folder = Path("runs/bench-asynchronous"),
    scale: ScaleName = "toy",
    seeds: Seeds = 3,
    steps: TrialSteps = 0,
) -> Figures:
    """Run the quickstart synchronously and asynchronously, and print what overlapping is worth."""
    folder, steps = folder.absolute(), steps or SCALES[scale].steps
    cache, trials = TrialCache(folder), {way: list[Figures]() for way in WAYS}
    for seed in range(seeds):
        for way, settings in WAYS.items():
            words = [*settings, *limit.settings_of(scale, seed)]
            make = partial(trial, folder / "trial", words, seed, steps, SCALES[scale])
            trials[way].append(cache.get({"seed": seed, "steps": steps, "settings": words}, make))
    words = [*OVERLAPPED, *limit.settings_of(scale, 0)]
    path, settings = quickstart.source(0)
    make = partial(limit.measured, api.load_config(path, [*settings, *words]))
    ways = {way: summary(of) for way, of in trials.items()}
    return {"limit": cache.get({"limit": words}, make), "medians": ways, "trials": trials}


def trial(run_dir: Path, settings: Sequence[str], seed: int, steps: int, scale: limit.Scale) -> Figures:
    """Figures of one run, and its learning curve where there is one."""
    profile = CpuProfile()
    run_quickstart(run_dir, seed, steps, settings, profile.sample)
    figures = measure(run_dir, profile, min(scale.settled, steps // 4))
    return figures | (learned(run_dir) if scale.learns else dict.fromkeys(CURVE))


def summary(trials: Sequence[Figures]) -> Figures:
    """Medians over the seeds, None where a seed has none; of roles as "CPU ms per step: trainer"."""
    flat = [
        trial | {f"CPU ms per step: {role}": ms for role, ms in trial["cpu_ms_per_step"].items()}
        for trial in trials
    ]
    names = [name for name in flat[0] if name in ROWS or ": " in name]
    return medians([dict.fromkeys(names, 0.0) | trial for trial in flat], names)


def table(report: Figures) -> str:
    """The medians side by side, as Markdown; a ratio above 1: the asynchronous way is better."""
    ways, bound = report["medians"], report["limit"]
    old, new = min(list(WAYS)[:2], key=lambda way: ways[way]["step_ms"]), list(WAYS)[2]
    rows = ROWS | {name: (name, 0) for name in ways[new] if ": " in name}
    shares = {way: bound["limit_ms"] / figures["step_ms"] for way, figures in ways.items()}
    return "\n".join(
        [*comparison(old, new, ways, rows), "", *listing([{"limit, ms": bound["limit_ms"]} | shares])]
    )


# --- a run under observation ------------------------------------------------------------------------------


class CpuProfile:
    """CPU seconds of a run's processes and of the machine, sampled."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, dict[str, float]]] = []
        """(seconds since the epoch, {role or "machine": seconds used up to then})."""
        self._roles: dict[str, set[psutil.Process]] = {}

    def sample(self, launcher: int) -> None:
        """Read the clocks of the launcher with this process id and of its roles."""
        if len(self._samples) % LIST_EVERY == 0:
            self._roles = role_families(launcher)
        used = {role: cpu_seconds(processes) for role, processes in self._roles.items()}
        used["controller"] = cpu_seconds([psutil.Process(launcher)]) if psutil.pid_exists(launcher) else 0.0
        times = psutil.cpu_times()
        used["machine"] = sum(times) - times.idle - getattr(times, "iowait", 0) - getattr(times, "steal", 0)
        self._samples.append((time.time(), used))

    def between(self, began: float, ended: float) -> dict[str, float]:
        """Seconds of every role, and of the machine, between two moments."""
        times, seconds = [at for at, _ in self._samples], {}
        for role in {role for _, used in self._samples for role in used}:
            used = np.maximum.accumulate([used.get(role, 0.0) for _, used in self._samples])
            seconds[role] = float(np.diff(np.interp([began, ended], times, used))[0])
        return seconds


def measure(run_dir: Path, profile: CpuProfile, settled: int) -> Figures:
    """Speed, load and waiting of a finished run, after its first `settled` steps.

    others_share: of all cores, used by other programs; a trial is worth little where it is high. age: mean of
    what was trained on.
    """
    lines, report = step_lines(run_dir), json.loads((run_dir / "summary.json").read_text())
    first, last, count = lines[settled], lines[-1], len(lines) - settled - 1
    wall, used = last["time"] - first["time"], profile.between(first["time"], last["time"])
    others = used.pop("machine") - sum(used.values())
    return {
        "step_ms": median_gap_ms(lines[settled:]),
        "mean_step_ms": 1000 * wall / count,
        "cpu_ms_per_step": {role: 1000 * seconds / count for role, seconds in used.items()},
        "others_share": others / wall / cores(),
        "generated_per_second": (last["rollout/tokens_total"] - first["rollout/tokens_total"]) / wall,
        "trained_per_second": (last["train/tokens_total"] - first["train/tokens_total"]) / wall,
        "age": report["buffer"]["age_mean"],
    }


# --- what was learned -------------------------------------------------------------------------------------

CURVE: Final = ("seconds_to_target", "reverse_kl", "pass_rate")


def learned(run_dir: Path) -> Figures:
    """The learning curve of a finished run, evaluated now: see `curve`."""
    config = load_run_dir(run_dir)
    saved = Subscriber(config.subscriber("evaluator"), claim_of(config)).folder
    return curve(config, lambda step: saved(Version(0, step)), step_lines(run_dir))


def curve(config: RunConfig, saved: Callable[[int], Path], lines: Sequence[Mapping[str, float]]) -> Figures:
    """CURVE: quality of versions of the first lineage over seconds since the first step, and at the end.

    `saved`: the model folder after a step; that of step 0 is the student's own. `lines`: of the steps, with
    "time". Always the same held-out prompts with the same randomness. Raises SnapshotError for a version that
    is not there.
    """
    assert isinstance(config.prompts, TaskPrompts), "the quickstart's prompts are a task's"
    tokenizer = load_tokenizer(config.student)
    held_out = open_prompts(limit.with_evaluation(config), tokenizer).held_out
    passes = tasks.load(config.prompts.task, config.prompts.options).passes
    ends, vocab = (tokenizer.eos_token_id,), vocab_size(tokenizer)
    torch.set_num_threads(1)
    source = load_model(next(iter(config.teachers.values())), "cpu")
    teacher = LanguageModel(source, find_head(source, vocab))
    points = []
    for step in [*range(0, len(lines), EVERY), len(lines)]:
        model = load_student(config.student, saved(step) if step else None, "cpu")
        student = LanguageModel(model, find_head(model, vocab))
        sampled = sample(student, held_out, config.rollout.max_tokens, ends, config.run.seed)
        passed = sum(passes(prompt, ids) > 0 for prompt, ids in zip(held_out, sampled, strict=True))
        seconds = lines[max(step, 1) - 1]["time"] - lines[0]["time"]
        points.append((seconds, reverse_kl(student, teacher, held_out, sampled), passed / len(held_out)))
    seconds_to_target = None
    for (x0, y0, _), (x1, y1, _) in pairwise(points):
        if seconds_to_target is None and y0 > TARGET_KL >= y1:
            seconds_to_target = x0 + (x1 - x0) * (y0 - TARGET_KL) / (y0 - y1)
    return dict(zip(CURVE, (seconds_to_target, *points[-1][1:]), strict=True)) | {"curve": points}


def sample(
    student: LanguageModel, prompts: Sequence[Prompt], longest: int, ends: tuple[int, ...], seed: int
) -> list[list[int]]:
    """Completions at temperature 1; the same seed gives the same ones of the same model."""
    generator = torch.Generator().manual_seed(seed)

    def draw(logits_BV: Tensor) -> Tensor:
        return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)

    vocab, asked = len(student.head.weight_VH), [prompt.token_ids for prompt in prompts]
    with torch.inference_mode():
        growing: Any = grow(student.model, vocab, asked, ends, longest, draw)
        return completions(deque(growing, maxlen=1)[0])


@torch.inference_mode()
def reverse_kl(
    student: LanguageModel,
    teacher: LanguageModel,
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[int]],
) -> float:
    """Exact, nats per token of the completions."""
    total = 0.0
    for prompt, ids in zip(prompts, sampled, strict=True):
        tokens = pack(np.array([*prompt.token_ids, *ids], np.int32))
        sequence = ScoreSequence("", tokens, len(prompt.token_ids))
        logp_TV, logq_TV = (log_probs(model, sequence) for model in (student, teacher))
        total += float((logp_TV.exp() * (logp_TV - logq_TV)).sum())
    return total / sum(map(len, sampled))


if __name__ == "__main__":
    command(run, table)
