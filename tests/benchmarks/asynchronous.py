"""What overlapping is worth: the quickstart one stage after the other, and all stages at once.

All ways are the same code on the same models, prompts and seed, on the same cores; `buffer.max_staleness`
tells them apart. The synchronous side gets a thread per stage or two, and is shown by whichever is faster.
Trials take turns: noise hurts all alike. Versions are evaluated after a run: while it is timed, no evaluator
works beside it. The scale `real` needs the folders that `make real` makes.

Beside them stands what a step cannot be faster than: its three computations, each alone, plain, on one core.
vLLM generates offline, the teacher makes a forward pass, the trainer's step is AdamW's without ZeRO, with the
precision and the rows of the run, for one of its batches of typical length. A run whose roles overlap
perfectly and that computes nothing else takes the longest of the three, or their sum over the cores,
whichever is more; with n threads one takes 1/n. What the run's processes took stands beside it, by role.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import torch
import typer
from msgspec.structs import replace
from plain_step import ALONE, PlainEngine
from recorded import rollouts_of
from transformers import AutoModelForCausalLM

from distill import quickstart, tasks
from distill.batching.packing import Shape, pack_batch
from distill.buffer import Batch
from distill.config import RunConfig
from distill.config.evaluation import EvaluationConfig
from distill.evaluation.evaluator import exact
from distill.evaluation.models import load_model
from distill.launch import replica_command
from distill.launch.preflight import claim_of
from distill.metrics.results import read_run
from distill.metrics.summary import threads
from distill.prompts.sources import open_prompts
from distill.record.rollout import Rollout
from distill.tasks.sort_letters import lesson_loss, letter_tokenizer
from distill.tasks.teaching import Recipe, taught_pair
from student_trainer.deepspeed_json import deepspeed_config, in_bf16
from student_trainer.engine import Student, head_shape
from student_trainer.objectives.config import needs
from student_trainer.step import loss_of, train_step
from student_trainer.varlen import replace_attention
from sync.base.tokenizers import load_tokenizer, vocab_size
from sync.weights.subscribe import Subscriber
from sync.wire import Scored, ScoreRequest, ScoreSequence, Version, VersionSpan, encode, unpack
from sync.wire.head import OutputHead
from teacher_service.batching import split
from teacher_service.engines.base import EnginePrompt, GenerationParams, Item, ScoreOptions
from teacher_service.engines.head import find_head
from teacher_service.engines.transformers import TransformersEngine
from teacher_service.messages import read_score
from tests.benchmarks import ROOT, figures
from tests.benchmarks.figures import Figures, TrialCache

STEPS_AT_ONCE: Final = 4
"""Batches that vLLM is given together, so that it seldom has less than `max-num-seqs` to do."""
OFFLINE: Final[dict[str, Any]] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "distributed_executor_backend": "uni",
    "logprobs_mode": "processed_logprobs",
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 1 << 30,
}
"""Options of vLLM, unless the student says other."""
RATE: Final = 1e-6  # weights change, lengths do not


class Scale(NamedTuple):
    """A size of models, and of what is done with them."""

    steps: int
    rounds: int = 15  # of each computation alone
    probe_steps: int = 12  # of the runs that choose a precision
    teacher: str = "sorter"
    learns: bool = False  # whether versions are evaluated; else speed is all that is compared


LARGE: Final = (
    *("rollout.batch=64", "rollout.max_tokens=48", "rollout.request_size=16", "rollout.max_in_flight=64"),
    *("buffer.score_batch=32", "teachers.sorter.dtype=bfloat16", "trainer.lr=1e-4"),
)
"""A student of 14 M and a teacher of 25 M: on them the models, not the serving, take the time."""
DEEP: Final = partial(Recipe, layers=8, steps=0)
LARGE_PAIR: Final = (
    DEEP(width=512, heads=16, kv_heads=8, feed_forward=1536),
    DEEP(width=384, heads=12, kv_heads=6, feed_forward=1152),
)
REAL: Final = ROOT / ".cache" / "real"  # of `make real`: prompts, a student of 113 M, a teacher of 135 M
SCALES: Final = {
    "toy": Scale(240, learns=True),
    "large": Scale(24),
    "real": Scale(14, 2, 5, "smollm2"),
    "rewards": Scale(24, 0, 6, ""),
}
ScaleName = Annotated[
    Literal["toy", "large", "real"],
    typer.Option(help="Models of 0.2 M and 0.6 M parameters, of 14 M and 25 M, or of 113 M and 135 M."),
]


def source(scale: str, seed: int) -> tuple[Path, list[str]]:
    """A file and its overrides: the quickstart, at the scale `large` with models of random weights that are
    made once, or a recipe for the real models, which may be the one of rewards alone."""
    if scale in ("toy", "large"):
        path, overrides = quickstart.source(seed)
        if scale == "large":
            cache = quickstart.CACHE.absolute()
            pair = taught_pair(cache, seed, __file__, LARGE_PAIR, letter_tokenizer(), lesson_loss)
            overrides += [*LARGE, f"student.path={pair.student}", f"teachers.sorter.path={pair.teacher}"]
        return path, overrides
    teacher = REAL / "teacher"
    models = {"student.path": teacher, "prompts.options.tokenizer": teacher}
    if scale == "real":
        models = {"student.path": REAL / "student-24", "teachers.smollm2.path": teacher}
        models["prompts.path"] = REAL / "prompts.jsonl"
    paths = models | {"trainer.deepspeed": ROOT / "configs/deepspeed/zero3_cpu.json"}
    file = ROOT / "configs" / {"real": "small_model.toml", "rewards": "rewards.toml"}[scale]
    return file, [f"run.seed={seed}", *(f"{key}={path}" for key, path in paths.items())]


TARGET_KL: Final = 0.25  # nats per token, held out: every way gets there before the end
EVERY: Final = 20  # steps between the versions that are evaluated
LAYOUT: Final = ("trainer.ranks=1", "evaluation=false", "tracking.wandb=disabled")
"""Every way: one rank, as two would share two cores with the other roles."""
OVERLAPPED: Final = (*LAYOUT, "buffer.max_staleness=2")
IN_TURNS: Final = (*LAYOUT, "buffer.max_staleness=0", "rollout.request_size=128")
ROLES: Final = ("student", "trainer", "teachers.{}")
WAYS: Final = {
    "synchronous": (*IN_TURNS, *(f"{role}.threads=1" for role in ROLES)),
    "synchronous-two-threads": (*IN_TURNS, *(f"{role}.threads=2" for role in ROLES)),
    "asynchronous": OVERLAPPED,
}
CURVE: Final = ("seconds_to_target", "reverse_kl", "pass_rate")
ROWS: Final[dict[str, tuple[str, int]]] = {
    "step_ms": ("ms per step, median", -1),
    "mean_step_ms": ("ms per step, mean", -1),
    "seconds_to_target": (f"seconds to a reverse KL of {TARGET_KL}", -1),
    "reverse_kl": ("reverse KL at the end", 0),
    "pass_rate": ("pass rate at the end", 0),
    "generated_per_second": ("tokens generated per second", 1),
    "trained_per_second": ("tokens trained per second", 1),
    "age": ("mean age, versions", 0),
}


def run(
    folder: figures.Folder = Path("runs/bench-asynchronous"),
    scale: ScaleName = "toy",
    seeds: figures.Seeds = 3,
) -> Figures:
    """Run the same synchronously and asynchronously, and print what overlapping is worth."""
    cache, size, trials = TrialCache(folder), SCALES[scale], {way: list[Figures]() for way in WAYS}
    for seed, way in itertools.product(range(seeds), WAYS):
        words = [setting.replace("{}", size.teacher) for setting in WAYS[way]]
        trials[way].append(trial(cache, f"{way}-{scale}-{seed}", source(scale, seed), words, size))
    ways = {way: figures.medians(of, ROWS) for way, of in trials.items()}
    return {"limit": limit(cache, trials["asynchronous"][0], size), "medians": ways, "trials": trials}


def trial(
    cache: TrialCache, name: str, source: tuple[Path, list[str]], settings: list[str], size: Scale
) -> Figures:
    """Figures of one run, which stays in folder `name` of the cache; age: mean of what was trained on."""

    def make() -> Figures:
        finished, looks = figures.run_steps(cache.folder / name, source, size.steps, settings)
        config, lines = finished.config, figures.step_lines(finished)
        saved = Subscriber(config.subscriber("evaluator"), claim_of(config)).folder
        measures = measured(lines, size, config, lambda step: saved(Version(0, step)))
        began, *_, ended = settled(lines)
        before, after = (min(looks, key=lambda look: abs(look[0] - at["time"]))[1] for at in (began, ended))
        steps, taken = ended["step"] - began["step"], [role for role in after if role in before]
        per_step = {role: (1000 * (after[role] - before[role]) / steps).tolist() for role in taken}
        measures |= {"age": finished.summary["buffer"]["age_mean"], "processor_ms": per_step}
        return measures | {"run": str(cache.folder / name)}

    return cache.get({"name": name, "steps": size.steps, "settings": [*source[1], *settings]}, make)


def settled(lines: Sequence[Figures]) -> Sequence[Figures]:
    """Without 20 steps, or a quarter, that warm up, and the last two, for which nothing is generated."""
    return lines[min(20, len(lines) // 4) : -2]


def measured(
    lines: Sequence[Figures], size: Scale, config: RunConfig, saved: Callable[[int], Path]
) -> Figures:
    """Speed of a run from its metrics of every step, and what it learned where versions are evaluated."""
    first, *_, last = settled(lines)
    wall = last["time"] - first["time"]
    gaps = [after["time"] - before["time"] for before, after in pairwise(settled(lines))]
    speed = {"step_ms": 1000 * median(gaps), "mean_step_ms": 1000 * mean(gaps)}
    for name, of in (("generated_per_second", "rollout"), ("trained_per_second", "train")):
        speed[name] = (last[f"{of}/tokens_total"] - first[f"{of}/tokens_total"]) / wall
    return speed | (curve(config, saved, lines) if size.learns else dict.fromkeys(CURVE))


def table(report: Figures) -> str:
    """The medians side by side, as Markdown; a ratio above 1: the asynchronous way is better."""
    ways = report["medians"]
    old, new = min(list(WAYS)[:2], key=lambda way: ways[way]["step_ms"]), list(WAYS)[2]
    lines = figures.comparison(old, new, ways, ROWS)
    return "\n".join([*lines, "", *limit_table(report["limit"], ways[new])])


def curve(config: RunConfig, saved: Callable[[int], Path], lines: Sequence[Figures]) -> Figures:
    """CURVE: quality of versions of the first lineage over seconds since the first step, and at the end.

    `saved`: the model folder after a step; that of step 0 is the student's own. `lines`: of the steps, with
    "time". Always the same held-out prompts with the same randomness. Raises SnapshotError for a version that
    is not there.
    """
    tokenizer, evaluation = load_tokenizer(config.student), EvaluationConfig()
    held_out = open_prompts(config.model_copy(update={"evaluation": evaluation}), tokenizer).held_out
    passes = tasks.load(config.prompts.task, config.prompts.options).reward
    asked = [EnginePrompt(np.array(prompt.token_ids, "i4"), seed) for seed, prompt in enumerate(held_out)]
    params = GenerationParams(config.rollout.max_tokens, 1.0, (tokenizer.eos_token_id,))
    torch.set_num_threads(1)
    vocab, cpu, points = vocab_size(tokenizer), torch.device("cpu"), []
    teacher = TransformersEngine(load_model(next(iter(config.teachers.values())), device="cpu"), vocab)
    for step in [*range(0, len(lines), EVERY), len(lines)]:
        model = load_model(config.student, saved(step) if step else None, "cpu")
        student = TransformersEngine(model, vocab)
        *_, sampled = student.generate(asked, params)
        ids = [completion.token_ids_T.tolist() for completion in sampled or []]
        rewards = [passes(*pair) > 0 for pair in zip(held_out, ids, strict=True)]
        items = [
            Item(np.array(prompt.token_ids + tokens, "i4"), len(prompt.token_ids))
            for prompt, tokens in zip(held_out, ids, strict=True)
        ]
        sides: list[Any] = []
        for engine in (student, teacher):
            hidden_CH = engine.score(items, ScoreOptions(hidden=True)).hidden_CH
            sides += [OutputHead.of(engine.head(), cpu).exact(), torch.from_numpy(hidden_CH)]
        seconds = lines[max(step, 1) - 1]["time"] - lines[0]["time"]
        points.append((seconds, float(exact(*sides).mean()), mean(rewards)))
    seconds_to_target = None
    for (x0, y0, _), (x1, y1, _) in pairwise(points):
        if seconds_to_target is None and y0 > TARGET_KL >= y1:
            seconds_to_target = x0 + (x1 - x0) * (y0 - TARGET_KL) / (y0 - y1)
    return dict(zip(CURVE, (seconds_to_target, *points[-1][1:]), strict=True)) | {"curve": points}


def limit(cache: TrialCache, trial: Figures, size: Scale) -> Figures:
    """`computed` for a batch of a trial, and what the trial's processes took beside it."""
    make = partial(computed, Path(trial["run"]), size.rounds)
    return cache.get({"limit of": trial}, make) | {"run": trial["processor_ms"]}


def limit_table(limit: Figures, ours: Figures) -> list[str]:
    """The computations alone, and what the roles took in the run; then how near a step of `ours` comes."""
    rows = []
    for role, (user, kernel) in limit["run"].items():
        alone = limit["ms"].get(role.partition("-")[0])
        rows.append({"ms a step": role, "alone": alone, "in the run": user + kernel, "of it kernel": kernel})
    least, step = limit["limit_ms"], ours["mean_step_ms"]
    share = {"limit, ms": least, "tokens": limit["tokens"], "ours, mean": step, "share": least / step}
    return [*figures.listing(rows), "", *figures.listing([share])]


def typical_batch(run_dir: Path, config: RunConfig) -> list[Rollout]:
    """As many neighbours in the order of scoring as a batch has, nearest to the mean behind the first quarter
    of a run and before its last two batches, in tokens of completions and of whole rows."""
    size, rollouts = config.rollout.batch, rollouts_of(run_dir)[: -2 * config.rollout.batch]
    lengths_R2 = np.array([(rollout.length, len(unpack(rollout.prompt))) for rollout in rollouts])
    first, sums_R2 = len(rollouts) // 4, np.concatenate([np.zeros((1, 2)), lengths_R2.cumsum(0)])
    tokens_B2 = (sums_R2[first + size :] - sums_R2[first:-size]) / lengths_R2[first:].mean(0) / size
    start = first + int(np.abs(tokens_B2 - 1).sum(1).argmin())
    return rollouts[start : start + size]


def computed(run_dir: Path, rounds: int) -> Figures:
    """ms of processor time per step by computation, and the time of a step of which nothing else is left."""
    batch = typical_batch(run_dir, config := read_run(run_dir).config)
    asked = [(unpack(rollout.prompt).tolist(), rollout.length) for rollout in batch]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # its memory comes back
        seconds = pool.submit(generate, config, asked * STEPS_AT_ONCE, rounds).result()
    works = scoring_and_training(config, batch)
    figures.interleaved(works, 2)
    taken = {"student": [seconds / STEPS_AT_ONCE], **figures.interleaved(works, rounds, time.process_time)}
    costs = {name: 1000 * median(seconds) for name, seconds in taken.items()}
    cores, each = figures.cores(), {name.split()[0]: count for name, count in threads(config).items()}
    alone = [cost / (each[name] or (1 if name == "student" else cores)) for name, cost in costs.items()]
    limit_ms, tokens = max(*alone, sum(costs.values()) / cores), sum(count for _, count in asked)
    return {"ms": costs, "limit_ms": limit_ms, "tokens": tokens}


def generate(config: RunConfig, asked: list[tuple[list[int], int]], rounds: int) -> float:
    """Seconds in which vLLM in this process completes prompts by so many tokens, median."""
    _, environment = replica_command.command(config.student, config.subscriber("limit"), 0, "127.0.0.1", 0)
    os.environ |= environment
    import vllm

    flags = {name.replace("-", "_"): value for name, value in config.student.flags().items()}
    llm = vllm.LLM(config.student.path, **(OFFLINE | {"dtype": config.student.dtype} | flags))
    settings: Any = {"temperature": config.rollout.temperature, "ignore_eos": True, "detokenize": False}
    params = [vllm.SamplingParams(max_tokens=count, logprobs=0, **settings) for _, count in asked]
    prompts = [{"prompt_token_ids": ids} for ids, _ in asked]
    work = {"generate": lambda: llm.generate(prompts, params, use_tqdm=False)}
    figures.interleaved(work, 1)
    taken = figures.interleaved(work, rounds, time.process_time)
    llm.llm_engine.engine_core.shutdown()
    return median(taken["generate"])


def scoring_and_training(config: RunConfig, batch: list[Rollout]) -> dict[str, Callable[[], Any]]:
    """What teacher and trainer of one rank compute of a batch, in one process."""
    torch.set_num_threads(1)
    (name, teacher), *_ = config.teachers.items()
    vocab, trainer, want = vocab_size(load_tokenizer(config.student)), config.trainer, needs(config.objective)
    scoring = AutoModelForCausalLM.from_pretrained(teacher.path, dtype=teacher.dtype)
    engine, head = TransformersEngine(scoring, vocab), find_head(scoring, vocab)
    sequences = [ScoreSequence.of(one.id, one.prompt, one.tokens, one.topk_ids) for one in batch]
    request = encode(ScoreRequest(sequences=sequences, want=want))

    def score() -> list[Scored]:
        """Hidden states as the model has them, top-k in fp16."""
        call = read_score(request, engine.engine_info, "f2", sys.maxsize)
        items, (options, *_) = zip(*call.admitted, strict=True)
        scores = split(engine.score(items, options), [item.positions for item in items])
        return [call.result(*answer) for answer in zip(call.ids, items, scores, strict=True)]

    whole = Batch(Version(0, 0), [], [0] * len(batch), [])
    for rollout, scored in zip(batch, score(), strict=True):
        spans = (VersionSpan(whole.version, 0, rollout.length),)
        whole.rollouts.append(replace(rollout, scored=scored, spans=spans))
    shape = Shape(trainer.micro_batch_tokens, [name], padded=trainer.packing == "padded")
    (share,) = pack_batch(whole, 1, shape, lambda version: version.step)
    precision = torch.bfloat16 if in_bf16(deepspeed_config(trainer)) else torch.float32
    model = AutoModelForCausalLM.from_pretrained(config.student.path, dtype=precision)
    if varlen := trainer.packing == "varlen":
        replace_attention(model, trainer.attention)
    trainee = AdamW(Student(model, head_shape(model.config, vocab, 1.0), trainer.head_chunk, varlen))
    loss = loss_of(config.objective, [name], (head,) if want.hidden else ())
    return {"teacher": score, "trainer": lambda: train_step(trainee, share, loss, ALONE)}


class AdamW(PlainEngine):
    """Clips, and takes a step of torch's own AdamW."""

    def __init__(self, student: Student) -> None:
        super().__init__(student, RATE)
        self._optimizer: Any = torch.optim.AdamW(student.parameters(), RATE, (0.9, 0.95), fused=True)

    def step(self) -> None:
        self.norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def get_global_grad_norm(self) -> float:
        return float(self.norm)


if __name__ == "__main__":
    figures.command(run, table)
