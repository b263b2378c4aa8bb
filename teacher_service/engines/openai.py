"""A teacher behind any completions server that returns log-probabilities of the prompt; sampled token only.

Two dialects are tried at start: `echo` with `logprobs` (OpenAI's old form: vLLM, SGLang, llama.cpp and
hosted services) and `prompt_logprobs` (vLLM). A server that knows neither is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sync.errors import ConfigError, DataError
from sync.wire import Head
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Engine, EngineInfo, EngineScores, Item, ScoreOptions
from teacher_service.engines.http_engine import HttpEngine, longest, scores_from_dicts

Dialect = Callable[[Sequence[Item]], EngineScores]


def connect(config: TeacherConfig, vocab_size: int) -> Engine:
    """Engine of a TeacherConfig. Raises ConfigError when the server cannot be used."""
    if config.engine_url is None:
        raise ConfigError('engine = "openai" needs engine_url: the address of a completions server')
    return CompletionsServer(HttpEngine(config.engine_url), config, vocab_size)


class CompletionsServer:
    """A server that runs already."""

    def __init__(self, upstream: HttpEngine, config: TeacherConfig, vocab_size: int) -> None:
        self._upstream = upstream
        card = upstream.model()
        self._model = card["id"]
        self._dialect = self._choose()
        self.engine_info = EngineInfo(
            model=config.path,
            revision=config.revision,
            dtype=config.dtype,
            engine="openai",
            vocab_size=vocab_size,
            hidden_size=0,
            max_length=longest(config, card),
            can=("prompt",),
            max_topk=0,
        )

    def _choose(self) -> Dialect:
        probe = [Item(np.array([0, 0, 0], np.int32), 1), Item(np.array([0, 0], np.int32), 1)]
        problems = []
        for dialect in (self._echo, self._prompt_logprobs):
            try:
                dialect(probe)
            except DataError as error:
                problems.append(str(error))
            else:
                return dialect
        raise ConfigError(
            f"the server at engine_url returns no log-probabilities of the prompt ({'; '.join(problems)}): "
            "use a server that does, or run the teacher with another engine"
        )

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`."""
        return self._dialect(items)

    def _choices(self, items: Sequence[Item], **extra: Any) -> list[dict[str, Any]]:
        body = {
            "model": self._model,
            "prompt": [item.token_ids_L.tolist() for item in items],
            "max_tokens": 1,
            "temperature": 1.0,
        }
        choices = self._upstream.post("/v1/completions", body | extra)["choices"]
        if len(choices) != len(items):
            raise DataError(f"{len(items)} prompts were sent, {len(choices)} choices came back")
        return sorted(choices, key=lambda choice: int(choice["index"]))

    def _echo(self, items: Sequence[Item]) -> EngineScores:
        parts = []
        for item, choice in zip(items, self._choices(items, echo=True, logprobs=1), strict=True):
            values = (choice.get("logprobs") or {}).get("token_logprobs") or []
            if len(values) - len(item.token_ids_L) not in (0, 1):  # with or without the generated token
                raise DataError(
                    f"{len(item.token_ids_L)} tokens were sent, {len(values)} log-probabilities came"
                )
            parts.append(np.array(values[item.first : len(item.token_ids_L)], np.float32))
        return EngineScores(np.concatenate(parts))

    def _prompt_logprobs(self, items: Sequence[Item]) -> EngineScores:
        tables = [choice.get("prompt_logprobs") for choice in self._choices(items, prompt_logprobs=0)]
        if None in tables:
            raise DataError("no prompt_logprobs came back")
        return scores_from_dicts(items, [table for table in tables if table is not None], 0)

    def head(self) -> Head | None:
        """A completions server shows no hidden states."""
        return None

    def close(self) -> None:
        """See `Engine.close`."""
        self._upstream.close()
