"""A teacher behind SGLang's own route, POST /generate: sampled and top-k marks, and marks at given ids.

The prompt's log-probabilities come as lists of [log-probability, id, text], from `logprob_start_len` on,
where the first entry says nothing (null). Written from SGLang's documentation and source, tested against a
server that answers like it; it was not run against a real SGLang.

SGLang marks one set of ids at all positions of a sequence, so a gather asks for the union of its ids and its
answer grows with positions × union: for long sequences another engine is the better one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from sync.errors import ConfigError, DataError
from sync.wire import Head
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Engine, EngineInfo, EngineScores, Item, ScoreOptions
from teacher_service.engines.http_engine import HttpEngine, assemble, longest, only_known

GENERATE: Final = "/generate"


def connect(config: TeacherConfig, vocab_size: int) -> Engine:
    """Engine of a TeacherConfig. Raises ConfigError when the server cannot be used."""
    if config.engine_url is None:
        raise ConfigError('engine = "sglang" needs engine_url: the address of an SGLang server')
    return SGLangServer(HttpEngine(config.engine_url), config, vocab_size)


class SGLangServer:
    """A server that runs already."""

    def __init__(self, upstream: HttpEngine, config: TeacherConfig, vocab_size: int) -> None:
        self._upstream = upstream
        self.engine_info = EngineInfo(
            model=config.path,
            revision=config.revision,
            dtype=config.dtype,
            engine="sglang",
            vocab_size=vocab_size,
            hidden_size=0,
            max_length=longest(config, upstream.model()),
            can=("topk", "gather", "prompt"),
        )
        probe = Item(np.array([0, 0], np.int32), 1, np.array([[0]], np.int32))
        try:
            self.score([probe], ScoreOptions(topk=1, gather=1))
        except DataError as error:
            raise ConfigError(
                f"the server at engine_url does not answer {GENERATE} like SGLang ({error}): "
                'use engine = "openai" for other servers'
            ) from error

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`."""
        unions = [_union(item) for item in items] if options.gather else []
        answers = [answer["meta_info"] for answer in self._generate(items, options.topk, unions)]
        last = self.engine_info.vocab_size - 1
        tables = [_sampled(info, item, last) for info, item in zip(answers, items, strict=True)]
        ids_CK, top_CK = None, None
        if options.topk:
            tops = [
                _table(info, "input_top_logprobs", item, options.topk)
                for info, item in zip(answers, items, strict=True)
            ]
            ids_CK, top_CK = (np.concatenate(columns) for columns in zip(*tops, strict=True))
        scores = only_known(assemble(np.concatenate(tables), ids_CK, top_CK), self.engine_info.vocab_size)
        if not options.gather:
            return scores
        gathered = [
            _gathered(info, item, union) for info, item, union in zip(answers, items, unions, strict=True)
        ]
        return dataclasses.replace(scores, gathered_CK=np.concatenate(gathered))

    def _generate(self, items: Sequence[Item], topk: int, unions: list[list[int]]) -> list[dict[str, Any]]:
        body: dict[str, Any] = {
            "input_ids": [item.token_ids_L.tolist() for item in items],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": [item.first - 1 for item in items],
        }
        if topk:
            body["top_logprobs_num"] = topk
        if unions:
            body["token_ids_logprob"] = unions
        answers = self._upstream.post(GENERATE, body)
        if not isinstance(answers, list) or len(answers) != len(items):
            raise DataError(f"{len(items)} sequences were sent, the answer is no list of as many")
        return answers

    def head(self) -> Head | None:
        """SGLang shows no hidden states here."""
        return None

    def close(self) -> None:
        """See `Engine.close`."""
        self._upstream.close()


def _union(item: Item) -> list[int]:
    assert item.gather_ids_TK is not None
    return np.unique(np.maximum(item.gather_ids_TK, 0)).tolist()


def _rows(info: dict[str, Any], name: str, item: Item) -> list[Any]:
    """The entries of the scored positions. Raises DataError when there are not as many."""
    rows = (info.get(name) or [])[1:]
    if len(rows) != item.positions or None in rows:
        raise DataError(f"{name} has {len(rows)} entries for {item.positions} positions")
    return rows


def _sampled(info: dict[str, Any], item: Item, last: int) -> np.ndarray:
    """float32 [T]; SGLang tells `last`, the vocabulary's last id, as 0."""
    rows = _rows(info, "input_token_logprobs", item)
    sent = item.token_ids_L[item.first :].tolist()
    told = [row[1] for row in rows]
    if any(one != token and (one, token) != (0, last) for one, token in zip(told, sent, strict=True)):
        raise DataError("log-probabilities came for other tokens than were sent: it re-tokenises")
    return np.array([row[0] for row in rows], np.float32)


def _table(info: dict[str, Any], name: str, item: Item, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and log-probabilities float32, [T, width] each."""
    rows = _rows(info, name, item)
    if any(len(row) != width for row in rows):
        raise DataError(f"{name} does not have {width} entries at every position")
    ids = np.array([[entry[1] for entry in row] for row in rows], np.int32)
    return ids, np.array([[entry[0] for entry in row] for row in rows], np.float32)


def _gathered(info: dict[str, Any], item: Item, union: list[int]) -> np.ndarray:
    """float32 [T, K]"""
    ids_TU, logp_TU = _table(info, "input_token_ids_logprobs", item, len(union))
    if not (ids_TU == np.array(union)).all():
        raise DataError("input_token_ids_logprobs came for other ids than were asked")
    wanted_TK = item.gather_ids_TK
    assert wanted_TK is not None
    found_TK = np.take_along_axis(logp_TU, np.searchsorted(union, np.maximum(wanted_TK, 0)), 1)
    return np.where(wanted_TK < 0, 0, found_TK).astype(np.float32)
