"""Preflight with live engines: which checks run, in which order, and what a failure does.

    environments: tokenizer, tasks, length; the first prompts of some episodes, which are probed below
    each teacher: tokenizer, template, capabilities, length ─▶ scores repeat, shift, are cut
    evaluator:    the same scores by plain forward passes, of a teacher that is small enough to be loaded
                  there; the objective with and without its teacher
    replicas:     their log-probabilities against the evaluator's (the trainer's come with the first step)

Without an evaluator, a teacher's scores are checked against each other alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import numpy as np

from distill.config import RunConfig
from distill.environments.client import EnvironmentClient
from distill.evaluation.schedule import HttpEvaluator
from distill.interfaces import Transform
from distill.preflight_checks import objective, probes
from distill.preflight_checks.checks import must_differ
from distill.preflight_checks.probes import Finding
from distill.preflight_checks.tokens import shares_template
from distill.prompts.sources import PromptSplit, longest_prompt, sample_prompts, student_limit
from distill.prompts.stream import Prompt
from distill.rollout.replica_client import ReplicaEngine
from distill.rollout.validation import sampling_of
from distill.scoring import ask
from distill.translation import TextTeacher
from sync import wire
from sync.base import tokenizers
from sync.base.errors import ConfigError
from sync.base.tokenizers import load_tokenizer
from sync.wire import Generated, ScoreSequence, TeacherInfo, pack, unpack
from teacher_service.client import TeacherClient
from teacher_service.router import Router

PROBE_TOKENS: Final = 16
"""Longest completion of a probe; the longest sequence is one of its own."""


@dataclass(frozen=True)
class Engines:
    """Processes that are checked."""

    teachers: Mapping[str, TeacherClient]
    evaluator: HttpEvaluator | None
    """Plain forward passes; None: skip the checks that need them."""
    replicas: Mapping[str, ReplicaEngine] = field(default_factory=dict)
    """Empty: the trainer's first step compares their log-probabilities with its own."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    environments: Mapping[str, EnvironmentClient] = field(default_factory=dict)

    def clients(self) -> Iterator[TeacherClient | HttpEvaluator | ReplicaEngine | EnvironmentClient]:
        """All that are to be closed."""
        yield from self.teachers.values()
        yield from self.replicas.values()
        yield from self.environments.values()
        if self.evaluator is not None:
            yield self.evaluator


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
    """One preflight's findings so far."""

    config: RunConfig
    split: PromptSplit
    engines: Engines
    say: Callable[[Finding], None]
    findings: list[Finding] = field(default_factory=list)
    scored: dict[str, tuple[list[ScoreSequence], list[np.ndarray], float]] = field(default_factory=dict)
    """Teacher → sequences, their scores, and the tolerance of a score."""
    sample: list[Prompt] = field(default_factory=list)
    """Prompts that are probed, with the first ones of environments."""
    longest: int = 0
    """Tokens of the longest prompt, of an episode all but one more answer."""

    async def run(self) -> None:
        config, token_limit = self.config, self.config.rollout.max_tokens
        limit = await asyncio.to_thread(student_limit, config)
        tokenizer = await asyncio.to_thread(load_tokenizer, config.student)
        self.sample = sample_prompts(self.split)
        if not await self._environments(tokenizer, limit):
            return
        episodes = [environment.max_tokens or limit for environment in config.environments.values()]
        self.longest = max([longest_prompt(self.split), *(tokens - token_limit for tokens in episodes)])
        remedy = "raise max-model-len in student.engine_args"
        self._note(probes.fits("the student", self.longest, token_limit, limit, remedy))
        for name, teacher in self.engines.teachers.items():
            await self._teacher(name, teacher, tokenizer)
        rollouts = await self._rollouts()
        if self.engines.evaluator is not None and (self.scored or rollouts):
            await self._plain(self.engines.evaluator, rollouts)

    async def _environments(self, tokenizer: Any, limit: int) -> bool:
        """Check each of them, and fill in first prompts; whether all passed."""
        config, clients, passed = self.config, self.engines.environments, True
        fingerprint = tokenizers.fingerprint(tokenizer)
        for name, client in clients.items():
            info = await client.info(config.run.start_seconds)
            passed &= self._note(probes.makes_same_tokens(fingerprint, info), name, "environment")
            passed &= self._note(probes.enough_tasks(config, name, info), name, "environment")
        if not passed:
            return False
        count = config.preflight.sequences
        self.sample = await probes.with_first_prompts(self.sample, clients, count, tokenizer)
        for name in clients:
            first = [prompt for prompt in self.sample if prompt.environment == name]
            token_limit = min(limit, config.environments[name].max_tokens or limit)
            passed &= self._note(probes.first_fits(first, token_limit), name, "environment")
        return passed

    def _note(self, finding: Finding, name: str = "", role: str = "teacher") -> bool:
        finding = replace(finding, check=f"{role} {name}: {finding.check}") if name else finding
        self.findings.append(finding)
        self.say(finding)
        return finding.problem is None

    # --- teachers

    async def _teacher(self, name: str, teacher: TeacherClient, tokenizer: Any) -> None:
        """Check one teacher; its scores only when tokens mean the same to it."""
        config = self.config
        info = await teacher.info(config.run.start_seconds)
        seen = self._prompts(name)
        longest = self.longest + max(len(ids) - prompt_length for ids, prompt_length in seen)
        lengths = longest, config.rollout.max_tokens, info.max_length
        template = tokenizers.chat_template_fingerprint(tokenizer)
        known, request = config.student.known_ids, teacher.score
        basics = [capabilities(config, info), probes.fits("it", *lengths, "raise the teacher's max_length")]
        if isinstance(teacher, TextTeacher):
            request = teacher.score_ids
        else:
            basics = [
                probes.same_tokenizer(tokenizers.fingerprint(tokenizer, known), info, known),
                probes.same_template(template, info, needed=shares_template(config, name)),
                *basics,
            ]
        passed = [self._note(finding, name) for finding in basics]
        if not all(passed):
            return
        settings, token_limit, prompts = config.preflight, config.rollout.max_tokens, [ids for ids, _ in seen]
        tolerance = settings.score_tolerance or (1e-3 if info.dtype == "float32" else 0.2)
        sequences = probes.probe_sequences(prompts, settings.sequences, min(PROBE_TOKENS, token_limit))

        async def score(sequences: list[wire.ScoreSequence]) -> list[Any]:
            return [result for result, _ in await ask(teacher, sequences, request)]

        finding, noise = await probes.repeatable(score, sequences, tolerance)
        if not self._note(finding, name):
            return
        self._note(await probes.not_shifted(score, sequences[0], info.vocab_size, noise), name)
        if settings.longest:
            whole = probes.longest_sequence(prompts, longest, token_limit)
            self._note(await probes.not_truncated(score, whole, info.vocab_size), name)
        if not isinstance(teacher, TextTeacher):  # the student cannot read its ids
            self.scored[name] = sequences, await probes.scores(score, sequences), tolerance

    def _prompts(self, name: str) -> list[tuple[Sequence[int], int]]:
        """Prompts as the teacher sees them, each with its length as the student sees it."""
        route, transform = Router(self.config.teachers).route, self.engines.transforms.get(name)
        mine = [prompt for prompt in self.sample if route(prompt.source) == name] or self.sample
        return [
            (prompt.token_ids if transform is None else transform(prompt), len(prompt.token_ids))
            for prompt in mine[: self.config.preflight.sequences]
        ]

    # --- replicas and plain forward passes

    async def _rollouts(self) -> list[Generated]:
        rollout = self.config.rollout
        sampling = msgspec.structs.replace(
            sampling_of(rollout), max_tokens=min(PROBE_TOKENS, rollout.max_tokens)
        )
        prompts = self.sample[: self.config.preflight.sequences]
        answers = []
        for name, replica in self.engines.replicas.items():
            batch = [wire.GeneratePrompt(f"{name}/{i}", prompt.token_ids) for i, prompt in enumerate(prompts)]
            async for answer in replica.generate(wire.GenerateRequest(sampling=sampling, prompts=batch)):
                if not isinstance(answer, Generated):
                    raise ConfigError(f"{name} refuses a prompt of this run: {answer.error}")
                answers.append(answer)
        return answers

    async def _plain(self, evaluator: HttpEvaluator, rollouts: list[Generated]) -> None:
        completed = []
        for rollout in rollouts:
            prompt = self.sample[int(rollout.id.rpartition("/")[2])].token_ids
            ids = pack(np.asarray(prompt, "i4"))
            completed.append(wire.ScoreSequence.of(rollout.id, ids, rollout.token_ids, rollout.topk_ids))
        teachers = {name: sequences for name, (sequences, _, _) in self.scored.items()}
        masks = [rollout.mask for rollout in rollouts if rollout.mask is not None]
        request = wire.ProbeRequest(student=completed, teachers=teachers, masks=masks)
        reply = await evaluator.probe(request, self.config.run.start_seconds)
        for name, teacher in reply.teachers.items():
            _, scored, tolerance = self.scored[name]
            if teacher.logprob is None:
                reason = teacher.not_shown or "the teacher was not loaded"
                self._note(Finding(probes.EQUALS_PLAIN, reason, shown=False), name)
            else:
                plain = [unpack(logprob) for logprob in teacher.logprob]
                self._note(probes.equals_plain(scored, plain, tolerance), name)
            if teacher.self_loss is not None and teacher.self_gradient is not None:
                self._note(probes.self_teacher(teacher.self_loss, teacher.self_gradient), name)
            if teacher.teacher_gradient is not None and must_differ(self.config, name):
                self._note(probes.gradient_depends(teacher.teacher_gradient), name)
        if rollouts:
            logp = [unpack(scores) for scores in reply.student]
            kl = probes.mismatch(logp, [unpack(answer.logprob) for answer in rollouts])
            self._note(probes.rollouts_match(kl, _mismatch(self.config), "a plain forward pass"))


def capabilities(config: RunConfig, info: TeacherInfo) -> Finding:
    """Whether the teacher's engine can compute what the objective needs."""
    figure = f'engine "{info.engine}" gives {", ".join(info.can) or "the sampled token alone"}'
    if not (missing := objective.lacking(config, info.can)):
        limit = min(info.max_topk, info.vocab_size)
        return Finding("capabilities", figure, objective.too_many(config, limit))
    instead = "" if info.engine == "transformers" else ', or engine = "transformers"'
    problem = f'objective "{config.objective.type}" needs {", ".join(missing)}: '
    return Finding("capabilities", figure, f"{problem}set {objective.remedy(config, info.can)}{instead}")


def first_step(config: RunConfig, figures: Mapping[str, float]) -> list[Finding]:
    """Findings in the metrics of a first step; empty when its own weights sampled none of its tokens."""
    if "train/mismatch_kl" not in figures:
        return []
    settings, kl = config.preflight, figures["train/mismatch_kl"]
    findings = [probes.rollouts_match(kl, _mismatch(config), "the trainer at age 0")]
    if "train/score_gap" in figures:
        findings.append(probes.scores_match(figures["train/score_gap"], settings.score_tolerance or 0.1))
    return findings


def _mismatch(config: RunConfig) -> float:
    assert config.preflight.mismatch_tolerance is not None, "the launcher resolves it before anything starts"
    return config.preflight.mismatch_tolerance
