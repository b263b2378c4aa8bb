"""The completions that `generation` makes at one version, kept in files that people read; how they read.

    runs/NAME/evaluations/VERSION/SET.jsonl     a line per completion
        prompt, completion    texts, the completion with its special tokens
        index, token_ids      number of the prompt in its set; the completion's ids
        finish_reason         "stop" or "length"; of an episode also "time" or "failed"
        reward, answer, error null where there is none
    of an episode not completion and token_ids but
        turns                 texts of what the environment said and what the student answered
        sequences             prompt_ids, token_ids and own, the places in token_ids of what the student
                              sampled; more than one where the environment rewrote the context
        metrics               further figures of the environment

A file is written once, when all of its completions are rewarded. The folders of the first and of the newest
KEPT versions are kept. evaluations/teacher holds what the teachers made of the held-out prompts, once for the
run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from distill.evaluation.sets import PromptSet
from distill.rollout.validation import loop
from sync.base import durable
from sync.base.decoding import convert
from sync.base.errors import DataError
from sync.base.jsonl import read_lines
from sync.weights.snapshots.manifest import named
from sync.wire import Array, Behaviour, OwnTokens, Version, pack, unpack

KEPT: Final = 20
"""Versions."""
TEACHER: Final = "teacher"
"""Folder of the teachers' completions, where versions have theirs."""
LONGEST: Final = 32
"""Tokens of what a loop repeats."""
LEAST: Final = 12
"""Tokens of a loop."""
GRAM: Final = 4


@dataclass
class Tokens:
    """Token ids that continue one another."""

    prompt_ids: list[int]
    """[P]"""
    token_ids: np.ndarray
    """int32 [T]"""
    own: list[tuple[int, int]]
    """Start and end of what the student sampled, in T; the rest is an environment's."""

    def sent(self, shown: Array | None) -> OwnTokens:
        """For the evaluator; `shown`: the prompt as its teacher sees it."""
        first = len(self.prompt_ids)
        token_ids_L = np.concatenate([np.array(self.prompt_ids, np.int32), self.token_ids])
        return OwnTokens(pack(token_ids_L), [(first + start, first + end) for start, end in self.own], shown)


@dataclass
class Completion:
    """One completion, or episode, of a set's prompt `index`."""

    index: int
    sequences: list[Tokens]
    """One; of an episode one more for every time that its context was rewritten."""
    finish_reason: str
    reward: float | None = None
    """Reward; None: it is not known yet, or its set has none."""
    answer: str | None = None
    error: str | None = None
    """Why reward function or environment gave no reward: it counts as reward 0."""
    metrics: dict[str, float] | None = None
    """Figures of an episode; None: it is no episode."""

    @classmethod
    def of(cls, index: int, prompt_ids: list[int], token_ids: Array, finish_reason: str) -> Completion:
        """Of a prompt that was completed once."""
        ids_T = unpack(token_ids).copy()
        return cls(index, [Tokens(prompt_ids, ids_T, [(0, len(ids_T))])], finish_reason)

    @property
    def tokens(self) -> int:
        """Tokens that the student sampled."""
        return sum(end - start for sequence in self.sequences for start, end in sequence.own)


# --- files


def file_of(run_dir: Path, version: Version | str, name: str) -> Path:
    """File of a set's completions; `version`: TEACHER for the teachers'."""
    return run_dir / "evaluations" / str(version) / f"{name}.jsonl"


def write_completions(path: Path, completions: Sequence[Completion], prompt_set: PromptSet) -> None:
    """Write a file; a reader finds all of it or none."""
    rows = [_row(completion, prompt_set.decode) for completion in completions]
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _row(completion: Completion, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    row = msgspec.to_builtins(completion, enc_hook=np.ndarray.tolist)
    first = row["sequences"][0]
    prompt = {"prompt": decode(first["prompt_ids"])}
    if completion.metrics is not None:
        return {**prompt, "turns": [*_turns(completion, decode)], **row}
    del row["metrics"], row["sequences"]
    return {**prompt, "completion": decode(first["token_ids"]), **row, "token_ids": first["token_ids"]}


def _turns(completion: Completion, decode: Callable[[list[int]], str]) -> Iterator[dict[str, str]]:
    """Texts of the turns of an episode; where the context was rewritten, of all of it."""
    for part in completion.sequences:
        between = [part.token_ids[end:start].tolist() for (_, end), (start, _) in pairwise(part.own)]
        for added, (start, end) in zip([part.prompt_ids, *between], part.own, strict=False):
            yield {"environment": decode(added), "student": decode(part.token_ids[start:end].tolist())}


def read_completions(path: Path, prompt_set: PromptSet) -> list[Completion] | None:
    """The completions of a file; None: there is none, or the set was changed since. Raises DataError for one
    that was altered."""
    rows = read_lines(path)
    numbers = [number for number in range(len(prompt_set.prompts)) for _ in range(prompt_set.completions)]
    if [row.get("index") for row in rows] != numbers or not all(_is_of(prompt_set, row) for row in rows):
        return None
    try:
        for row in rows:
            if (ids := row.get("token_ids")) is not None:
                prompt_ids = prompt_set.prompts[row["index"]].token_ids
                row["sequences"] = [{"prompt_ids": prompt_ids, "token_ids": ids, "own": [(0, len(ids))]}]
        return [convert(row, Completion, lambda _, ids: np.array(ids, np.int32)) for row in rows]
    except (msgspec.ValidationError, TypeError) as error:
        raise DataError(f"{path}: {error}; the file was altered: remove it") from None


def _is_of(prompt_set: PromptSet, row: Mapping[str, Any]) -> bool:
    """Whether a row is of its set's prompt; episodes are told apart from completions alone."""
    prompt = prompt_set.prompts[row["index"]]
    if "completion" not in row:
        return prompt.environment is not None
    return prompt.environment is None and row.get("prompt") == prompt_set.decode(prompt.token_ids)


def remove_old(run_dir: Path) -> None:
    """Remove the folders of all but the first and the newest KEPT versions, whenever they were written."""
    folder = run_dir / "evaluations"
    versions = sorted(
        version for _, version in named(path.name for path in folder.glob("*")) if version is not None
    )
    for version in versions[1:-KEPT]:
        shutil.rmtree(folder / str(version), ignore_errors=True)


# --- how they read


def behaviour(completions: Sequence[Completion]) -> Behaviour:
    """How completions, at least one, read: a divergence may fall while none of them ends.

    ended        share that ended by themselves, not at a limit
    length       tokens of a completion, mean and 90th percentile
    looping      share whose last tokens are one sequence, of at most LONGEST tokens, again and again: at
                 least three times and over at least LEAST tokens
    distinct     of all runs of four tokens of a completion, those that differ, summed over the completions
    """
    lengths = [completion.tokens for completion in completions]
    texts = [
        sequence.token_ids[start:end]
        for completion in completions
        for sequence in completion.sequences
        for start, end in sequence.own
    ]
    runs = [sliding_window_view(ids_T, GRAM) for ids_T in texts if len(ids_T) >= GRAM]
    number = sum(map(len, runs))
    return Behaviour(
        ended=sum(completion.finish_reason not in ("length", "failed") for completion in completions)
        / len(completions),
        length_mean=float(np.mean(lengths)),
        length_p90=float(np.percentile(lengths, 90)),
        looping=sum(loop(ids_T, LONGEST, 3, LEAST) is not None for ids_T in texts) / max(1, len(texts)),
        distinct=sum(len(np.unique(runs_T, axis=0)) for runs_T in runs) / number if number else 1.0,
    )
