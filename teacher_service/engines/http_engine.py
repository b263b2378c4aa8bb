"""JSON over HTTP to a server that computes for us, and its prompt log-probabilities as arrays.

Letters in shapes: L tokens of one sequence, T its scored positions, K ids per position.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Final

import httpx
import numpy as np

from sync.errors import ConfigError, DataError, Unreachable
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import EngineScores, Item

KEY_VARIABLE: Final = "TEACHER_API_KEY"
"""Environment variable with the bearer token of the server at `engine_url`."""
PATIENCE_SECONDS: Final = 60.0
"""How long a server that does not answer is tried again."""


class HttpEngine:
    """One server, asked from one or several threads."""

    def __init__(
        self,
        url: str,
        timeout: float = 600.0,
        patience: float = PATIENCE_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._url, self._patience = url.rstrip("/"), patience
        self.received_bytes = 0
        """Of all answers."""
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.Client(
            headers=headers, timeout=timeout, limits=limits, trust_env=False, transport=transport
        )

    def get(self, path: str) -> Any:
        """JSON answer of GET; see `post`."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """JSON answer of POST.

        Raises DataError when the server refuses (4xx), Unreachable when it gives no answer for a while.
        """
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        give_up, pause = time.monotonic() + self._patience, 0.1
        while True:
            try:
                response = self._http.request(method, self._url + path, json=body)
                if response.status_code < 500 and response.status_code != 429:
                    break
                problem = f"status {response.status_code}: {response.text[:500]}"
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause > give_up:
                raise Unreachable(f"{self._url}{path} gave no answer for {self._patience:.0f} s ({problem})")
            time.sleep(pause)
            pause = min(2 * pause, 5.0)
        self.received_bytes += len(response.content)
        if response.status_code != 200:
            raise DataError(f"{self._url}{path} answered {response.status_code}: {response.text[:500]}")
        try:
            return response.json()
        except ValueError as error:
            raise DataError(f"{self._url}{path} answered something that is no JSON: {error}") from error

    def model(self) -> dict[str, Any]:
        """The first model that the server lists."""
        try:
            return dict(self.get("/v1/models")["data"][0])
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{self._url}/v1/models lists no model: is engine_url a completions server?"
            ) from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def longest(config: TeacherConfig, card: dict[str, Any]) -> int:
    """Longest sequence: the config's, else what the server tells, less the one token it must generate.

    Raises ConfigError when neither knows, or the config asks for more than the server takes.
    """
    served = card["max_model_len"] - 1 if card.get("max_model_len") else None
    if config.max_length is not None and served is not None and config.max_length > served:
        raise ConfigError(f"max_length = {config.max_length}, but the server takes {served} tokens: lower it")
    if (length := config.max_length or served) is None:
        raise ConfigError("the server does not tell its longest sequence: set max_length for this teacher")
    return int(length)


def scores_from_dicts(items: Sequence[Item], tables: Sequence[list[Any]], k: int) -> EngineScores:
    """Marks from vLLM's prompt_logprobs: per token a dict id → {"logprob", "rank"}, None for the first.

    The dict holds the k most likely ids and, besides, the prompt's own token. Raises DataError when one is
    missing.
    """
    logprobs: list[float] = []
    ids_CK: list[list[int]] = []
    top_CK: list[list[float]] = []
    for item, table in zip(items, tables, strict=True):
        if len(table) != len(item.token_ids_L):
            raise DataError(
                f"{len(item.token_ids_L)} tokens were sent, {len(table)} came back: it re-tokenises"
            )
        for token, entry in zip(item.token_ids_L[item.first :].tolist(), table[item.first :], strict=True):
            found = entry.get(str(token))
            if found is None:
                raise DataError(f"no log-probability of the prompt's own token {token}: not a vLLM server?")
            logprobs.append(found["logprob"])
            if k:
                best = sorted((e["rank"], int(i), e["logprob"]) for i, e in entry.items() if e["rank"] <= k)[
                    :k
                ]
                ids_CK.append([i for _, i, _ in best])
                top_CK.append([logprob for _, _, logprob in best])
    return assemble(np.array(logprobs, np.float32), ids_CK if k else None, top_CK)


def only_known(scores: EngineScores, vocab_size: int) -> EngineScores:
    """`marks` themselves. Raises DataError when a top-k holds a row that the tokenizer does not know.

    Some models have such rows and some servers rank them; a student has none to compare them with.
    """
    ids_CK = scores.topk_ids_CK
    if ids_CK is not None and ids_CK.size and int(ids_CK.max()) >= vocab_size:
        raise DataError(
            f"a top-k holds id {int(ids_CK.max())}, a row of the model that the tokenizer with its "
            f'{vocab_size} ids does not know: ask for fewer ids, or use engine = "transformers", which '
            "leaves such rows out"
        )
    return scores


def assemble(logprob_C: np.ndarray, ids_CK: Any, top_CK: Any) -> EngineScores:
    """Marks with the tail mass computed; `ids_CK` None: the sampled token only."""
    if ids_CK is None:
        return EngineScores(logprob_C)
    topk_CK = np.array(top_CK, np.float32)
    tail_C = np.clip(1 - np.exp(topk_CK).sum(1), 0, 1)
    return EngineScores(logprob_C, np.array(ids_CK, np.int32), topk_CK, tail_C)
