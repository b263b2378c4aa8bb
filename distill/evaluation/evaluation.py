"""Exact reverse KL and pass rate of a student on its own completions: the metric `reverse_kl` everywhere.

Completions are sampled at temperature 1 from the full distribution. KL(p‖q) = Σ_v p(v) (log p(v) − log q(v))
is summed over the whole vocabulary at every completion token, end token included, in fp32, and averaged over
tokens. Rows of a model beyond the tokenizer's vocabulary do not exist for it.

The preflight compares every faster path with `probe`: plain forward passes of one sequence at a time, and the
objective on their distributions.

Letters in shapes: B prompts of a batch, P their padded length, L padded length with completion, C completion
tokens, T those of one sequence, N tokens of several, H hidden size, V vocabulary, K ids of an objective's S.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distill.prompts.rewards import RewardFn
from distill.prompts.stream import Prompt
from student_trainer.objectives.config import (
    SFT,
    ObjectiveConfig,
    needs,
    student_topk,
    teacher_temperature,
)
from student_trainer.objectives.divergences import Objective, Targets, at, build
from sync import wire
from sync.wire import EvalReport, ScoreSequence, Version, pack, unpack
from teacher_service.engines.head import OutputHead
from teacher_service.engines.sampling import Sampled, completions, grow

Watch = Callable[[Tensor, Tensor], None]
"""Called at every step with p [B, V] and the tokens drawn from it [B], rows that have ended included."""


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model of transformers in fp32, and its head cut to the tokenizer's vocabulary."""

    model: Any
    head: OutputHead


@dataclass(frozen=True)
class Limits:
    """Limits of sampling, and of what is in memory at once."""

    max_tokens: int
    end_ids: tuple[int, ...]
    """Ids that end a completion; the ending one is part of it."""
    batch: int = 128
    """Completions sampled together."""
    chunk: int = 1024
    """Positions whose full-vocabulary distributions are in memory at once."""


def evaluate(
    student: LanguageModel,
    teachers: Mapping[str, LanguageModel],
    prompts: Sequence[Prompt],
    limits: Limits,
    *,
    route: Callable[[str], str],
    reward_fn: RewardFn | None = None,
    seed: int = 0,
    version: Version = Version(0, 0),
) -> EvalReport:
    """Sample one completion per prompt and compare the student with the teacher that each is routed to.

    `route`: a prompt's source → name of its teacher. `reward_fn` None: no pass rate. The same seed and
    batch give the same completions. `version` only names the report.
    """
    started, kl = time.monotonic(), 0.0
    tokens = passed = cut = 0
    generator = torch.Generator(student.model.device).manual_seed(seed)
    with torch.inference_mode():
        for name, batch in _batches(prompts, limits.batch, route):
            sampled = sample(student, [p.token_ids for p in batch], limits, generator)
            total, count = compare(student, teachers[name], sampled, limits.chunk)
            kl, tokens = kl + total, tokens + count
            for prompt, completion in zip(batch, completions(sampled), strict=True):
                cut += completion[-1] not in limits.end_ids
                passed += reward_fn is not None and reward_fn(prompt, completion) > 0
    return EvalReport(
        version=version,
        reverse_kl=kl / max(1, tokens),
        pass_rate=None if reward_fn is None else passed / len(prompts),
        completions=len(prompts),
        tokens=tokens,
        truncated=cut / len(prompts),
        seconds=time.monotonic() - started,
    )


def _batches(
    prompts: Sequence[Prompt], size: int, route: Callable[[str], str]
) -> Iterator[tuple[str, list[Prompt]]]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.token_ids)):
        groups.setdefault(route(prompt.source), []).append(prompt)
    for name, group in groups.items():
        for start in range(0, len(group), size):
            yield name, group[start : start + size]


def sample(
    student: LanguageModel,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    generator: torch.Generator,
    watch: Watch = lambda p_BV, token_B: None,
) -> Sampled:
    """One completion of every prompt, temperature 1, with a key-value cache."""

    def draw(logits_BV: Tensor) -> Tensor:
        p_BV = logits_BV.softmax(-1)
        token_B1 = torch.multinomial(p_BV, 1, generator=generator)
        watch(p_BV, token_B1[:, 0])
        return token_B1

    vocab = len(student.head.weight_VH)
    states = grow(student.model, vocab, prompts, limits.end_ids, limits.max_tokens, draw)
    return deque(states, maxlen=1)[0]


def compare(
    student: LanguageModel, teacher: LanguageModel, sampled: Sampled, chunk: int
) -> tuple[float, int]:
    """Exact reverse KL, summed over every completion token, and their number; `chunk` positions at a time."""
    pairs = zip(_hidden(student, sampled).split(chunk), _hidden(teacher, sampled).split(chunk), strict=True)
    kl, tokens = 0.0, 0
    for student_NH, teacher_NH in pairs:
        logp_NV = student.head.logits(student_NH).log_softmax(-1)
        logq_NV = teacher.head.logits(teacher_NH).log_softmax(-1)
        kl += float((logp_NV.exp() * (logp_NV - logq_NV)).sum())
        tokens += len(logp_NV)
    return kl, tokens


def _hidden(scored: LanguageModel, sampled: Sampled) -> Tensor:
    """Hidden states [C, H] from which every completion token is predicted."""
    decoder = scored.model.get_decoder()
    hidden_BLH = decoder(
        input_ids=sampled.tokens_BL[:, :-1],
        attention_mask=sampled.attended_BL[:, :-1],
        position_ids=(sampled.attended_BL.cumsum(1) - 1).clamp_min(0)[:, :-1],
        use_cache=False,
    ).last_hidden_state
    return hidden_BLH[sampled.completion_BL[:, 1:]]


# --- reference values for the preflight: one sequence at a time, without padding or packing


class SelfAndTeacher(NamedTuple):
    """An objective on real distributions; per token."""

    self_loss: float
    self_gradient: float
    teacher_gradient: float


def probe(
    request: wire.ProbeRequest,
    student: LanguageModel,
    teachers: Mapping[str, LanguageModel],
    objective: ObjectiveConfig,
    temperature: float,
) -> wire.ProbeReply:
    """Reply of an evaluator; `temperature`: of the rollouts. Raises KeyError for an unknown teacher."""

    def scores(sequence: ScoreSequence, logp_TV: Tensor) -> wire.Array:
        return pack(at(logp_TV, _completion(sequence, logp_TV.device)).cpu().numpy())

    found = {}
    for name, sequences in request.teachers.items():
        logq = [log_probs(teachers[name], one) for one in sequences]
        figures: SelfAndTeacher | tuple[None, None, None] = (None, None, None)
        if not isinstance(objective, SFT):
            token_N = torch.cat([_completion(one, logq[0].device) for one in sequences])
            live_NV = torch.cat([log_probs(student, one, temperature) for one in sequences])
            teacher_NV = (torch.cat(logq) / teacher_temperature(objective, temperature)).log_softmax(-1)
            k = needs(objective).topk or student_topk(objective)
            figures = objective_figures(build(objective), live_NV, teacher_NV, token_N, k)
        found[name] = wire.ReferenceScores(list(map(scores, sequences, logq)), *figures)
    own = [scores(one, log_probs(student, one, temperature)) for one in request.student]
    return wire.ProbeReply(student=own, teachers=found)


@torch.inference_mode()
def log_probs(model: LanguageModel, sequence: ScoreSequence, temperature: float = 1.0) -> Tensor:
    """fp32 [T, V]: distributions of the completion's tokens."""
    tokens_L = torch.from_numpy(unpack(sequence.token_ids).astype(np.int64)).to(model.model.device)
    output = model.model.get_decoder()(input_ids=tokens_L[None], use_cache=False)
    hidden_TH = output.last_hidden_state[0, sequence.start - 1 : -1]
    return (model.head.logits(hidden_TH) / temperature).log_softmax(-1)


def objective_figures(
    objective: Objective, live_NV: Tensor, teacher_NV: Tensor, token_N: Tensor, k: int = 0
) -> SelfAndTeacher:
    """The objective with the student as its own teacher, and the change of its gradient with the real one.

    `k`: size of S for objectives that have one: the teacher's top-k.
    """
    own_loss, own_NV = _gradient(objective, live_NV, live_NV, token_N, k)
    _, other_NV = _gradient(objective, live_NV, teacher_NV, token_N, k)
    sums = abs(own_loss), float(own_NV.norm()), float((other_NV - own_NV).norm())
    return SelfAndTeacher(*(total / len(token_N) for total in sums))


def _gradient(
    objective: Objective, live_NV: Tensor, teacher_NV: Tensor, token_N: Tensor, k: int
) -> tuple[float, Tensor]:
    """Summed loss of fresh tokens, and its gradient in the student's logits."""
    best = teacher_NV.topk(min(k, teacher_NV.shape[1]), dim=1) if k else None
    targets = Targets(
        token_N=token_N,
        behavior_logp_N=at(live_NV, token_N),
        teacher_logp_N=at(teacher_NV, token_N),
        fresh_N=torch.ones_like(token_N, dtype=torch.bool),
        support_NK=None if best is None else best.indices,
        support_logp_NK=None if best is None else best.values,
        teacher_logp_NV=teacher_NV,
    )
    logits_NV = live_NV.clone().requires_grad_()
    loss_N, _ = objective(logits_NV.log_softmax(1), targets)
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), logits_NV)
    return float(loss_N.detach().sum()), gradient_NV


def _completion(sequence: ScoreSequence, device: torch.device) -> Tensor:
    return torch.from_numpy(unpack(sequence.token_ids)[sequence.start :].astype(np.int64)).to(device)
