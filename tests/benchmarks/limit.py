"""What a step cannot be faster than: its three computations, each alone, plain, on one core.

    generation   vLLM offline in one process                  ┐
    scores       a forward pass of the teacher                ├─ ms of processor time per step
    training     the trainer's step, by AdamW without ZeRO    ┘

Models have the precision of the run's roles, and rows lie as in its trainer. A run whose roles overlap
perfectly and that computes nothing else takes the longest of them, or their sum over the cores, whichever is
more. Generation comes first, in a process of its own; the other two take turns on its completions, so all
three see the same lengths.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import torch
import typer
from msgspec.structs import replace
from plain_step import ALONE, PlainEngine

from distill import api, quickstart
from distill.batching.packing import Shape, pack_batch
from distill.buffer import Batch
from distill.config import RunConfig
from distill.config.evaluation import EvaluationConfig
from distill.evaluation.models import load_model
from distill.launch import replica_command
from distill.prompts.sources import open_prompts
from distill.record.rollout import Rollout
from distill.tasks.sort_letters import letter_tokenizer, untaught
from distill.tasks.teaching import Recipe, made_once, recipe_hash, save_pair
from student_trainer.deepspeed_json import deepspeed_config, in_bf16
from student_trainer.engine import Student, head_shape
from student_trainer.head import HeadShape, HeadWeights
from student_trainer.objectives.config import needs, student_topk
from student_trainer.step import loss_of, train_step
from student_trainer.varlen import pack_rows
from sync.base.decoding import json_decoder
from sync.base.errors import DistillError
from sync.base.tokenizers import load_tokenizer, vocab_size
from sync.wire import Scored, ScoreRequest, ScoreSequence, TrainBatch, Version, VersionSpan, encode, pack
from teacher_service.batching import split
from teacher_service.engines.head import find_head
from teacher_service.engines.transformers import TransformersEngine
from teacher_service.messages import read_score
from tests.benchmarks import ROOT
from tests.benchmarks.figures import Figures, command, cores, interleaved, listing

ROUNDS: Final = 15
STEPS_AT_ONCE: Final = 4
"""Batches that vLLM is given together, so that it seldom has less than `max-num-seqs` to do."""
HEAD_CHUNK: Final = 1024
"""Positions whose logits exist at a time."""
RATE: Final = 1e-6
"""Learning rate: weights change, lengths do not."""


class Scale(NamedTuple):
    """A size of the quickstart."""

    settings: tuple[str, ...]
    steps: int
    settled: int
    """Steps left out of step times and rates: the first ones pay for warming up."""
    learns: bool
    """Whether versions are evaluated; else speed is all that is compared."""


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
SCALES: Final = {"toy": Scale((), 240, 20, True), "large": Scale(LARGE, 24, 8, False)}
ScaleName = Annotated[
    Literal["toy", "large"], typer.Option(help="Models of 0.2 M and 0.6 M parameters, or of 14 M and 25 M.")
]


def settings_of(scale: str, seed: int) -> list[str]:
    """Overrides of the quickstart: those of the scale, and its models with random weights, made once."""
    if scale == "toy":
        return []
    shape = {"layers": 8, "steps": 0, "rows": 0, "rate": 0.0, "muon": False, "both_choices": False}
    student = Recipe(width=384, heads=12, kv_heads=6, feed_forward=1152, **shape)
    teacher = Recipe(width=512, heads=16, kv_heads=8, feed_forward=1536, **shape)

    def make(unfinished: Path) -> None:
        torch.manual_seed(seed)
        save_pair(unfinished, letter_tokenizer(), teacher=untaught(teacher), student=untaught(student))

    name = f"large-{recipe_hash((teacher, student), seed, (__file__,))}"
    pair = made_once(quickstart.CACHE.absolute() / name, make)
    return [*LARGE, f"student.path={pair.student}", f"teachers.sorter.path={pair.teacher}"]


def run(scale: ScaleName = "toy") -> Figures:
    """Measure the three computations of a step of the quickstart."""
    path, settings = quickstart.source(0)
    return measured(api.load_config(path, [*settings, *settings_of(scale, 0)]))


def measured(config: RunConfig) -> Figures:
    """ms of processor time per step by computation, and the time of a step of which nothing else is left.

    Raises DistillError when vLLM fails.
    """
    tokenizer = load_tokenizer(config.student)
    prompts = [prompt.token_ids for prompt in open_prompts(with_evaluation(config), tokenizer).held_out]
    batch = [prompts[i % len(prompts)] for i in range(config.rollout.batch)]
    generated = generate(config, batch, [tokenizer.eos_token_id])
    rollouts = [
        rollout(number, prompt, *answer, student_topk(config.objective))
        for number, (prompt, answer) in enumerate(zip(batch, generated["completions"], strict=False))
    ]
    torch.set_num_threads(1)
    step = Step(config, vocab_size(tokenizer), rollouts)
    train_batch = step.packed(step.score())
    works = {"score": step.score, "train": lambda: step.train(train_batch)}
    interleaved(works, 2)
    taken = interleaved(works, ROUNDS, time.process_time)
    costs = {"generate": 1000 * generated["seconds"] / STEPS_AT_ONCE}
    costs |= {name: 1000 * median(seconds) for name, seconds in taken.items()}
    return {
        "ms": costs,
        "cores": cores(),
        "limit_ms": max(*costs.values(), sum(costs.values()) / cores()),
        "rollouts": len(batch),
        "completion_tokens": sum(member.length for member in rollouts),
    }


def with_evaluation(config: RunConfig) -> RunConfig:
    """With the default evaluation where a configuration leaves it out: held-out prompts are needed."""
    return config.model_copy(update={"evaluation": config.evaluation or EvaluationConfig()})


# --- scores and a step, in this process ---------------------------------------------------------------------


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
            pack_rows(model, trainer.attention)
        shape = head_shape(model.config, vocab, temperature=1.0)
        self._trainee = AdamW(Student(model, shape, HEAD_CHUNK, varlen))
        head = find_head(load_model(teacher, "cpu", teacher.dtype), vocab)
        weights = HeadWeights(head.weight_VH, head.bias_V, HeadShape(vocab, head.scale, head.soft_cap))
        self._loss = loss_of(config.objective, ["teacher"], (weights,) if want.hidden else ())

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


# --- generation, in a process of its own --------------------------------------------------------------------


def generate(config: RunConfig, batch: list[list[int]], stop: list[int]) -> Figures:
    """{"seconds": of STEPS_AT_ONCE batches, median, "completions": [[ids, log μ], …]}."""
    _, environment = replica_command.command(config.student, config.subscriber("limit"), 0, "127.0.0.1", 0)
    arguments = {name.replace("-", "_"): value for name, value in config.student.flags().items()}
    job = {
        "engine": {
            "model": config.student.path,
            "dtype": config.student.dtype,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "logprobs_mode": "processed_logprobs",
            "hf_overrides": {"head_dtype": "float32"},
            "distributed_executor_backend": "uni",
            **arguments,
        },
        "prompts": batch * STEPS_AT_ONCE,
        "max_tokens": config.rollout.max_tokens,
        "temperature": config.rollout.temperature,
        "stop_token_ids": stop,
    }
    with tempfile.TemporaryDirectory(prefix="distill-limit-") as place:
        asked, answer = Path(place) / "asked.json", Path(place) / "answer.json"
        asked.write_text(json.dumps(job))
        words = [sys.executable, "-m", "tests.benchmarks.limit", str(asked), str(answer)]
        done = subprocess.run(
            words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        if not answer.is_file():
            raise DistillError(f"vLLM ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return json_decoder(dict[str, Any]).decode(answer.read_bytes())


def generate_here(job: Mapping[str, Any]) -> Figures:
    """`generate`, in a process that has nothing else to do."""
    import vllm

    llm = vllm.LLM(**job["engine"])
    names = ("max_tokens", "temperature", "stop_token_ids")
    params = vllm.SamplingParams(detokenize=False, logprobs=0, **{name: job[name] for name in names})
    prompts, seconds = [{"prompt_token_ids": ids} for ids in job["prompts"]], []
    for _ in range(1 + ROUNDS):
        began = time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.process_time() - began)
    completions = []
    for output in outputs:
        ids, logps = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        completions.append([ids, [by_id[id].logprob for by_id, id in zip(logps, ids, strict=True)]])
    llm.llm_engine.engine_core.shutdown()
    return {"seconds": median(seconds[1:]), "completions": completions}


def table(report: Figures) -> str:
    """The report as Markdown."""
    costs = {f"{name}, ms": ms for name, ms in report["ms"].items()}
    return "\n".join(listing([costs | {name: of for name, of in report.items() if name != "ms"}]))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith("asked.json"):
        Path(sys.argv[2]).write_text(json.dumps(generate_here(json.loads(Path(sys.argv[1]).read_text()))))
    else:
        command(run, table)
