"""Engines that compute on another server, over JSON and HTTP: the client, and two kinds of servers.

CompletionsServer  any server whose completions route echoes the prompt with log-probabilities (OpenAI's old
                   form: vLLM, SGLang, llama.cpp, hosted services); the sampled token only
SGLangServer       SGLang's own route: sampled token, top-k, given ids

Letters in shapes: L tokens of one sequence, T its scored positions, C those of a batch, K ids per position.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Final

import httpx
import numpy as np
from tenacity import Retrying, retry_if_exception_type, stop_before_delay, wait_exponential

from sync.errors import ConfigError, DataError, Unreachable
from sync.wire import Head
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import (
    MAX_TOPK,
    EngineInfo,
    EnginePrompt,
    EngineScores,
    GenerationParams,
    Item,
    ScoreOptions,
    Steps,
)

KEY_VARIABLE: Final = "TEACHER_API_KEY"
"""Environment variable with the bearer token of the server at `engine_url`."""
TIMEOUT_SECONDS: Final = 600.0
"""Of one request."""
RETRY_SECONDS: Final = 60.0
"""How long a request to a server that does not answer is retried."""


class HttpEngine:
    """The server at `engine_url`, usable from several threads; every kind of server subclasses it."""

    engine_info: EngineInfo

    def __init__(
        self,
        config: TeacherConfig,
        vocab_size: int,
        retry_seconds: float = RETRY_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Raises ConfigError when the server cannot be used."""
        key = os.environ.get(KEY_VARIABLE)
        self._url, self._config, self._vocab_size = (config.engine_url or "").rstrip("/"), config, vocab_size
        self._retry = Retrying(
            retry=retry_if_exception_type(Unreachable),
            wait=wait_exponential(0.1, max=5.0),
            stop=stop_before_delay(retry_seconds),
            reraise=True,
        )
        self.received_bytes = 0
        """Of all answers."""
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=TIMEOUT_SECONDS,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            transport=transport,
        )
        try:
            card = dict(self.request("GET", "/v1/models")["data"][0])
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{self._url}/v1/models lists no model: is engine_url a completions server?"
            ) from error
        self._model = card["id"]
        """What the server calls its model."""
        self._max_length = _max_length(config, card)

    def described(self, can: tuple[str, ...], max_topk: int = 0) -> EngineInfo:
        """EngineInfo of a server with these capabilities."""
        return EngineInfo(
            model=self._config.path,
            revision=self._config.revision,
            dtype=self._config.dtype,
            engine=self._config.engine,
            vocab_size=self._vocab_size,
            hidden_size=0,
            max_length=self._max_length,
            can=can,
            max_topk=max_topk,
        )

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer.

        Raises DataError when the server refuses (4xx), Unreachable when it does not answer within
        `retry_seconds`.
        """
        response: httpx.Response = self._retry(self._once, method, path, body)
        self.received_bytes += len(response.content)
        if response.status_code != 200:
            raise DataError(f"{self._url}{path} answered {response.status_code}: {response.text[:500]}")
        try:
            return response.json()
        except ValueError as error:
            raise DataError(f"{self._url}{path} answered something that is not JSON: {error}") from error

    def _once(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            response = self._http.request(method, self._url + path, json=body)
        except httpx.TransportError as error:
            raise Unreachable(f"{self._url}{path}: no answer ({type(error).__name__}: {error})") from None
        if response.status_code >= 500 or response.status_code == 429:
            raise Unreachable(
                f"{self._url}{path}: no answer (status {response.status_code}: {response.text[:500]})"
            )
        return response

    def prompt_choices(self, items: Sequence[Item], **extra: Any) -> list[dict[str, Any]]:
        """The completions route's choice for each item's sequence, one generated token each."""
        body = {
            "model": self._model,
            "prompt": [item.token_ids_L.tolist() for item in items],
            "max_tokens": 1,
            "temperature": 1.0,
        }
        choices = self.request("POST", "/v1/completions", body | extra)["choices"]
        if len(choices) != len(items):
            raise DataError(f"{len(items)} prompts were sent, {len(choices)} choices came back")
        return sorted(choices, key=lambda choice: int(choice["index"]))

    def generate(self, prompts: Sequence[EnginePrompt], params: GenerationParams) -> Steps:
        """See `Engine.generate`; not among the capabilities of most servers."""
        raise NotImplementedError

    def head(self) -> Head | None:
        """See `Engine.head`; no server gives hidden states."""
        return None

    def close(self) -> None:
        """See `Engine.close`."""
        self._http.close()


def _max_length(config: TeacherConfig, card: dict[str, Any]) -> int:
    """Longest sequence: the config's, else the server's, less the one token it must generate."""
    served = card["max_model_len"] - 1 if card.get("max_model_len") else None
    if config.max_length is not None and served is not None and config.max_length > served:
        raise ConfigError(f"max_length = {config.max_length}, but the server takes {served} tokens: lower it")
    if (length := config.max_length or served) is None:
        raise ConfigError("the server does not tell its longest sequence: set max_length for this teacher")
    return int(length)


def only_known(scores: EngineScores, vocab_size: int) -> EngineScores:
    """`scores` themselves. Raises DataError when a top-k holds a row that the tokenizer does not know.

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


def with_tail(logprob_C: np.ndarray, ids_CK: Any, top_CK: Any) -> EngineScores:
    """Scores with the mass outside the top-k computed; `ids_CK` None: the sampled token only."""
    if ids_CK is None:
        return EngineScores(logprob_C)
    topk_CK = np.array(top_CK, np.float32)
    tail_C = np.clip(1 - np.exp(topk_CK).sum(1), 0, 1)
    return EngineScores(logprob_C, np.array(ids_CK, np.int32), topk_CK, tail_C)


class CompletionsServer(HttpEngine):
    """Any completions server that echoes the prompt with log-probabilities; it is tried once at start."""

    def __init__(self, config: TeacherConfig, vocab_size: int, **options: Any) -> None:
        super().__init__(config, vocab_size, **options)
        probe = [Item(np.array([0, 0, 0], np.int32), 1), Item(np.array([0, 0], np.int32), 1)]
        try:
            self.score(probe, ScoreOptions())
        except DataError as error:
            raise ConfigError(
                f"the server at engine_url returns no log-probabilities of the prompt ({error}): "
                "use a server that does, or run the teacher with another engine"
            ) from error
        self.engine_info = self.described(("prompt",))

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`."""
        parts = []
        for item, choice in zip(items, self.prompt_choices(items, echo=True, logprobs=1), strict=True):
            values = (choice.get("logprobs") or {}).get("token_logprobs") or []
            length = len(item.token_ids_L)
            if len(values) - length not in (0, 1):  # with or without the generated token
                raise DataError(f"{length} tokens were sent, {len(values)} log-probabilities came back")
            parts.append(np.array(values[item.first : length], np.float32))
        return EngineScores(np.concatenate(parts))


# --- SGLang -----------------------------------------------------------------------------------------------


class SGLangServer(HttpEngine):
    """SGLang's route POST /generate; tried once at start. Tested against a stand-in, not a real SGLang.

    The prompt's log-probabilities come as lists of [log-probability, id, text], from `logprob_start_len` on,
    where the first entry is null. SGLang scores one set of ids at all positions of a sequence, so a gather
    asks for the union of its ids and its answer grows with positions × union: not for long sequences.
    """

    def __init__(self, config: TeacherConfig, vocab_size: int, **options: Any) -> None:
        super().__init__(config, vocab_size, **options)
        probe = Item(np.array([0, 0], np.int32), 1, np.array([[0]], np.int32))
        try:
            self.score([probe], ScoreOptions(topk=1, gather=1))
        except DataError as error:
            raise ConfigError(
                f"the server at engine_url does not answer /generate like SGLang ({error}): "
                'use engine = "openai" for other servers'
            ) from error
        self.engine_info = self.described(("topk", "gather", "prompt"), max_topk=MAX_TOPK)

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`."""
        unions = [np.unique(np.maximum(_wanted(item), 0)) for item in items] if options.gather else []
        answers = list(zip(self._meta(items, options.topk, unions), items, strict=True))
        logprob_C = np.concatenate([_sampled(info, item, self._vocab_size - 1) for info, item in answers])
        ids_CK, top_CK = None, None
        if options.topk:
            tops = [_table(info, "input_top_logprobs", item, options.topk) for info, item in answers]
            ids_CK, top_CK = (np.concatenate(columns) for columns in zip(*tops, strict=True))
        scores = only_known(with_tail(logprob_C, ids_CK, top_CK), self._vocab_size)
        if not options.gather:
            return scores
        gathered = [_gathered(*answer, union) for answer, union in zip(answers, unions, strict=True)]
        return dataclasses.replace(scores, gathered_CK=np.concatenate(gathered))

    def _meta(self, items: Sequence[Item], topk: int, unions: list[np.ndarray]) -> list[dict[str, Any]]:
        body: dict[str, Any] = {
            "input_ids": [item.token_ids_L.tolist() for item in items],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": [item.first - 1 for item in items],
        }
        if topk:
            body["top_logprobs_num"] = topk
        if unions:
            body["token_ids_logprob"] = [union.tolist() for union in unions]
        answers = self.request("POST", "/generate", body)
        if not isinstance(answers, list) or len(answers) != len(items):
            raise DataError(f"{len(items)} sequences were sent, the answer is no list of as many")
        return [answer["meta_info"] for answer in answers]


def _wanted(item: Item) -> np.ndarray:
    assert item.gather_ids_TK is not None, "the service checks that every item of a batch has them"
    return item.gather_ids_TK


def _rows(info: dict[str, Any], name: str, item: Item) -> list[Any]:
    """The entries of the scored positions. Raises DataError when there are not as many."""
    rows = (info.get(name) or [])[1:]
    if len(rows) != item.positions or None in rows:
        raise DataError(f"{name} has {len(rows)} entries for {item.positions} positions")
    return rows


def _sampled(info: dict[str, Any], item: Item, last: int) -> np.ndarray:
    """float32 [T]; SGLang reports `last`, the vocabulary's last id, as 0."""
    rows = _rows(info, "input_token_logprobs", item)
    pairs = zip([row[1] for row in rows], item.token_ids_L[item.first :].tolist(), strict=True)
    if any(found != sent and (found, sent) != (0, last) for found, sent in pairs):
        raise DataError("log-probabilities came for other tokens than were sent: it re-tokenises")
    return np.array([row[0] for row in rows], np.float32)


def _table(info: dict[str, Any], name: str, item: Item, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and log-probabilities float32, [T, width] each."""
    rows = _rows(info, name, item)
    if any(len(row) != width for row in rows):
        raise DataError(f"{name} does not have {width} entries at every position")
    ids = np.array([[entry[1] for entry in row] for row in rows], np.int32)
    return ids, np.array([[entry[0] for entry in row] for row in rows], np.float32)


def _gathered(info: dict[str, Any], item: Item, union: np.ndarray) -> np.ndarray:
    """float32 [T, K]"""
    ids_TU, logp_TU = _table(info, "input_token_ids_logprobs", item, len(union))
    if not (ids_TU == union).all():
        raise DataError("input_token_ids_logprobs came for other ids than were asked")
    wanted_TK = _wanted(item)
    found_TK = np.take_along_axis(logp_TU, np.searchsorted(union, np.maximum(wanted_TK, 0)), 1)
    return np.where(wanted_TK < 0, 0, found_TK).astype(np.float32)
