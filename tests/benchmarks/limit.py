"""What a step cannot be faster than: its three computations, each alone, plain, on one core.

    generation   vLLM offline in one process          ┐
    scores       a forward pass of the teacher        ├─ ms of processor time per step
    training     loss, gradients and AdamW, no ZeRO   ┘

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from distill import api, quickstart
from distill.config import RunConfig
from distill.config.evaluation import EvaluationConfig
from distill.evaluation.models import load_model
from distill.evaluation.probes import LanguageModel
from distill.launch import replica_command
from distill.prompts.sources import open_prompts
from student_trainer.deepspeed_json import deepspeed_config, in_bf16
from student_trainer.engine import Student, head_shape
from student_trainer.head import HeadShape, HeadWeights
from student_trainer.objectives import config as objectives
from student_trainer.step import collate, loss_of
from student_trainer.varlen import pack_rows
from sync.base.decoding import json_decoder
from sync.base.errors import ConfigError, DistillError
from sync.base.tokenizers import load_tokenizer, vocab_size
from sync.wire import Rows, Scored, pack
from teacher_service.engines.base import Item, ScoreOptions
from teacher_service.engines.head import find_head
from teacher_service.engines.transformers import TransformersEngine
from teacher_service.messages import scored
from tests.benchmarks import ROOT
from tests.benchmarks.figures import Figures, Work, command, cores, interleaved, markdown

ROUNDS: Final = 15
STEPS_AT_ONCE: Final = 4
"""Batches that vLLM is given together, so that it seldom has less than `max-num-seqs` to do."""
HEAD_CHUNK: Final = 1024
"""Positions whose logits exist at a time."""
RATE: Final = 1e-6
"""Learning rate: weights change, lengths do not."""


def run(config: Path | None = None) -> Figures:
    """Measure a step of the configuration in a file; None: the quickstart's.

    Its first teacher scores. Raises ConfigError for a run of episodes, DistillError when vLLM fails.
    """
    path, settings = quickstart.source(0) if config is None else (config, [])
    return measured(api.load_config(path, settings))


def measured(config: RunConfig) -> Figures:
    """ms of processor time per step by computation, and the time of a step of which nothing else is left."""
    if config.environments:
        raise ConfigError(
            "a step of episodes has no fixed cost: measure a configuration without environments"
        )
    tokenizer, teacher = load_tokenizer(config.student), next(iter(config.teachers.values()))
    prompts = [one.token_ids for one in open_prompts(with_evaluation(config), tokenizer).held_out]
    batch = [prompts[i % len(prompts)] for i in range(config.rollout.batch)]
    generated = generate(config, batch, [tokenizer.eos_token_id])
    made = completions(batch, generated["completions"], objectives.student_topk(config.objective))
    torch.set_num_threads(1)
    vocab = vocab_size(tokenizer)
    precision = torch.bfloat16 if in_bf16(deepspeed_config(config.trainer)) else torch.float32
    loaded = load_model(teacher, "cpu", teacher.dtype), load_model(config.student, "cpu", precision)
    scorer, live = (LanguageModel(one, find_head(one, vocab)) for one in loaded)
    if varlen := config.trainer.packing == "varlen":
        pack_rows(live.model, config.trainer.attention)
    engine = TransformersEngine(scorer.model, vocab)
    step = trainee(live, scorer, vocab, config.objective, varlen)
    rows = rows_of(made, score(engine, made, config.objective))
    works = {
        "score": Work(lambda: score(engine, made, config.objective)),
        "train": Work(lambda: step(rows)),
    }
    interleaved(works, 2)
    found = interleaved(works, ROUNDS, time.process_time)
    seconds = {"generate": generated["seconds"] / STEPS_AT_ONCE, **{k: median(v) for k, v in found.items()}}
    costs = {name: 1000 * one for name, one in seconds.items()}
    return {
        "ms": costs,
        "cores": cores(),
        "limit_ms": limit_ms(costs, cores()),
        "rollouts": len(batch),
        "completion_tokens": len(made.logp_C),
    }


def with_evaluation(config: RunConfig) -> RunConfig:
    """With the default evaluation where a configuration leaves it out: held-out prompts are needed."""
    evaluation = config.evaluation or EvaluationConfig()
    return config.model_copy(update={"evaluation": evaluation})


# --- scores and a step, in this process ---------------------------------------------------------------------


class Completions(NamedTuple):
    """What vLLM generated."""

    prompt_B: np.ndarray
    """int32: tokens of each prompt"""
    completion_B: np.ndarray
    """int32: tokens of each completion"""
    tokens: np.ndarray
    """int32: each row's prompt, then its completion"""
    logp_C: np.ndarray
    """float32: log μ(y), of the model that generated"""
    topk_CK: np.ndarray | None
    """int32: ids to gather; None: the objective needs none"""


def score(engine: TransformersEngine, made: Completions, objective: objectives.ObjectiveConfig) -> Scored:
    """What a teacher sends for all completions, one after the other; hidden states in bf16, top-k in fp16."""
    want = objectives.needs(objective)
    sequences = np.split(made.tokens, np.cumsum(made.prompt_B + made.completion_B)[:-1])
    gather: Sequence[Any] = [None] * len(sequences)
    width = 0
    if made.topk_CK is not None:
        gather, width = np.split(made.topk_CK, np.cumsum(made.completion_B)[:-1]), made.topk_CK.shape[1]
    items = [Item(*fields) for fields in zip(sequences, map(int, made.prompt_B), gather, strict=True)]
    scores = engine.score(items, ScoreOptions(want.topk, width, want.entropy, want.hidden))
    if scores.hidden_CH is not None:
        bits_CH = torch.from_numpy(scores.hidden_CH).bfloat16().view(torch.uint16).numpy()
        scores = replace(scores, hidden_CH=bits_CH)
    return scored("all", scores, "f2")


def rows_of(made: Completions, scores: Scored) -> Rows:
    """What a trainer rank is sent."""
    count = len(made.prompt_B)
    return Rows(
        ids=[str(i) for i in range(count)],
        tokens=pack(made.tokens),
        prompt_lens=pack(made.prompt_B),
        completion_lens=pack(made.completion_B),
        behavior_logprob=pack(made.logp_C),
        token_step=pack(np.zeros(len(made.logp_C), np.int32)),
        teacher=pack(np.zeros(count, np.int32)),
        by_teacher=pack(np.zeros(count, np.uint8)),
        teacher_logprob=scores.logprob,
        teacher_topk_ids=scores.topk_ids,
        teacher_topk_logprob=scores.topk_logprob,
        student_topk_ids=None if made.topk_CK is None else pack(made.topk_CK),
        student_topk_teacher_logprob=scores.gathered,
        teacher_hidden=scores.hidden,
        teacher_entropy=scores.entropy,
    )


def trainee(
    live: LanguageModel,
    teacher: LanguageModel,
    vocab: int,
    objective: objectives.ObjectiveConfig,
    varlen: bool,
) -> Callable[[Rows], None]:
    """An optimizer step on one micro-batch, with the trainer's loss and AdamW in one process.

    `varlen`: rows lie end to end, for which `pack_rows` has prepared `live`; else they are padded.
    """
    head = teacher.head
    heads = (HeadWeights(head.weight_VH, head.bias_V, HeadShape(vocab, head.scale, head.soft_cap)),)
    student = Student(live.model, head_shape(live.model.config, vocab, temperature=1.0), HEAD_CHUNK, varlen)
    loss_module = loss_of(objective, (), heads if objectives.needs(objective).hidden else ())
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )

    def step(rows: Rows) -> None:
        micro = collate(rows, 0, vocab, varlen)
        loss, _ = student(micro.tokens_RL, micro.positions_C, micro.targets, loss_module, micro.layout)
        (loss / micro.counts["tokens"]).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def limit_ms(costs: Mapping[str, float], count: int) -> float:
    """Of a step on `count` cores: no computation is divided, none waits."""
    return max(*costs.values(), sum(costs.values()) / count)


def completions(batch: list[list[int]], generated: list[Any], k: int) -> Completions:
    """The first completion of every prompt of a batch, each with `k` ids, which cost the same whatever they
    are."""
    found = [tokens for tokens, _ in generated[: len(batch)]]
    logp = [one for _, logps in generated[: len(batch)] for one in logps]
    tokens = [one for prompt, own in zip(batch, found, strict=True) for one in (*prompt, *own)]
    ids = np.tile(np.arange(k, dtype=np.int32), (len(logp), 1)) if k else None
    prompt_B, completion_B = (np.array([len(one) for one in of], np.int32) for of in (batch, found))
    logp_C = np.array(logp, np.float32)
    return Completions(prompt_B, completion_B, np.array(tokens, np.int32), logp_C, ids)


# --- generation, in a process of its own --------------------------------------------------------------------


def generate(config: RunConfig, batch: list[list[int]], stop: list[int]) -> Figures:
    """{"seconds": of STEPS_AT_ONCE batches, median, "completions": [[ids, log μ], …]}."""
    _, environment = replica_command.command(config.student, config.subscriber("limit"), 0, "127.0.0.1", 0)
    arguments = {name.replace("-", "_"): value for name, value in config.student.flags().items()}
    given = {
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
        asked, told = Path(place) / "asked.json", Path(place) / "told.json"
        asked.write_text(json.dumps(given))
        words = [sys.executable, "-m", "tests.benchmarks.limit", str(asked), str(told)]
        done = subprocess.run(
            words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        if not told.is_file():
            raise DistillError(f"vLLM ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return json_decoder(dict[str, Any]).decode(told.read_bytes())


def generate_here(given: Mapping[str, Any]) -> Figures:
    """`generate`, in a process that has nothing else to do."""
    import vllm

    llm = vllm.LLM(**given["engine"])
    names = ("max_tokens", "temperature", "stop_token_ids")
    params = vllm.SamplingParams(detokenize=False, logprobs=0, **{name: given[name] for name in names})
    prompts, seconds = [{"prompt_token_ids": one} for one in given["prompts"]], []
    for _ in range(1 + ROUNDS):
        began = time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.process_time() - began)
    said = [output.outputs[0] for output in outputs]
    logps = [
        [found[token].logprob for found, token in zip(one.logprobs, one.token_ids, strict=True)]
        for one in said
    ]
    told = [[list(one.token_ids), logp] for one, logp in zip(said, logps, strict=True)]
    llm.llm_engine.engine_core.shutdown()
    return {"seconds": median(seconds[1:]), "completions": told}


def table(report: Figures) -> str:
    """The report as Markdown."""
    names = {"generate": "vLLM, offline", "score": "teacher, forward", "train": "student, step"}
    rows = [[names[name], f"{ms:.0f}"] for name, ms in report["ms"].items()]
    rows.append(["all three", f"{sum(report['ms'].values()):.0f}"])
    rows.append([f"limit of a step on {report['cores']} cores", f"**{report['limit_ms']:.0f}**"])
    head = f"{report['rollouts']} rollouts, {report['completion_tokens']} completion tokens a step"
    return "\n".join([head, "", *markdown(["", "ms of processor time"], rows)])


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith("asked.json"):
        Path(sys.argv[2]).write_text(json.dumps(generate_here(json.loads(Path(sys.argv[1]).read_text()))))
    else:
        command("limit", run, table)
