"""What overlapping is worth: the quickstart one stage after the other, and all stages at once.

All ways are the same code on the same models, prompts and seed, on the same cores; `buffer.max_staleness`
tells them apart. The synchronous side gets a thread per stage or two, and is shown by whichever is faster.
Trials take turns: noise hurts all alike.

Each is a run as a user starts it. Its versions are evaluated after the run: while it is timed, no evaluator
works beside it. The scale `real` needs the folders that `make real` makes.

Beside them stands what a step cannot be faster than: its three computations, each alone, plain, on one core.

    generation   vLLM offline in one process                  ┐
    scores       a forward pass of the teacher                ├─ ms of processor time per step
    training     the trainer's step, by AdamW without ZeRO    ┘

Models have the precision of the run's roles, and rows lie as in its trainer. A run whose roles overlap
perfectly and that computes nothing else takes the longest of them, or their sum over the cores, whichever is
more. All three get the prompts and the lengths of one of its batches, that which is nearest to the mean.
Beside them stands what the run's processes took of the processor for a step, by role.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import numpy as np
import psutil
import torch
import typer
from msgspec.structs import replace
from plain_step import ALONE, PlainEngine

from distill import api, quickstart, tasks
from distill.batching.packing import Shape, pack_batch
from distill.buffer import Batch
from distill.config import RunConfig
from distill.config.evaluation import EvaluationConfig
from distill.config.prompts import TaskPrompts
from distill.evaluation.evaluator import exact
from distill.evaluation.models import load_model, load_student
from distill.launch import replica_command
from distill.launch.preflight import claim_of
from distill.metrics.results import Run
from distill.preflight_checks.objective import with_objective
from distill.prompts.sources import open_prompts
from distill.prompts.stream import PromptStream
from distill.record.rollout import Rollout
from distill.record.store import open_read_only
from distill.tasks.sort_letters import letter_tokenizer
from distill.tasks.teaching import Recipe, made_once, new_model, recipe_hash, save_pair
from student_trainer.deepspeed_json import deepspeed_config, in_bf16
from student_trainer.engine import Student, head_shape
from student_trainer.objectives.config import needs, student_topk
from student_trainer.step import loss_of, train_step
from student_trainer.varlen import replace_attention
from sync.base.tokenizers import load_tokenizer, vocab_size
from sync.weights.subscribe import Subscriber
from sync.wire import Scored, ScoreRequest, ScoreSequence, TrainBatch, Version, VersionSpan, encode, pack
from sync.wire.head import OutputHead
from teacher_service.batching import split
from teacher_service.engines.base import EnginePrompt, GenerationParams, Item, ScoreOptions
from teacher_service.engines.head import find_head
from teacher_service.engines.transformers import TransformersEngine
from teacher_service.messages import read_score
from tests.benchmarks import ROOT
from tests.benchmarks.figures import (
    Figures,
    Folder,
    Seeds,
    TrialCache,
    apart,
    command,
    comparison,
    cores,
    interleaved,
    listing,
    median_gap_ms,
    medians,
    run_steps,
    step_lines,
)

STEPS_AT_ONCE: Final = 4
"""Batches that vLLM is given together, so that it seldom has less than `max-num-seqs` to do."""
HEAD_CHUNK: Final = 1024
"""Positions whose logits exist at a time."""
OFFLINE: Final[dict[str, Any]] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "distributed_executor_backend": "uni",
    "logprobs_mode": "processed_logprobs",
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 1 << 30,
}
"""Options of vLLM, unless the student says other."""
RATE: Final = 1e-6
"""Learning rate: weights change, lengths do not."""


class Scale(NamedTuple):
    """A size of models, and of what is done with them."""

    steps: int
    settled: int
    """Steps left out of step times and rates: the first ones pay for warming up."""
    learns: bool
    """Whether versions are evaluated; else speed is all that is compared."""
    rounds: int = 15
    """Of each computation alone."""
    probe_steps: int = 12
    """Of the runs that choose a precision."""
    teacher: str = "sorter"


LARGE: Final = (
    *("rollout.batch=64", "rollout.max_tokens=48", "rollout.request_size=16", "rollout.max_in_flight=64"),
    *("buffer.score_batch=32", "teachers.sorter.dtype=bfloat16", "trainer.lr=1e-4"),
)
"""A student of 14 M and a teacher of 25 M: on them the models, not the serving, take the time."""
REAL: Final = ROOT / ".cache" / "real"
"""Where `make real` keeps models and prompts: a student of 113 M, a teacher of 135 M."""
SCALES: Final = {
    "toy": Scale(240, 20, True),
    "large": Scale(24, 8, False),
    "real": Scale(14, 4, False, 2, 3, "smollm2"),
}
ScaleName = Annotated[
    Literal["toy", "large", "real"],
    typer.Option(help="Models of 0.2 M and 0.6 M parameters, of 14 M and 25 M, or of 113 M and 135 M."),
]


def source(scale: str, seed: int) -> tuple[Path, list[str]]:
    """A file and its overrides: the quickstart, at the scale `large` with models of random weights that are
    made once, or the recipe for real models."""
    if scale == "real":
        places = {"student.path": "student-24", "teachers.smollm2.path": "teacher"}
        places |= {"prompts.path": "prompts.jsonl"}
        deepspeed = f"trainer.deepspeed={ROOT / 'configs/deepspeed/zero3_cpu.json'}"
        paths = [f"{key}={REAL / name}" for key, name in places.items()]
        return ROOT / "configs/small_model.toml", [f"run.seed={seed}", deepspeed, *paths]
    path, overrides = quickstart.source(seed)
    if scale == "toy":
        return path, overrides
    shape = {"layers": 8, "steps": 0}
    student = Recipe(width=384, heads=12, kv_heads=6, feed_forward=1152, **shape)
    teacher = Recipe(width=512, heads=16, kv_heads=8, feed_forward=1536, **shape)

    def make(unfinished: Path) -> None:
        torch.manual_seed(seed)
        tokenizer = letter_tokenizer()
        models = (new_model(recipe, tokenizer) for recipe in (teacher, student))
        save_pair(unfinished, tokenizer, *models)

    name = f"large-{recipe_hash((teacher, student), seed, (__file__,))}"
    pair = made_once(quickstart.CACHE.absolute() / name, make)
    models = [f"student.path={pair.student}", f"teachers.sorter.path={pair.teacher}"]
    return path, [*overrides, *LARGE, *models]


TARGET_KL: Final = 0.25
"""Nats per token, held out: every way gets there before the end."""
EVERY: Final = 20
"""Steps between the versions that are evaluated."""
LAYOUT: Final = ("trainer.ranks=1", "evaluation=false", "tracking.wandb=disabled")
"""Every way: one rank, as two would share two cores with the other roles."""
OVERLAPPED: Final = (*LAYOUT, "buffer.max_staleness=2")
ONE_THREAD: Final = (*LAYOUT, "buffer.max_staleness=0", "rollout.request_size=128")
TWO_THREADS: Final = ("teachers.{}.threads=2", "trainer.threads=2", 'student.env.OMP_NUM_THREADS="2"')
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
    "age": ("mean age, versions", 0),
}
TrialSteps = Annotated[int, typer.Option(min=0, help="Steps of a trial; 0: 240, 24, 14 by scale.")]


def run(
    folder: Folder = Path("runs/bench-asynchronous"),
    scale: ScaleName = "toy",
    seeds: Seeds = 3,
    steps: TrialSteps = 0,
) -> Figures:
    """Run the same synchronously and asynchronously, and print what overlapping is worth."""
    cache, size = TrialCache(folder), SCALES[scale]
    steps, trials = steps or size.steps, {way: list[Figures]() for way in WAYS}
    for seed in range(seeds):
        for way, settings in WAYS.items():
            words = [setting.replace("{}", size.teacher) for setting in settings]
            path, overrides = source(scale, seed)
            make = partial(trial, cache.folder / "trial", (path, overrides), words, steps, size)
            trials[way].append(cache.get({"steps": steps, "settings": [*overrides, *words]}, make))
    path, overrides = source(scale, 0)
    newest = trials["asynchronous"][0]
    limit = limit_of(cache, (path, [*overrides, *OVERLAPPED]), size, newest)
    return {
        "limit": limit,
        "medians": {way: medians(of, ROWS) for way, of in trials.items()},
        "trials": trials,
    }


def trial(
    run_dir: Path, source: tuple[Path, list[str]], settings: Sequence[str], steps: int, scale: Scale
) -> Figures:
    """Figures of one run, and its learning curve where there is one."""
    with Processors() as processors:
        finished = run_steps(run_dir, source, steps, settings)
    settled = min(scale.settled, steps // 4)
    lines = step_lines(finished)
    figures = measure(finished, settled) | {"batch": typical_batch(run_dir, settled)}
    figures["processor_ms"] = processors.per_step(
        lines[settled]["time"], lines[-1]["time"], steps - settled - 1
    )
    if not scale.learns:
        return figures | dict.fromkeys(CURVE)
    config = finished.config
    saved = Subscriber(config.subscriber("evaluator"), claim_of(config)).folder
    return figures | curve(config, lambda step: saved(Version(0, step)), step_lines(finished))


def table(report: Figures) -> str:
    """The medians side by side, as Markdown; a ratio above 1: the asynchronous way is better."""
    ways, bound = report["medians"], report["limit"]
    old, new = min(list(WAYS)[:2], key=lambda way: ways[way]["step_ms"]), list(WAYS)[2]
    return "\n".join([*comparison(old, new, ways, ROWS), "", *limit_table(bound, ways[new]["mean_step_ms"])])


def limit_of(cache: TrialCache, source: tuple[Path, list[str]], size: Scale, trial: Figures) -> Figures:
    """`computed` for a batch of a trial, and what the trial's processes took beside it."""
    config = with_objective(api.load_config(*source)).config
    make = partial(computed, config, size.rounds, trial["batch"])
    return cache.get({"limit": source[1], "batch": trial["batch"]}, make) | {"run": trial["processor_ms"]}


def limit_table(limit: Figures, step_ms: float) -> list[str]:
    """The computations alone, and beside them what the roles took in the run; ms of processor time a step."""
    alone = {"student": "generate", "teacher": "score", "trainer": "train"}
    rows = [
        {
            "process": role,
            "alone": limit["ms"].get(alone.get(role.partition("-")[0], "")),
            "in the run": sum(both),
            "kernel": both[1],
        }
        for role, both in limit["run"].items()
    ]
    share = {
        "limit of a step, ms": limit["limit_ms"],
        "ours, mean": step_ms,
        "tokens": limit["completion_tokens"],
    }
    return [*listing(rows), "", *listing([share | {"share": limit["limit_ms"] / step_ms}])]


class Processors:
    """Watches, inside `with`, what each role of a run that this process starts takes of the processor."""

    EVERY: Final = 0.5
    """Seconds between two looks."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, dict[str, tuple[float, float]]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def per_step(self, first: float, last: float, steps: int) -> dict[str, list[float]]:
        """Role → ms a step in user mode and in the kernel, between two times since the epoch."""
        began, ended = (min(self._looks, key=lambda look: abs(look[0] - at))[1] for at in (first, last))
        return {
            role: [1000 * (after - before) / steps for before, after in zip(began[role], times, strict=True)]
            for role, times in ended.items()
            if role in began
        }

    def _watch(self) -> None:
        while not self._over.wait(self.EVERY):
            taken = dict[str, tuple[float, float]]()
            for controller in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    taken["controller"] = _times([controller])
                    for guardian in controller.children():
                        _, named, rest = " ".join(guardian.cmdline()).partition(" distill.guardian ")
                        family = guardian.children(recursive=True) if named else [guardian]
                        taken[rest.split()[0] if named else "others"] = _times(family)
            self._looks.append((time.time(), taken))


def _times(family: Sequence[psutil.Process]) -> tuple[float, float]:
    """Seconds of these processes in user mode and in the kernel."""
    times = [process.cpu_times() for process in family]
    return sum(each.user for each in times), sum(each.system for each in times)


def typical_batch(run_dir: Path, settled: int) -> list[tuple[str, int]]:
    """(prompt's id, tokens of its completion) of the trained batch that is nearest to the mean."""
    question = """
        SELECT step, rollout.id, tokens FROM member JOIN rollout ON rollout.id = member.rollout
        WHERE lineage = 0 AND step > ? ORDER BY step, member.place"""
    batches: dict[int, list[tuple[str, int]]] = defaultdict(list)
    with closing(open_read_only(run_dir / "run.db")) as record:
        for step, *member in record.execute(question, (settled,)):
            batches[step].append((member[0], member[1]))
    totals = {step: sum(tokens for _, tokens in batch) for step, batch in batches.items()}
    return batches[min(totals, key=lambda step: abs(totals[step] - mean(totals.values())))]


def measure(finished: Run, settled: int) -> Figures:
    """Speed of a run after its first `settled` steps; age: mean of what was trained on."""
    lines = step_lines(finished)
    first, last, count = lines[settled], lines[-1], len(lines) - settled - 1
    wall = last["time"] - first["time"]
    return {
        "step_ms": median_gap_ms(lines[settled:]),
        "mean_step_ms": 1000 * wall / count,
        "generated_per_second": (last["rollout/tokens_total"] - first["rollout/tokens_total"]) / wall,
        "trained_per_second": (last["train/tokens_total"] - first["train/tokens_total"]) / wall,
        "age": finished.summary["buffer"]["age_mean"],
    }


# --- what was learned -------------------------------------------------------------------------------------

CURVE: Final = ("seconds_to_target", "reverse_kl", "pass_rate")


def curve(config: RunConfig, saved: Callable[[int], Path], lines: Sequence[Mapping[str, float]]) -> Figures:
    """CURVE: quality of versions of the first lineage over seconds since the first step, and at the end.

    `saved`: the model folder after a step; that of step 0 is the student's own. `lines`: of the steps, with
    "time". Always the same held-out prompts with the same randomness. Raises SnapshotError for a version that
    is not there.
    """
    assert isinstance(config.prompts, TaskPrompts), "the quickstart's prompts are a task's"
    tokenizer = load_tokenizer(config.student)
    held_out = open_prompts(with_evaluation(config), tokenizer).held_out
    passes = tasks.load(config.prompts.task, config.prompts.options).reward
    asked = [EnginePrompt(np.array(prompt.token_ids, "i4"), seed) for seed, prompt in enumerate(held_out)]
    params = GenerationParams(config.rollout.max_tokens, 1.0, (tokenizer.eos_token_id,))
    torch.set_num_threads(1)
    vocab, points = vocab_size(tokenizer), []
    teacher = TransformersEngine(load_model(next(iter(config.teachers.values())), "cpu"), vocab)
    for step in [*range(0, len(lines), EVERY), len(lines)]:
        model = load_student(config.student, saved(step) if step else None, "cpu")
        student = TransformersEngine(model, vocab)
        *_, sampled = student.generate(asked, params)
        ids = [completion.token_ids_T.tolist() for completion in sampled or []]
        rewards = [passes(*pair) > 0 for pair in zip(held_out, ids, strict=True)]
        items = [
            Item(np.array(prompt.token_ids + tokens, "i4"), len(prompt.token_ids))
            for prompt, tokens in zip(held_out, ids, strict=True)
        ]
        seconds = lines[max(step, 1) - 1]["time"] - lines[0]["time"]
        points.append((seconds, reverse_kl(student, teacher, items), mean(rewards)))
    seconds_to_target = None
    for (x0, y0, _), (x1, y1, _) in pairwise(points):
        if seconds_to_target is None and y0 > TARGET_KL >= y1:
            seconds_to_target = x0 + (x1 - x0) * (y0 - TARGET_KL) / (y0 - y1)
    return dict(zip(CURVE, (seconds_to_target, *points[-1][1:]), strict=True)) | {"curve": points}


def reverse_kl(student: TransformersEngine, teacher: TransformersEngine, items: Sequence[Item]) -> float:
    """Exact, nats per token of the completions."""
    sides: list[Any] = []
    for engine in (student, teacher):
        scores = engine.score(items, ScoreOptions(hidden=True))
        head = OutputHead.of(engine.head(), torch.device("cpu")).exact()
        sides += [head, torch.from_numpy(scores.hidden_CH)]
    return float(exact(*sides).mean())


# --- the three computations of a step ----------------------------------------------------------------------


def computed(config: RunConfig, rounds: int, batch: Sequence[tuple[str, int]]) -> Figures:
    """ms of processor time per step by computation, and the time of a step of which nothing else is left.
    `batch`: as `typical_batch` has it."""
    tokenizer = load_tokenizer(config.student)
    lengths, prompts = dict(batch), dict[str, list[int]]()
    stream = PromptStream(open_prompts(config, tokenizer).train, config.run.seed, config.rollout.per_prompt)
    while lengths.keys() - prompts:
        prompts |= {prompt.id: prompt.token_ids for prompt in stream.take(len(lengths))}
    asked = [(prompts[id], count) for id, count in lengths.items()]
    generated = apart(generate, config, asked * STEPS_AT_ONCE, rounds)
    rollouts = [
        rollout(number, prompt, *answer, student_topk(config.objective))
        for number, ((prompt, _), answer) in enumerate(zip(asked, generated["completions"], strict=False))
    ]
    torch.set_num_threads(1)
    step = Step(config, vocab_size(tokenizer), rollouts)
    train_batch = step.packed(step.score())
    works = {"score": step.score, "train": lambda: step.train(train_batch)}
    interleaved(works, 2)
    taken = interleaved(works, rounds, time.process_time)
    costs = {"generate": 1000 * generated["seconds"] / STEPS_AT_ONCE}
    costs |= {name: 1000 * median(seconds) for name, seconds in taken.items()}
    return {
        "ms": costs,
        "cores": cores(),
        "limit_ms": max(*costs.values(), sum(costs.values()) / cores()),
        "rollouts": len(asked),
        "completion_tokens": sum(member.length for member in rollouts),
    }


def with_evaluation(config: RunConfig) -> RunConfig:
    """With the default evaluation where a configuration leaves it out: held-out prompts are needed."""
    return config.model_copy(update={"evaluation": config.evaluation or EvaluationConfig()})


def rollout(number: int, prompt: Sequence[int], tokens: list[int], logps: list[float], k: int) -> Rollout:
    """A completion of vLLM's; `k` ids to gather, which cost the same whatever they are; 0: none."""
    count = len(tokens)
    return Rollout(
        str(number),
        number,
        prompt=pack(np.array(prompt, np.int32)),
        tokens=pack(np.array(tokens, np.int32)),
        logprob=pack(np.array(logps, np.float32)),
        spans=(VersionSpan(Version(0, 0), 0, count),),
        teacher="teacher",
        topk_ids=pack(np.tile(np.arange(k, dtype=np.int32), (count, 1))) if k else None,
    )


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


class Step:
    """What teacher and trainer compute of a batch, in one process."""

    def __init__(self, config: RunConfig, vocab: int, rollouts: Sequence[Rollout]) -> None:
        self._rollouts, trainer, teacher = rollouts, config.trainer, next(iter(config.teachers.values()))
        self._engine = TransformersEngine(load_model(teacher, "cpu", teacher.dtype), vocab)
        sequences = [
            ScoreSequence.of(member.id, member.prompt, member.tokens, member.topk_ids) for member in rollouts
        ]
        want = needs(config.objective)
        self._request = encode(ScoreRequest(sequences=sequences, want=want))
        self._shape = Shape(trainer.micro_batch_tokens, ["teacher"], padded=trainer.packing == "padded")
        precision = torch.bfloat16 if in_bf16(deepspeed_config(trainer)) else torch.float32
        model, varlen = load_model(config.student, "cpu", precision), trainer.packing == "varlen"
        if varlen:
            replace_attention(model, trainer.attention)
        shape = head_shape(model.config, vocab, temperature=1.0)
        self._trainee = AdamW(Student(model, shape, HEAD_CHUNK, varlen))
        head = find_head(load_model(teacher, "cpu", teacher.dtype), vocab)
        self._loss = loss_of(config.objective, ["teacher"], (head,) if want.hidden else ())

    def score(self) -> list[Scored]:
        """What a teacher sends for all completions: hidden states as its model has them, top-k in fp16."""
        call = read_score(self._request, self._engine.engine_info, "f2", sys.maxsize)
        items, (options, *_) = zip(*call.admitted, strict=True)
        scores = split(self._engine.score(items, options), [item.positions for item in items])
        return [call.result(*answer) for answer in zip(call.ids, items, scores, strict=True)]

    def packed(self, scores: Sequence[Scored]) -> TrainBatch:
        """What a trainer of one rank is sent."""
        pairs = zip(self._rollouts, scores, strict=True)
        members = [replace(member, scored=answer) for member, answer in pairs]
        batch = Batch(Version(0, 0), members, [0] * len(members), [])
        return pack_batch(batch, 1, self._shape, lambda version: version.step)[0]

    def train(self, batch: TrainBatch) -> None:
        train_step(self._trainee, batch, self._loss, ALONE)


def generate(config: RunConfig, prompts: list[tuple[list[int], int]], rounds: int) -> Figures:
    """{"seconds": of all prompts, median, "completions": [(ids, log μ), …]}, of vLLM in this process.
    `prompts`: ids, and how many tokens are generated."""
    _, environment = replica_command.command(config.student, config.subscriber("limit"), 0, "127.0.0.1", 0)
    os.environ |= environment
    import vllm

    flags = {name.replace("-", "_"): value for name, value in config.student.flags().items()}
    llm = vllm.LLM(config.student.path, **(OFFLINE | {"dtype": config.student.dtype} | flags))
    settings: Any = {"temperature": config.rollout.temperature, "ignore_eos": True, "detokenize": False}
    params = [vllm.SamplingParams(max_tokens=count, logprobs=0, **settings) for _, count in prompts]
    asked, seconds = [{"prompt_token_ids": ids} for ids, _ in prompts], list[float]()
    for _ in range(1 + rounds):
        began = time.process_time()
        outputs = llm.generate(asked, params, use_tqdm=False)
        seconds.append(time.process_time() - began)
    completions = []
    for output in outputs:
        ids, logps = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        completions.append((ids, [by_id[id].logprob for by_id, id in zip(logps, ids, strict=True)]))
    llm.llm_engine.engine_core.shutdown()
    return {"seconds": median(seconds[1:]), "completions": completions}


if __name__ == "__main__":
    command(run, table)
