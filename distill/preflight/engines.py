"""Preflight with live engines: which checks run, in which order, and what a failure does.

    each teacher: tokenizer, template, capabilities, length ─▶ scores repeat ─▶ not uniform, shifted, cut
    evaluator:    the same scores by plain forward passes; the objective with and without its teacher
    replicas:     their log-probabilities against the evaluator's (the trainer's come with the first step)

Without an evaluator, a teacher's scores are checked against each other alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from distill.config import RunConfig
from distill.interfaces import Transform
from distill.models import student_limit
from distill.preflight import probes
from distill.preflight.checks import shares_template
from distill.preflight.probes import Finding
from distill.prompts.sources import PromptSplit, longest_prompt, sample_prompts
from distill.rollout.replica_client import ReplicaEngine
from distill.scoring import score_sequence
from student_trainer.objectives.config import needs, student_topk
from sync import tokenizers
from sync.errors import ConfigError
from sync.tokenizers import load_tokenizer
from sync.wire import (
    Generated,
    GeneratePrompt,
    GenerateRequest,
    ProbeReply,
    ProbeRequest,
    Sampling,
    Scored,
    ScoreRefused,
    ScoreSequence,
    TeacherInfo,
    Want,
    pack,
    unpack,
)
from teacher_service.router import Router

PROBE_TOKENS = 16
"""Longest completion of a probe; the longest sequence is one of its own."""


class Teacher(Protocol):
    """A scoring client: `teacher_service.client.TeacherClient` over HTTP."""

    async def info(self, timeout: float | None = None) -> TeacherInfo: ...
    async def score(
        self, sequences: list[ScoreSequence], want: Want, deadline: float | None = None
    ) -> list[Scored | ScoreRefused]: ...


class Prober(Protocol):
    """Plain forward passes: `distill.evaluation.client.HttpEvaluator` over HTTP."""

    async def probe(self, request: ProbeRequest, timeout: float) -> ProbeReply: ...


@dataclass(frozen=True)
class Engines:
    """What is checked."""

    teachers: Mapping[str, Teacher]
    evaluator: Prober | None
    """None: no plain forward passes."""
    replicas: Mapping[str, ReplicaEngine] = field(default_factory=dict)
    """Empty: the trainer's first step compares their log-probabilities with its own."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)


async def check_engines(
    config: RunConfig, split: PromptSplit, engines: Engines, say: Callable[[Finding], None]
) -> None:
    """Run every check; `say` gets each finding at once. Raises ConfigError when a check failed."""
    checks = _Checks(config, split, engines, say)
    await checks.run()
    refuse(checks.findings)


def refuse(findings: Sequence[Finding]) -> None:
    """Raise ConfigError that names every failed finding; nothing when all passed."""
    failed = [finding.line for finding in findings if finding.problem is not None]
    if failed:
        raise ConfigError(
            f"preflight: {len(failed)} of {len(findings)} checks failed, nothing is trained\n"
            + "\n".join(failed)
        )


@dataclass
class _Checks:
    """One preflight."""

    config: RunConfig
    split: PromptSplit
    engines: Engines
    say: Callable[[Finding], None]
    findings: list[Finding] = field(default_factory=list)
    scored: dict[str, tuple[list[ScoreSequence], list[np.ndarray]]] = field(default_factory=dict)
    """Teacher → sequences, and their scores."""
    tolerances: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        config = self.config
        limit = await asyncio.to_thread(student_limit, config)
        self._note(
            probes.fits(
                "the student",
                longest_prompt(self.split),
                config.rollout.max_tokens,
                limit,
                "raise max-model-len in student.engine_args",
            )
        )
        tokenizer = await asyncio.to_thread(load_tokenizer, config.student)
        for name, teacher in self.engines.teachers.items():
            await self._teacher(name, teacher, tokenizer)
        rollouts = await self._rollouts()
        if self.engines.evaluator is not None and (self.scored or rollouts):
            await self._plain(self.engines.evaluator, rollouts)

    def _note(self, finding: Finding, about: str = "") -> bool:
        """Keep and report a finding; whether it passed."""
        finding = replace(finding, check=f"{about}: {finding.check}") if about else finding
        self.findings.append(finding)
        self.say(finding)
        return finding.problem is None

    # --- teachers -----------------------------------------------------------------------------------------

    async def _teacher(self, name: str, teacher: Teacher, tokenizer: Any) -> None:
        """Check one teacher; its scores only when tokens mean the same to it."""
        about, config = f"teacher {name}", self.config
        info = await teacher.info(config.run.start_seconds)
        seen = self._prompts(name)
        longest = longest_prompt(self.split) + max(len(ids) - own for ids, own in seen)
        basics = [
            probes.same_tokenizer(tokenizers.fingerprint(tokenizer), info),
            probes.same_template(
                tokenizers.chat_template_fingerprint(tokenizer), info, needed=shares_template(config, name)
            ),
            capabilities(config, info),
            probes.fits(
                "it", longest, config.rollout.max_tokens, info.max_length, "raise the teacher's max_length"
            ),
        ]
        passed = [self._note(finding, about) for finding in basics]
        if all(passed):
            await self._scores(name, teacher, info, [ids for ids, _ in seen], longest)

    async def _scores(
        self, name: str, teacher: Teacher, info: TeacherInfo, prompts: list[Sequence[int]], longest: int
    ) -> None:
        settings, about, vocab = self.config.preflight, f"teacher {name}", info.vocab_size
        tolerance = settings.score_tolerance or (1e-3 if info.dtype == "float32" else 0.1)
        tokens = min(PROBE_TOKENS, self.config.rollout.max_tokens)
        sequences = probes.probe_sequences(prompts, settings.sequences, tokens)
        finding, noise = await probes.repeatable(teacher.score, sequences, tolerance)
        if not self._note(finding, about):
            return
        if not self._note(await probes.not_uniform(teacher.score, sequences[0], vocab), about):
            return
        self._note(await probes.not_shifted(teacher.score, sequences[0], vocab, noise), about)
        if settings.longest:
            whole = probes.longest_sequence(prompts, longest, self.config.rollout.max_tokens)
            self._note(await probes.not_truncated(teacher.score, whole, vocab), about)
        self.tolerances[name] = tolerance
        self.scored[name] = sequences, await probes.scores(teacher.score, sequences)

    def _prompts(self, name: str) -> list[tuple[Sequence[int], int]]:
        """Prompts as the teacher sees them, each with its length as the student sees it."""
        route, transform = Router(self.config.teachers).route, self.engines.transforms.get(name)
        sample = sample_prompts(self.split)
        mine = [prompt for prompt in sample if route(prompt.source) == name] or sample
        return [
            (prompt.token_ids if transform is None else transform(prompt), len(prompt.token_ids))
            for prompt in mine[: self.config.preflight.sequences]
        ]

    # --- replicas and plain forward passes ------------------------------------------------------------------

    async def _rollouts(self) -> list[Generated]:
        """One completion of some prompts from every replica."""
        rollout = self.config.rollout
        sampling = Sampling(
            max_tokens=min(PROBE_TOKENS, rollout.max_tokens),
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            stop_token_ids=rollout.stop_token_ids,
        )
        prompts = sample_prompts(self.split)[: self.config.preflight.sequences]
        answers = []
        for name, replica in self.engines.replicas.items():
            batch = [GeneratePrompt(f"{name}/{i}", prompt.token_ids) for i, prompt in enumerate(prompts)]
            async for answer in replica.generate(GenerateRequest(sampling=sampling, prompts=batch)):
                if not isinstance(answer, Generated):
                    raise ConfigError(f"{name} refuses a prompt of this run: {answer.error}")
                answers.append(answer)
        return answers

    async def _plain(self, evaluator: Prober, rollouts: list[Generated]) -> None:
        prompts = sample_prompts(self.split)
        seen = [pack(np.asarray(prompts[int(one.id.rpartition("/")[2])].token_ids, "i4")) for one in rollouts]
        written = [
            score_sequence(one.id, prompt, one.token_ids, one.topk_ids)
            for one, prompt in zip(rollouts, seen, strict=True)
        ]
        request = ProbeRequest(
            student=written, teachers={name: sequences for name, (sequences, _) in self.scored.items()}
        )
        reply = await evaluator.probe(request, self.config.run.start_seconds)
        for name in reply.teachers:
            for finding in self._against_plain(name, reply):
                self._note(finding, f"teacher {name}")
        if rollouts:
            logp = [unpack(one) for one in reply.student]
            kl = probes.mismatch(logp, [unpack(answer.logprob) for answer in rollouts])
            tolerance = self.config.preflight.mismatch_tolerance
            self._note(probes.rollouts_match(kl, tolerance, "a plain forward pass"))

    def _against_plain(self, name: str, reply: ProbeReply) -> Iterator[Finding]:
        found, (_, scored) = reply.teachers[name], self.scored[name]
        plain = [unpack(logprob) for logprob in found.logprob]
        yield probes.equals_plain(scored, plain, self.tolerances[name])
        if found.self_loss is not None and found.self_gradient is not None:
            yield probes.self_teacher(found.self_loss, found.self_gradient)
        begins_as_student = self.config.teachers[name].follow_student_every is not None
        if found.teacher_gradient is not None and not begins_as_student:
            yield probes.gradient_depends(found.teacher_gradient)


def capabilities(config: RunConfig, info: TeacherInfo) -> Finding:
    """Whether the teacher's engine can compute what the objective needs."""
    want = needs(config.objective, config.rollout.temperature)
    needed = {
        "topk": want.topk > 0,
        "hidden": want.hidden,
        "gather": student_topk(config.objective) > 0,
        "generate": config.objective.on_policy < 1,
        "temperature": want.temperature != 1.0,
    }
    lacking = [name for name, wanted in needed.items() if wanted and name not in info.can]
    figure = f'engine "{info.engine}" gives {", ".join(info.can) or "the sampled token alone"}'
    problem = (
        f'objective "{config.objective.type}" needs {", ".join(lacking)}: choose objective "sampled" with '
        'on_policy = 1 and teacher_temperature = "one", or the transformers engine'
    )
    return Finding("capabilities", figure, problem if lacking else None)


def first_step(config: RunConfig, figures: Mapping[str, float]) -> list[Finding]:
    """Findings in the metrics of a first step; empty when none of its tokens is of age 0."""
    if "mismatch_kl" not in figures:
        return []
    settings = config.preflight
    findings = [
        probes.rollouts_match(figures["mismatch_kl"], settings.mismatch_tolerance, "the trainer at age 0")
    ]
    if "score_gap" in figures:
        findings.append(probes.scores_match(figures["score_gap"], settings.score_tolerance or 0.1))
    return findings
