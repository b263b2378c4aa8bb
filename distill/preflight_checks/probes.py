"""Probes of a teacher's scores: pure functions over anything that scores sequences.

Each probe changes the request in one way and says which scores may change: a replaced token changes those
from its own position on (never earlier, never only later), the first token of a long prompt the last ones.

Letters: T completion tokens of a sequence, L prompt + completion tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import msgspec
import numpy as np

from distill.config import RunConfig
from distill.config.prompts import EnvironmentPrompts, sources_of
from distill.environments.client import EnvironmentClient
from distill.prompts.stream import Prompt
from sync import wire
from sync.base import tokenizers
from sync.base.errors import ConfigError

Score = Callable[[list[wire.ScoreSequence]], Awaitable[list[wire.Scored | wire.ScoreRefused]]]
"""A teacher's `score`: answers in the order of the request."""

REPLACEMENTS: Final = 8
"""Tokens tried at one position: it takes one that the teacher finds more or less likely."""
SHARPEST_NOISE: Final = 1e-3
"""Nats below which a difference says nothing, however exactly a teacher repeats itself."""
SELF_TOLERANCE: Final = 1e-4
"""Nats, and gradient norm, per token: what fp32 leaves of an objective whose teacher is the student."""
ANSWER: Final = "I do not know."
"""The student's answer to the first turns that the preflight plays."""
EQUALS_PLAIN: Final = "equals a plain forward pass"
LEAST_GRADIENT: Final = 1e-6
"""Per token: a teacher that changes the gradient by less teaches nothing."""


@dataclass(frozen=True)
class Finding:
    """Result of one check, in one line."""

    check: str
    figure: str
    """What was measured, with its limit."""
    problem: str | None = None
    """Cause and remedy; None: passed."""
    shown: bool = True
    """False: it could not be made, and `figure` says why; it neither passed nor failed."""

    @property
    def line(self) -> str:
        verdict = "ok    " if self.problem is None else "FAILED"
        verdict = verdict if self.shown else "NOT SHOWN"
        return f"{verdict} {self.check}: {self.figure}" + (f". {self.problem}" if self.problem else "")


def _finding(check: str, passed: bool, figure: str, problem: str) -> Finding:
    return Finding(check, figure, None if passed else problem)


# --- requests


def probe_sequences(prompts: Sequence[Sequence[int]], count: int, tokens: int) -> list[wire.ScoreSequence]:
    """`count` sequences: a prompt, continued by `tokens` tokens of the prompts after it."""
    pool = np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts])
    starts = np.cumsum([len(prompt) for prompt in prompts])
    sequences = []
    for i in range(count):
        prompt = np.asarray(prompts[i % len(prompts)], np.int32)
        rest = np.take(pool, starts[i % len(prompts)] + i // len(prompts) + np.arange(tokens), mode="wrap")
        sequences.append(
            wire.ScoreSequence(f"probe-{i}", wire.pack(np.concatenate([prompt, rest])), len(prompt))
        )
    return sequences


def longest_sequence(prompts: Sequence[Sequence[int]], prompt: int, tokens: int) -> wire.ScoreSequence:
    """One sequence of `prompt` + `tokens` tokens, taken from the prompts over and over."""
    pool = np.concatenate([np.asarray(token_ids, np.int32) for token_ids in prompts])
    ids = np.take(pool, np.arange(prompt + tokens), mode="wrap")
    return wire.ScoreSequence("probe-longest", wire.pack(ids), prompt)


def replaced(sequence: wire.ScoreSequence, position: int, vocab: int, turn: int = 1) -> wire.ScoreSequence:
    """`sequence` with another id at `position` of L; each `turn` in 1 … vocab − 1 gives another one."""
    ids = wire.unpack(sequence.token_ids).copy()
    ids[position] = (ids[position] + turn) % vocab
    return msgspec.structs.replace(sequence, token_ids=wire.pack(ids))


def turns(vocab: int) -> list[int]:
    """At most REPLACEMENTS different turns, spread over the vocabulary."""
    return sorted({1 + i * (vocab - 1) // REPLACEMENTS for i in range(min(REPLACEMENTS, vocab - 1))})


async def scores(score: Score, sequences: list[wire.ScoreSequence]) -> list[np.ndarray]:
    """Log-probabilities [T] of each sequence; empty for one that was refused."""
    return [
        wire.unpack(answer.logprob).astype(np.float64) if isinstance(answer, wire.Scored) else np.empty(0)
        for answer in await score(sequences)
    ]


# --- probes


def same_tokenizer(ours: str, info: wire.TeacherInfo, known_ids: int | None = None) -> Finding:
    """Compare with `ours`, the student's fingerprint (`sync.base.tokenizers.fingerprint`).

    What ids mean must be the same; how text is cut only decides the prompts, which the student's cuts.
    """
    differing = tokenizers.differing_parts(ours, info.tokenizer_fingerprint)
    size = f" with known_ids = {known_ids}" if known_ids else ""
    return _finding(
        "same tokenizer",
        tokenizers.PARTS[0] not in differing,
        f"{', '.join(differing) or 'no part'} differs ({', '.join(tokenizers.PARTS)})",
        f"ids of {info.model} mean other text than the student's: choose models of one family, or give the "
        f"teacher the tokenizer it was trained with and start its process{size} from this configuration",
    )


def same_template(ours: str | None, info: wire.TeacherInfo, needed: bool) -> Finding:
    """`needed`: prompts go through the template, and the teacher sees the student's prompt."""
    theirs = info.chat_template_fingerprint
    return _finding(
        "same chat template",
        not needed or ours == theirs,
        f"student {(ours or 'none')[:8]}, teacher {(theirs or 'none')[:8]}",
        "the teacher was trained on another chat format than the prompts': name the same Jinja file in "
        "student.chat_template and the teacher's chat_template, or set prompt_transform",
    )


def fits(engine: str, prompt: int, tokens: int, limit: int, remedy: str) -> Finding:
    """Whether the longest prompt and the longest completion fit together into an engine's limit."""
    return _finding(
        "length",
        prompt + tokens <= limit,
        f"{engine} takes {limit} tokens, prompt + completion have up to {prompt} + {tokens}",
        f"rollouts would be cut or refused: shorten prompts, lower rollout.max_tokens, or {remedy}",
    )


async def repeatable(
    score: Score, sequences: list[wire.ScoreSequence], tolerance: float
) -> tuple[Finding, float]:
    """Scores in one request against one by one; the finding, and the largest difference (the noise)."""
    check = "scores repeat"
    together = await scores(score, sequences)
    alone = [(await scores(score, [sequence]))[0] for sequence in sequences[:2]]
    counts = [sequence.token_ids.shape[0] - sequence.start for sequence in sequences]
    if [len(row) for row in [*together, *alone]] != [*counts, *counts[:2]]:
        figure = f"{[len(row) for row in together]} scores for {counts} tokens"
        problem = "sequences were cut or refused: raise the teacher's max_length, and see its log"
        return Finding(check, figure, problem), 0.0
    difference = np.abs(np.concatenate(alone) - np.concatenate(together[: len(alone)]))
    finding = _finding(
        check,
        bool(difference.mean() <= tolerance),
        f"mean difference {difference.mean():.2g} nats of at most {tolerance:g}",
        "a sequence is scored differently in a batch than alone: the teacher pads, packs or samples wrongly; "
        "set the teacher's attention to another implementation, and see that dropout is off",
    )
    return finding, float(difference.max())


async def not_shifted(score: Score, sequence: wire.ScoreSequence, vocab: int, noise: float) -> Finding:
    """A replaced token must change its own score, and none before it; `noise`: as `repeatable` gives it.

    A uniform teacher changes none.
    """
    count = sequence.token_ids.shape[0] - sequence.start
    place = count // 2
    tried = [replaced(sequence, sequence.start + place, vocab, turn) for turn in turns(vocab)]
    base, *others = await scores(score, [sequence, *tried])
    change = np.max([np.abs(other - base) for other in others], axis=0)
    changed = np.flatnonzero(change > max(SHARPEST_NOISE, 4 * noise))
    first = int(changed[0]) if changed.size else None
    figure = f"token {place} of {count} was replaced, the first score that changes is {first}"
    cause = f"each gets {base[place]:.2f}, and a uniform teacher gives {-np.log(vocab):.2f}: see that its "
    cause += "weights were loaded (path, revision)"
    if first is not None:
        side = "early" if first < place else "late"
        cause = f"scores stand {abs(first - place)} position(s) too {side}, so every token would be credited "
        cause += "with another's: score t must be log q of token t given the tokens before it"
    return _finding("not uniform, not shifted", first == place, figure, cause)


async def not_truncated(score: Score, sequence: wire.ScoreSequence, vocab: int) -> Finding:
    """The first token of the longest sequence must change the scores of its completion."""
    check = "context is whole"
    length, count = sequence.token_ids.shape[0], sequence.token_ids.shape[0] - sequence.start
    tried = [sequence, *(replaced(sequence, 0, vocab, turn) for turn in turns(vocab)[-2:])]
    base, *others = await scores(score, tried)
    if any(len(row) != count for row in (base, *others)):
        figure = f"a sequence of {length} tokens came back with {len(base)} of {count} scores"
        return Finding(check, figure, "it was cut or refused: raise the teacher's max_length")
    change = max(float(np.abs(other - base).max()) for other in others)
    return _finding(
        check,
        change > 0.0,
        f"the first of {length} tokens changes the scores of the completion by {change:.2g} nats",
        "the teacher does not see the beginning of a long prompt: raise its max_length (or the server's "
        "context), or set preflight.longest = false for a model with a sliding window",
    )


def equals_plain(scored: list[np.ndarray], plain: list[np.ndarray], tolerance: float) -> Finding:
    """The teacher's scores against a plain fp32 forward pass of the folder it is configured with."""
    mean = float(np.abs(np.concatenate(scored) - np.concatenate(plain)).mean())
    return _finding(
        EQUALS_PLAIN,
        mean <= tolerance,  # False for NaN
        f"mean difference {mean:.2g} nats of at most {tolerance:g}",
        "other weights, another order of the vocabulary, or another temperature are being served: see that "
        "the teacher's process serves the path and revision of this configuration; if it is quantised on "
        "purpose, raise preflight.score_tolerance",
    )


def self_teacher(loss: float, gradient: float) -> Finding:
    """The objective with the student as its own teacher, per token."""
    return _finding(
        "a self-teacher gives 0",
        max(loss, gradient) <= SELF_TOLERANCE,
        f"loss {loss:.2g} nats, gradient {gradient:.2g}, of at most {SELF_TOLERANCE:g}",
        "the objective's minimum is not at the teacher, so training would never settle: choose another one",
    )


def gradient_depends(change: float) -> Finding:
    """How much the gradient changes when the student is taken for its teacher."""
    return _finding(
        "the gradient depends on the teacher",
        change >= LEAST_GRADIENT,
        f"it changes by {change:.2g}, of at least {LEAST_GRADIENT:g}",
        "the teacher is the student itself, or every token is masked out of the loss: name another teacher, "
        "and see that objective.drop_rho_outside contains 1",
    )


def rollouts_match(kl: float, tolerance: float, against: str) -> Finding:
    """KL(μ‖p) of tokens that were sampled from these very weights; `against`: whose p it is."""
    return _finding(
        "rollout engine agrees",
        kl <= tolerance,
        f"KL(μ‖p) {kl:.2g} nats per token against {against}, of at most {tolerance:g}",
        "the rollout engine does not sample from the weights that are trained: see that both have the same "
        "student.path and revision, and that no sampling option is set in student.engine_args; if the "
        "precision is low on purpose, raise preflight.mismatch_tolerance",
    )


def scores_match(gap: float, tolerance: float) -> Finding:
    """Mean |log q(y) sent as a number − log q(y) of the distribution that is trained on|, nats."""
    return _finding(
        "dense scores agree with sampled ones",
        gap <= tolerance,
        f"mean difference {gap:.2g} nats of at most {tolerance:g}",
        "hidden states or top-k of the teacher do not belong to its sampled log-probabilities: they are "
        "shifted, or its head is another one; fix the teacher, or set wire_dtype to float32",
    )


def mismatch(logp: list[np.ndarray], behavior: list[np.ndarray]) -> float:
    """Mean of ρ − 1 − log ρ, ρ = p(y)/μ(y): an estimate of KL(μ‖p) that is never negative."""
    log_rho = np.concatenate(logp) - np.concatenate(behavior)
    return float((np.exp(np.minimum(log_rho, 20.0)) - 1.0 - log_rho).mean())


# --- environments


def environment_sources(config: RunConfig) -> dict[str, EnvironmentPrompts]:
    """Key of each source of prompts that is an environment → its name and tasks."""
    return {
        key: part for key, part in sources_of(config.prompts).items() if isinstance(part, EnvironmentPrompts)
    }


def makes_same_tokens(student: str, info: wire.EnvironmentInfo) -> Finding:
    """Whether it makes the student's tokens; `student`: fingerprint of the student's tokenizer."""
    parts = tokenizers.differing_parts(student, info.tokenizer_fingerprint)
    problem = f"different {', '.join(parts)}: start it from this run's configuration"
    return _finding("same tokenizer", not parts, f"of {info.environment}", problem)


def enough_tasks(config: RunConfig, name: str, info: wire.EnvironmentInfo) -> Finding:
    """Whether it has the tasks that the prompts name."""
    there, problem = info.tasks, None
    for key, source in environment_sources(config).items():
        if (
            source.environment == name
            and there is not None
            and (source.tasks is None or source.tasks > there)
        ):
            count = "not set" if source.tasks is None else source.tasks
            problem = f"{key}.tasks is {count}: set it to {there} or less"
    return Finding("tasks", "endless" if there is None else f"{there}", problem)


def first_fits(prompts: Sequence[Prompt], limit: int) -> Finding:
    """Whether its first prompts leave room for an answer in an episode of `limit` tokens."""
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    problem = "no answer fits behind that: raise max_tokens of the environment, or max-model-len"
    figure = f"up to {longest} tokens of an episode of {limit}"
    return _finding("first prompts", longest < limit, figure, problem)


async def with_first_prompts(
    sample: Sequence[Prompt], clients: Mapping[str, EnvironmentClient], limit: int, tokenizer: Any
) -> list[Prompt]:
    """`sample` with the first prompts of its first `limit` episodes of each environment, others left out.

    Each is played on by an answer of `tokenizer`'s, to the second turn or the end. Raises ConfigError for a
    task that does not begin with a turn, or fails at the answer.
    """
    ids = list(tokenizer(ANSWER, add_special_tokens=False)["input_ids"])
    end = tokenizer.eos_token_id
    answer = wire.pack(np.array(ids if end is None else [*ids, end], "i4"))
    prompts: list[Prompt] = []
    begun = dict.fromkeys(clients, 0)
    for prompt in sample:
        if not (name := prompt.environment):
            prompts.append(prompt)
        elif begun[name] < limit:
            begun[name] += 1
            prompts.append(await _begun(prompt, clients[name], answer))
    return prompts


async def _begun(prompt: Prompt, client: EnvironmentClient, answer: wire.Array) -> Prompt:
    id, task = f"preflight:{uuid4().hex}", f"environments.{client.name}: task {prompt.task}"
    try:
        said = await client.begin(id, prompt.task)
        second = await client.proceed(id, said.turn, answer, "stop") if isinstance(said, wire.Turn) else said
    finally:
        await client.end(id)
    if not isinstance(said, wire.Turn):
        error = getattr(said, "error", "it is over before the student's first turn")
        raise ConfigError(f"{task} cannot be played: {error}")
    if isinstance(second, wire.EpisodeFailed):
        raise ConfigError(f"{task} cannot be played on when the student answers {ANSWER!r}: {second.error}")
    return msgspec.structs.replace(prompt, token_ids=wire.unpack(said.token_ids).tolist())
