"""vLLM servers that a teacher computes with: hidden states over POST /pooling, completions over
POST /v1/completions.

Hidden states arrive as bytes. The server of `engine_url` is started with

    vllm serve MODEL --runner pooling --convert embed --pooler-config '{"task": "token_embed"}'

and the one of `generate_url` with `vllm serve MODEL`.

Letters in shapes: T tokens of a completion, L of a sequence, C scored positions of a batch, H hidden size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Final

import httpx
import msgspec
import numpy as np
import torch

from sync.base.errors import ConfigError, DataError, Unreachable
from sync.base.retry import retrying
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import EnginePrompt, GenerationParams, Item

KEY_VARIABLE: Final = "TEACHER_API_KEY"
"""Environment variable with the bearer token of the servers."""
TIMEOUT_SECONDS: Final = 600.0
"""Of one request; of a completion a second more for each of its `max_tokens`."""
START_SECONDS: Final = 60.0
"""How long a server that is still starting is waited for."""
POOLING_FLAGS: Final = """--runner pooling --convert embed --pooler-config '{"task": "token_embed"}'"""


class VllmServer:
    """Requests to one server that serves the teacher's model."""

    def __init__(self, url: str, config: TeacherConfig, transport: httpx.BaseTransport | None = None) -> None:
        """Raises ConfigError when it serves another model, Unreachable after START_SECONDS without it."""
        key = os.environ.get(KEY_VARIABLE)
        self._url = url.rstrip("/")
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            transport=transport,
        )
        try:
            card = json.loads(retrying(Unreachable, within=START_SECONDS)(self.call, "GET", "/v1/models"))
            card = card["data"][0]
            self.model, self.max_length = str(card["id"]), int(card["max_model_len"])
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{self._url}/v1/models lists no model of vLLM: correct the URL") from error
        served = {PurePath(str(card.get(name))).name for name in ("id", "root")}
        if PurePath(config.path).name not in served:
            raise ConfigError(
                f"the server at {self._url} serves {self.model!r}, not {config.path!r}: correct one, "
                f"or start the server with --served-model-name {config.path} if they are the same"
            )
        if config.max_length is not None and config.max_length > self.max_length:
            raise ConfigError(
                f"max_length = {config.max_length}, but the server at {self._url} takes {self.max_length} "
                f"tokens: lower it, or start the server with --max-model-len {config.max_length}"
            )
        self.max_length = config.max_length or self.max_length

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> bytes:
        """The answer's bytes. Raises DataError when the server refuses (4xx), Unreachable when it fails."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        try:
            response = self._http.request(
                method, self._url + path, content=content, headers=headers, timeout=timeout
            )
        except httpx.TransportError as error:
            raise Unreachable(f"{self._url}{path}: {type(error).__name__}: {error}") from None
        if (status := response.status_code) != 200:
            kind = Unreachable if status >= 500 or status == 429 else DataError
            raise kind(f"{self._url}{path} answered {status}: {response.text[:500]}")
        return response.content

    def close(self) -> None:
        self._http.close()


class ServedStates(VllmServer):
    """Hidden states of a server with the pooling runner; see `HiddenStates` in engines/vllm.py."""

    def __init__(
        self,
        url: str,
        config: TeacherConfig,
        dtype: torch.dtype,
        hidden_size: int,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Raises ConfigError when the server gives no hidden states, and what VllmServer raises."""
        super().__init__(url, config, transport)
        self._dtype, self._hidden_size = dtype, hidden_size
        try:
            self.read([Item(np.zeros(2, np.int32), 1)])
        except DataError as error:
            raise ConfigError(
                f"{url} gives no hidden states of this model ({error}): start it with {POOLING_FLAGS}"
            ) from error

    def read(self, items: Sequence[Item]) -> torch.Tensor:
        body = {
            "model": self.model,
            "input": [item.token_ids_L.tolist() for item in items],
            "task": "token_embed",
            "use_activation": False,
            "encoding_format": "bytes_only",
            "embed_dtype": str(self._dtype).removeprefix("torch."),
            "endianness": "little",
        }
        answer = self.call("POST", "/pooling", body)
        lengths = [len(item.token_ids_L) for item in items]
        row = self._hidden_size * self._dtype.itemsize
        if len(answer) != sum(lengths) * row:
            raise DataError(
                f"{sum(lengths)} tokens of {row} bytes were expected, {len(answer)} bytes came back: the "
                "server computes another model, or leaves tokens out"
            )
        states = torch.frombuffer(bytearray(answer), dtype=self._dtype).view(-1, self._hidden_size)
        parts = [
            part_LH[item.first - 1 : -1] for item, part_LH in zip(items, states.split(lengths), strict=True)
        ]
        return torch.cat(parts)


class ServedCompletions(VllmServer):
    """Completions by a server with the generate runner."""

    def __init__(
        self,
        url: str,
        config: TeacherConfig,
        without_token: Sequence[int] = (),
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`without_token`: rows of the model that are never sampled. Raises what VllmServer raises."""
        super().__init__(url, config, transport)
        self._bias = {str(row): -100 for row in without_token}

    def complete(self, prompt: EnginePrompt, params: GenerationParams) -> tuple[np.ndarray, bool]:
        """int32 token ids [T] of one completion, and whether it has ended.

        Nothing is left to the server's defaults: a model's generation config may cut the distribution.
        """
        body = {
            "model": self.model,
            "prompt": prompt.token_ids_P.tolist(),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": prompt.seed,
            "stop_token_ids": list(params.stop_token_ids),
            "logit_bias": self._bias,
            "return_token_ids": True,
        }
        seconds = TIMEOUT_SECONDS + params.max_tokens
        choice = json.loads(self.call("POST", "/v1/completions", body, seconds))["choices"][0]
        if not (ids := choice.get("token_ids")):
            raise DataError("the server returns no token_ids: vLLM >= 0.11 does")
        return np.array(ids, np.int32), choice["finish_reason"] == "stop"
