"""A teacher given by a table of log-probabilities: exact, in memory, without torch. And sequences for it.

Letters in shapes: see `teacher_service.engines.base`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sync.wire import Head, Scored, ScoreSequence, pack, unpack
from teacher_service.config import CAPABILITIES
from teacher_service.engines import base
from teacher_service.engines.base import EngineCompletion, EnginePrompt, EngineScores, Item, ScoreOptions


class TableEngine:
    """Marks sequences by a bigram table [V, V] (row: previous token).

    Its hidden state is the one-hot previous token and its head is the table, so that hidden · headᵀ gives the
    log-probabilities back.
    """

    def __init__(self, table: np.ndarray, max_length: int = 4096) -> None:
        self._table, size = table, len(table)
        self.engine_info = base.EngineInfo("table", "float32", "table", size, size, max_length, CAPABILITIES)

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`."""
        previous_C = np.concatenate([item.token_ids_L[item.first - 1 : -1] for item in items])
        logp_CV = self._table[previous_C]
        if options.temperature != 1.0:
            logp_CV = logp_CV / options.temperature
            logp_CV -= np.logaddexp.reduce(logp_CV, axis=1, keepdims=True)
        targets_C = np.concatenate([item.token_ids_L[item.first :] for item in items])
        rows_C = np.arange(len(targets_C))
        ids_CK = np.argsort(-logp_CV, axis=1, kind="stable")[:, : options.topk].astype(np.int32)
        topk_CK = np.take_along_axis(logp_CV, ids_CK, 1)
        gathered_CK = None
        if options.gather:
            wanted_CK = np.concatenate([item.gather_ids_TK for item in items])
            found_CK = np.take_along_axis(logp_CV, np.maximum(wanted_CK, 0), 1)
            gathered_CK = np.where(wanted_CK < 0, 0, found_CK).astype(np.float32)
        return EngineScores(
            logprob_C=logp_CV[rows_C, targets_C].astype(np.float32),
            topk_ids_CK=ids_CK if options.topk else None,
            topk_logprob_CK=topk_CK.astype(np.float32) if options.topk else None,
            gathered_CK=gathered_CK,
            entropy_C=-(np.exp(logp_CV) * logp_CV).sum(1).astype(np.float32) if options.entropy else None,
            hidden_CH=np.eye(self.engine_info.hidden_size, dtype=np.float32)[previous_C]
            if options.hidden
            else None,
        )

    def generate(self, prompts: Sequence[EnginePrompt], params: base.GenerationParams) -> base.Steps:
        """See `Engine.generate`; one prompt a step, and no stop ids but those of `params`."""
        completions = []
        for prompt in prompts:
            yield None
            completions.append(self._complete(prompt, params))
        yield completions

    def _complete(self, prompt: EnginePrompt, params: base.GenerationParams) -> EngineCompletion:
        rng, ids, ended = np.random.default_rng(prompt.seed), prompt.token_ids_P, False
        logprobs: list[float] = []
        while len(logprobs) < params.max_tokens and not ended:
            logits_V = self._table[ids[-1]].astype(np.float64) / params.temperature
            logp_V = logits_V - np.logaddexp.reduce(logits_V)
            token = int(rng.choice(len(logp_V), p=np.exp(logp_V)))
            ids = np.append(ids, np.int32(token))
            logprobs.append(logp_V[token])
            ended = token in params.stop_token_ids
        return EngineCompletion(ids[len(prompt.token_ids_P) :], np.array(logprobs, np.float32), ended)

    def head(self) -> Head | None:
        """See `Engine.head`."""
        return Head(weight=pack(self._table.T.copy()))

    def close(self) -> None:
        """Nothing is held."""


class GatedEngine(TableEngine):
    """A table teacher that notes its batches, and computes while `gate` is set, as it is at first."""

    def __init__(self, table: np.ndarray, max_length: int = 4096) -> None:
        super().__init__(table, max_length=max_length)
        self.batches: list[tuple[ScoreOptions, list[int]]] = []
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    @property
    def sequences(self) -> int:
        """How many were scored, or wait at the gate."""
        return sum(len(lengths) for _, lengths in self.batches)

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`."""
        self.batches.append((options, [len(item.token_ids_L) for item in items]))
        self.begun.set()
        self.gate.wait(600)
        return super().score(items, options)


def random_table(vocab: int, seed: int = 0) -> np.ndarray:
    """float32 [V, V] log-probabilities of an arbitrary bigram model."""
    logits = np.random.default_rng(seed).normal(size=(vocab, vocab)) * 2
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


V = 11
TABLE = random_table(V)


def sequences(n: int, length: int = 6, seed: int = 0) -> list[ScoreSequence]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, V, (n, length)).astype(np.int32)
    return [ScoreSequence(f"{seed}-{i}", pack(ids[i]), 2) for i in range(n)]


def right(given: Sequence[ScoreSequence], results: Iterable[Any]) -> bool:
    """Whether every result is the table's scores of the sequence at its place."""
    for sequence, result in zip(given, results, strict=True):
        ids = unpack(sequence.token_ids)
        assert isinstance(result, Scored)
        np.testing.assert_array_equal(unpack(result.logprob), TABLE[ids[1:-1], ids[2:]])
    return True
