"""What overlapping is worth: the quickstart one stage after the other, and all stages at once.

Both are the same code on the same models, prompts and seed, on the same two cores; `buffer.max_staleness`
tells them apart. The synchronous side gets both cores for whichever stage runs, or a thread per stage,
whichever is faster in short runs before the first trial. Trials take turns: noise hurts both alike.

Each is a quickstart as a user starts it, profiled from outside. Its versions are evaluated after the run:
while it is timed, no evaluator works beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import psutil
import torch
from kill_target import descendants, role_processes
from torch import Tensor

from distill import api, quickstart, tasks
from distill.config import RunConfig
from distill.config.loading import load_run_dir
from distill.config.prompts import TaskPrompts
from distill.evaluation.models import load_model, load_student
from distill.evaluation.reverse_kl import exact, head_of
from distill.launch.preflight import claim_of
from distill.prompts.sources import open_prompts
from distill.prompts.stream import Prompt
from distill.tasks.sort_letters import letter_tokenizer, untaught
from distill.tasks.teaching import Recipe, made_once, recipe_hash, save_pair
from sync.base.errors import DistillError
from sync.base.jsonl import read_lines
from sync.base.tokenizers import load_tokenizer, vocab_size
from sync.weights.subscribe import Subscriber
from sync.wire import Version
from teacher_service.engines.base import Item, ScoreOptions
from teacher_service.engines.transformers import TransformersEngine, completions, grow
from tests.benchmarks import limit
from tests.benchmarks.figures import Figures, Row, TrialCache, command, comparison, cores, crossing, medians

TARGET_KL: Final = 0.25
"""Nats per token, held out: every way gets there before the end."""
SETTLED: Final = 20
"""Steps left out of step times and rates: the first ones pay for warming up."""
EVERY: Final = 20
"""Steps between the versions that are evaluated."""
SAMPLE_SECONDS: Final = 0.5
LIST_EVERY: Final = 10
"""Samples between two listings of processes: listing costs more than reading their clocks."""
STEPS, SHORT = 240, 60
"""Of a trial, and of the runs that choose the synchronous layout."""
LAYOUT: Final = ("trainer.ranks=1", "evaluation=false", "tracking.wandb=disabled")
"""Both ways: one rank, as two would share two cores with the other roles."""
OVERLAPPED: Final = (*LAYOUT, "buffer.max_staleness=2")
ONE_THREAD: Final = (*LAYOUT, "buffer.max_staleness=0", "rollout.request_size=128")
TWO_THREADS: Final = (
    *ONE_THREAD,
    "teachers.sorter.threads=2",
    "trainer.threads=2",
    'student.env.OMP_NUM_THREADS="2"',
)
SYNCHRONOUS: Final = {"one thread per stage": ONE_THREAD, "two threads per stage": TWO_THREADS}
"""Layouts to choose from."""
ROWS: Final = {
    "step_ms": Row("ms per step, median", ".0f", -1),
    "mean_step_ms": Row("ms per step, mean", ".0f", -1),
    "seconds_to_target": Row(f"seconds to a reverse KL of {TARGET_KL}", ".1f", -1),
    "reverse_kl": Row("reverse KL at the end", ".3f"),
    "pass_rate": Row("pass rate at the end", ".1%"),
    "generated_per_second": Row("tokens generated per second", ",.0f", 1),
    "trained_per_second": Row("tokens trained per second", ",.0f", 1),
    "cpu_share": Row("cores busy with the run", ".1%"),
    "others_share": Row("cores busy with other programs", ".1%"),
    "age": Row("mean age, versions", ".2f"),
}
LARGE_STEPS, LARGE_SETTLED = 24, 8
LARGE: Final = (
    "rollout.batch=64",
    "rollout.max_tokens=48",
    "rollout.request_size=16",
    "rollout.max_in_flight=64",
    "buffer.score_batch=32",
    "teachers.sorter.dtype=bfloat16",
    "trainer.lr=1e-4",
)
"""A student of 14 M and a teacher of 25 M: on them the models, not the serving, take the time."""
SAMPLED_TOGETHER: Final = 512
BY_ROLE: Final = {"cpu_ms_per_step": "CPU ms per step", "idle_seconds": "idle seconds"}


# --- both ways -------------------------------------------------------------------------------------------


def run(folder: Path = Path("runs/bench-asynchronous"), seeds: int = 3) -> Figures:
    """Run what is missing in `folder`; every trial, and the medians. Raises DistillError when a run fails."""
    folder = folder.absolute()
    cache = TrialCache(folder / "trials.jsonl")
    short = {name: trial(cache, folder, words, 0, SHORT, measure) for name, words in SYNCHRONOUS.items()}
    best = min(short, key=lambda name: short[name]["step_ms"])
    ways = {"synchronous": SYNCHRONOUS[best], "asynchronous": OVERLAPPED}
    trials = side_by_side(cache, folder, ways, seeds, STEPS, measure_and_learned)
    models_alone = [*OVERLAPPED, *large_settings(0)]
    observe = partial(measure, settled=LARGE_SETTLED)
    return {
        "synchronous": best,
        "synchronous_step_ms": {name: one["step_ms"] for name, one in short.items()},
        "limit": limit_of(cache, OVERLAPPED),
        "large": {
            "limit": limit_of(cache, models_alone),
            "trial": trial(cache, folder, models_alone, 0, LARGE_STEPS, observe),
        },
        "medians": {way: summary(of) for way, of in trials.items()},
        "trials": trials,
    }


def limit_of(cache: TrialCache, words: Sequence[str]) -> Figures:
    """`limit.measured` of the quickstart with these overrides, or what is kept of it."""

    def make() -> Figures:
        path, settings = quickstart.source(0)
        return limit.measured(api.load_config(path, [*settings, *words]))

    return cache.get({"limit": words}, make)


def side_by_side(
    cache: TrialCache,
    folder: Path,
    ways: Mapping[str, Sequence[str]],
    seeds: int,
    steps: int,
    figures: Observe,
) -> dict[str, list[Figures]]:
    """Trials of every way, one of each seed; `ways`: name → overrides of the quickstart."""
    found: dict[str, list[Figures]] = {way: [] for way in ways}
    for seed in range(seeds):
        for way, words in ways.items():
            found[way].append(trial(cache, folder, words, seed, steps, figures))
    return found


def trial(
    cache: TrialCache, folder: Path, words: Sequence[str], seed: int, steps: int, figures: Observe
) -> Figures:
    """`figures` of one run, or what is kept of them."""

    def make() -> Figures:
        return figures(folder / "trial", run_quickstart(folder, "trial", seed, steps, words))

    return cache.get({"seed": seed, "steps": steps, "settings": words}, make)


def summary(trials: Sequence[Figures], rows: Iterable[str] = ROWS) -> Figures:
    """Medians over the seeds, None where a seed has none; of roles as "cpu_ms_per_step trainer"."""
    found = medians(trials, rows)
    for name in BY_ROLE:
        for role in trials[0][name]:
            found[f"{name} {role}"] = median(one[name].get(role, 0.0) for one in trials)
    return found


def table(report: Figures) -> str:
    """The medians side by side, as Markdown; a ratio above 1: the asynchronous way is better."""
    ways = report["medians"]
    rows = dict(ROWS)
    for key in ways["synchronous"].keys() - ROWS.keys():
        name, role = key.split(" ", 1)
        rows[key] = Row(f"{BY_ROLE[name]}: {role}")
    times = ", ".join(f"{name} {ms:.0f}" for name, ms in report["synchronous_step_ms"].items())
    head = f"medians; synchronous: {report['synchronous']} (ms per step: {times})"
    ends = [share_of_limit("quickstart", report["limit"], {way: of["step_ms"] for way, of in ways.items()})]
    alone = report["large"]
    ends.append(share_of_limit("14 M", alone["limit"], {"asynchronous": alone["trial"]["step_ms"]}))
    return "\n".join([head, "", *comparison(ways, rows), "", *ends])


def share_of_limit(name: str, least: Figures, step_ms: Mapping[str, float]) -> str:
    """A line of the table; `step_ms`: way → ms of a step."""
    costs = ", ".join(f"{one} {ms:.0f}" for one, ms in least["ms"].items())
    shares = ", ".join(f"{way} {ms:.0f} ms, {least['limit_ms'] / ms:.2f}" for way, ms in step_ms.items())
    return f"{name}: a step takes at least {least['limit_ms']:.0f} ms ({costs}); time, share of it: {shares}"


def large_settings(seed: int) -> list[str]:
    """Overrides of the quickstart: LARGE, and models with random weights, made once."""
    shape = {"layers": 8, "steps": 0, "rows": 0, "rate": 0.0, "muon": False, "both_choices": False}
    student = Recipe(width=384, heads=12, kv_heads=6, feed_forward=1152, **shape)  # type: ignore[arg-type]
    teacher = Recipe(width=512, heads=16, kv_heads=8, feed_forward=1536, **shape)  # type: ignore[arg-type]

    def make(unfinished: Path) -> None:
        torch.manual_seed(seed)
        save_pair(unfinished, letter_tokenizer(), teacher=untaught(teacher), student=untaught(student))

    name = f"large-{recipe_hash((teacher, student), seed, (__file__,))}"
    pair = made_once(quickstart.CACHE.absolute() / name, make)
    return [*LARGE, f"student.path={pair.student}", f"teachers.sorter.path={pair.teacher}"]


# --- a run under observation ------------------------------------------------------------------------------


class CpuProfile:
    """CPU seconds of a tree of processes and of the machine, sampled."""

    def __init__(self, samples: Sequence[tuple[float, dict[str, float]]] = ()) -> None:
        self.samples = list(samples)
        """(seconds since the epoch, {role or "machine": seconds used up to then})."""

    def between(self, began: float, ended: float) -> dict[str, float]:
        """Seconds of every role, and of the machine, between two moments."""
        times = [at for at, _ in self.samples]
        found = {}
        for role in {role for _, used in self.samples for role in used}:
            used = np.maximum.accumulate([used.get(role, 0.0) for _, used in self.samples])
            found[role] = float(np.diff(np.interp([began, ended], times, used))[0])
        return found

    def watch(self, pid: int, done: threading.Event) -> None:
        """Sample the launcher with this process id and its roles, until `done`."""
        roles: dict[str, list[psutil.Process]] = {}
        while not done.wait(SAMPLE_SECONDS):
            if len(self.samples) % LIST_EVERY == 0:
                roles = _processes(pid)
            used = {role: sum(map(_cpu_seconds, processes)) for role, processes in roles.items()}
            self.samples.append((time.time(), used | {"machine": _machine_seconds()}))


def _processes(pid: int) -> dict[str, list[psutil.Process]]:
    """Of every role, with those that they started themselves, such as an engine's core."""
    found = {role: set(own) for role, own in role_processes(pid).items()}
    for own in found.values():
        own |= {child for one in list(own) for child in descendants(one.pid)}
    if psutil.pid_exists(pid):
        found["controller"] = {psutil.Process(pid)}
    return {role: list(own) for role, own in found.items()}


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "steal", 0.0))


def run_quickstart(folder: Path, name: str, seed: int, steps: int, settings: Sequence[str]) -> CpuProfile:
    """Run the quickstart for so many steps in `folder`/`name`. Raises DistillError when it fails."""
    every = [f"run.folder={folder}", f"run.name={name}", f"run.steps={steps}", *settings]
    return profiled(["quickstart", "--seed", str(seed), *(word for one in every for word in ("--set", one))])


def profiled(words: Sequence[str]) -> CpuProfile:
    """Run `distill` with these arguments to its end. Raises DistillError with its output when it fails."""
    command = [sys.executable, "-P", "-m", "distill.cli.main", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    profile, done = CpuProfile(), threading.Event()
    sampler = threading.Thread(target=profile.watch, args=(process.pid, done))
    sampler.start()
    try:
        output, _ = process.communicate()
    finally:
        done.set()
        sampler.join()
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise DistillError(f"distill {' '.join(words)} ended with {process.returncode}:\n{output[-2000:]}")
    return profile


# --- its figures ------------------------------------------------------------------------------------------

Observe = Callable[[Path, CpuProfile], Figures]
"""Figures of a finished run in a folder, of which a profile was taken."""


def step_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, one per optimizer step."""
    return [line for line in read_lines(run_dir / "metrics.jsonl") if "train/loss" in line]


def median_gap_ms(lines: Sequence[Mapping[str, float]]) -> float:
    """Between two steps."""
    return 1000 * median(b["time"] - a["time"] for a, b in pairwise(lines))


def measure(run_dir: Path, profile: CpuProfile, settled: int = SETTLED) -> Figures:
    """Speed, load and waiting of a finished run, after its first `settled` steps.

    cpu_share, others_share: of all cores, used by the run and by everything else; a trial is worth little
    where the latter is high. idle_seconds: of the whole run, by role. age: mean of what was trained on.
    """
    lines = step_lines(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    first, last, count = lines[settled], lines[-1], len(lines) - settled - 1
    wall, used = last["time"] - first["time"], profile.between(first["time"], last["time"])
    machine = used.pop("machine")
    busy = sum(used.values())
    return {
        "step_ms": median_gap_ms(lines[settled:]),
        "mean_step_ms": 1000 * wall / count,
        "cpu_ms_per_step": {role: 1000 * seconds / count for role, seconds in used.items()},
        "cpu_share": busy / wall / cores(),
        "others_share": (machine - busy) / wall / cores(),
        "generated_per_second": (last["rollout/tokens_total"] - first["rollout/tokens_total"]) / wall,
        "trained_per_second": (last["train/tokens_total"] - first["train/tokens_total"]) / wall,
        "idle_seconds": summary["perf"]["idle_seconds"],
        "age": summary["buffer"]["age_mean"],
    }


def measure_and_learned(run_dir: Path, profile: CpuProfile) -> Figures:
    """`measure` and `learned`."""
    return measure(run_dir, profile) | learned(run_dir)


def learned(run_dir: Path) -> Figures:
    """The learning curve of a finished run, evaluated now: see `curve`."""
    config, lines = load_run_dir(run_dir), step_lines(run_dir)
    return curve(config, Subscriber(config.subscriber("evaluator"), claim_of(config)).folder, lines)


def curve(
    config: RunConfig, saved: Callable[[Version], Path], lines: Sequence[Mapping[str, float]]
) -> Figures:
    """Quality of versions of the first lineage over seconds since the first step, and at the end.

    `saved`: the model folder of a version after the first, which is the student's own. `lines`: of the steps,
    with "step" and "time". Always the same held-out prompts with the same randomness. Raises SnapshotError
    for a version that is not there.
    """
    assert isinstance(config.prompts, TaskPrompts), "the quickstart's prompts are a task's"
    tokenizer = load_tokenizer(config.student)
    held_out = open_prompts(limit.with_evaluation(config), tokenizer).held_out
    passes = tasks.load(config.prompts.task, config.prompts.options).passes
    limits = config.rollout.max_tokens, (tokenizer.eos_token_id,)
    teacher = TransformersEngine(
        load_model(next(iter(config.teachers.values())), "cpu"), vocab_size(tokenizer)
    )
    torch.set_num_threads(1)
    points = []
    for step in [*range(0, len(lines), EVERY), len(lines)]:
        folder = saved(Version(0, step)) if step > 0 else None
        student = load_student(config.student, folder, "cpu")
        found = evaluate(student, teacher, held_out, limits, passes, config.run.seed)
        seconds = lines[max(step, 1) - 1]["time"] - lines[0]["time"]
        points.append((seconds, found["reverse_kl"], found["pass_rate"]))
    return {
        "seconds_to_target": crossing([point[:2] for point in points], TARGET_KL),
        "reverse_kl": points[-1][1],
        "pass_rate": points[-1][2],
        "curve": points,
    }


@torch.inference_mode()
def evaluate(
    model: Any,
    teacher: TransformersEngine,
    prompts: Sequence[Prompt],
    limits: tuple[int, tuple[int, ...]],
    passes: Callable[[Prompt, Sequence[int]], float],
    seed: int,
) -> Figures:
    """reverse_kl, exact, and pass_rate; the same seed gives the same completions of the same model.

    `limits`: most tokens of a completion, and the ids that end it.
    """
    vocab, generator = teacher.engine_info.vocab_size, torch.Generator().manual_seed(seed)
    student, options = TransformersEngine(model, vocab), ScoreOptions(hidden=True)
    student_head, teacher_head = (
        head_of(engine.head(), torch.device("cpu")) for engine in (student, teacher)
    )

    def draw(logits_BV: Tensor) -> Tensor:
        return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)

    total, tokens, passed = 0.0, 0, 0
    ordered = sorted(prompts, key=lambda prompt: len(prompt.token_ids))
    for start in range(0, len(ordered), SAMPLED_TOGETHER):
        batch = ordered[start : start + SAMPLED_TOGETHER]
        growing = grow(model, vocab, [prompt.token_ids for prompt in batch], limits[1], limits[0], draw)
        sampled = completions(deque(growing, maxlen=1)[0])
        items = [
            Item(np.array([*prompt.token_ids, *ids], np.int32), len(prompt.token_ids))
            for prompt, ids in zip(batch, sampled, strict=True)
        ]
        hidden = [engine.score(items, options).hidden_CH for engine in (student, teacher)]
        student_NH, teacher_NH = (torch.from_numpy(states) for states in hidden if states is not None)
        values_N = exact(student_head, student_NH, teacher_head, teacher_NH)
        total, tokens = total + float(values_N.astype(np.float64).sum()), tokens + len(values_N)
        passed += sum(passes(prompt, ids) > 0 for prompt, ids in zip(batch, sampled, strict=True))
    return {"reverse_kl": total / tokens, "pass_rate": passed / len(prompts)}


if __name__ == "__main__":
    command("asynchronous", run, table)
