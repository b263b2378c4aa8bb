"""Preflight with live engines: what is asked of whom, in which order, and what a failure does.

    each teacher: tokenizer, template, capabilities, length ─▶ scores repeat ─▶ not uniform, shifted, cut
    evaluator:    the same scores by plain forward passes; the objective with and without its teacher
    replicas:     their log-probabilities against the evaluator's (the trainer's come with the first step)

Where there is no evaluator, a teacher is judged by what its scores say about themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from distill.config import RunConfig
from distill.interfaces import Transform
from distill.preflight import probes
from distill.preflight.checks import missing_scores, shares_template, student_limit
from distill.preflight.probes import Finding
from distill.prompts.held_out import PromptSplit, longest_prompt, sample_prompts
from distill.prompts.stream import Prompt
from distill.rollout.replica_client import ReplicaEngine
from distill.scoring.scorer import score_sequence
from sync import tokenizers
from sync.errors import ConfigError
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
from teacher_service.describe import load_tokenizer
from teacher_service.router import Router

PROBE_TOKENS = 16
"""Longest completion of a probe; the longest sequence is one of its own."""


class Teacher(Protocol):
    """What is asked of a teacher: `teacher_service.client.TeacherClient` has it over HTTP."""

    async def info(self, timeout: float | None = None) -> TeacherInfo: ...
    async def score(
        self, sequences: list[ScoreSequence], want: Want, deadline: float | None = None
    ) -> list[Scored | ScoreRefused]: ...


class Prober(Protocol):
    """What is asked of the evaluator."""

    async def probe(self, request: ProbeRequest, timeout: float) -> ProbeReply: ...


@dataclass(frozen=True)
class Engines:
    """Who is asked."""

    teachers: Mapping[str, Teacher]
    evaluator: Prober | None
    """None: no plain forward passes."""
    replicas: Mapping[str, ReplicaEngine] = field(default_factory=dict)
    """Empty: the trainer's first step compares their log-probabilities with its own."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)


async def check_engines(
    config: RunConfig, split: PromptSplit, engines: Engines, say: Callable[[Finding], None]
) -> None:
    """Ask everybody; `say` hears each finding at once. Raises ConfigError when a check failed."""
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
    asked: dict[str, list[ScoreSequence]] = field(default_factory=dict)
    """Teacher → sequences that it marked."""
    scored_sequences: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Teacher → its marks of them."""
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
        if self.engines.evaluator is not None and (self.asked or rollouts):
            await self._plain(self.engines.evaluator, rollouts)

    def _note(self, finding: Finding, about: str = "") -> bool:
        """Keep and tell a finding; whether it passed."""
        finding = replace(finding, check=f"{about}: {finding.check}") if about else finding
        self.findings.append(finding)
        self.say(finding)
        return finding.problem is None

    # --- teachers -----------------------------------------------------------------------------------------

    async def _teacher(self, name: str, teacher: Teacher, tokenizer: Any) -> None:
        """Every check of one teacher; later ones only when what they stand on holds."""
        about, config = f"teacher {name}", self.config
        info = await teacher.info(config.run.start_seconds)
        seen = self._seen(name)
        longest = longest_prompt(self.split) + max(len(ids) - own for ids, own in seen)
        means_the_same = [
            probes.same_tokenizer(tokenizers.fingerprint(tokenizer), info),
            probes.same_template(
                tokenizers.chat_template_fingerprint(tokenizer), info, needed=shares_template(config, name)
            ),
            missing_scores(config, info),
            probes.fits(
                "it", longest, config.rollout.max_tokens, info.max_length, "raise the teacher's max_length"
            ),
        ]
        passed = [self._note(finding, about) for finding in means_the_same]
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
        self.asked[name], self.tolerances[name] = sequences, tolerance
        self.scored_sequences[name] = await probes.scores(teacher.score, sequences)

    def _seen(self, name: str) -> list[tuple[Sequence[int], int]]:
        """Prompts as the teacher sees them, each with its length as the student sees it."""
        route, transform = Router(self.config.teachers).route, self.engines.transforms.get(name)
        known = sample_prompts(self.split)
        mine: list[Prompt] = [prompt for prompt in known if route(prompt.source) == name] or known
        return [
            (prompt.token_ids if transform is None else transform(prompt), len(prompt.token_ids))
            for prompt in mine[: self.config.preflight.sequences]
        ]

    # --- replicas and plain forward passes ------------------------------------------------------------------

    async def _rollouts(self) -> list[Generated]:
        """One completion of some prompts from every replica."""
        sampling = _sampling(self.config)
        prompts = sample_prompts(self.split)[: self.config.preflight.sequences]
        answers = []
        for name, replica in self.engines.replicas.items():
            asked = [GeneratePrompt(f"{name}/{i}", prompt.token_ids) for i, prompt in enumerate(prompts)]
            async for answer in replica.generate(GenerateRequest(sampling=sampling, prompts=asked)):
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
        request = ProbeRequest(student=written, teachers=self.asked)
        reply = await evaluator.probe(request, self.config.run.start_seconds)
        for name, found in reply.teachers.items():
            plain = [unpack(logprob) for logprob in found.logprob]
            self._note(
                probes.equals_plain(self.scored_sequences[name], plain, self.tolerances[name]),
                f"teacher {name}",
            )
            if found.self_loss is not None and found.self_gradient is not None:
                self._note(probes.self_teacher(found.self_loss, found.self_gradient), f"teacher {name}")
            begins_equal = self.config.teachers[name].follow_student_every is not None
            if found.teacher_gradient is not None and not begins_equal:
                self._note(probes.gradient_depends(found.teacher_gradient), f"teacher {name}")
        if rollouts:
            logp = [unpack(one) for one in reply.student]
            kl = probes.mismatch(logp, [unpack(answer.logprob) for answer in rollouts])
            tolerance = self.config.preflight.mismatch_tolerance
            self._note(probes.rollouts_match(kl, tolerance, "a plain forward pass"))


def first_step(config: RunConfig, figures: Mapping[str, float]) -> list[Finding]:
    """Findings in the figures of a first step; empty when none of its tokens is of age 0."""
    if "mismatch_kl" not in figures:
        return []
    settings = config.preflight
    findings = [
        probes.rollouts_match(figures["mismatch_kl"], settings.mismatch_tolerance, "the trainer at age 0")
    ]
    if "score_gap" in figures:
        findings.append(probes.scores_match(figures["score_gap"], settings.score_tolerance or 0.1))
    return findings


def _sampling(config: RunConfig) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_tokens=min(PROBE_TOKENS, rollout.max_tokens),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        stop_token_ids=rollout.stop_token_ids,
    )
