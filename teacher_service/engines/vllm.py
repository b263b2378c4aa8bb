"""A teacher computed by vLLM: a stock server by URL, or vLLM in this process.

Scores are prompt log-probabilities at temperature 1, which vLLM normalises over all rows of the model, padded
ones included. Gathering needs `prompt_logprob_token_ids` (the V2 model runner, on GPUs; a server also needs
--enable-scale-out): tried once at start, and not offered where it is refused. Top-k is bounded by
--max-logprobs. Hidden states and entropy are not offered.

Completions are sampled at temperature 1. vLLM inside this process generates a whole batch before it scores
again; a server does both at once.

Letters in shapes: L tokens of one sequence, T its scored positions, C those of a batch, K ids per position.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final

import httpx
import numpy as np

from sync.errors import ConfigError, DataError, Unreachable
from sync.replica.plugin import PLUGIN
from sync.retry import retrying
from teacher_service.config import TeacherConfig
from teacher_service.engines import base
from teacher_service.engines.base import EngineCompletion, EngineScores, Item

KEY_VARIABLE: Final = "TEACHER_API_KEY"
"""Environment variable with the bearer token of the server at `engine_url`."""
TIMEOUT_SECONDS: Final = 600.0
"""Of one request."""
START_SECONDS: Final = 60.0
"""How long a server that is still starting is waited for."""
TOPK_TRIED: Final = (base.MAX_TOPK, 256, 128, 64, 32, 20, 8, 1)
CONCURRENCY: Final = 64
POLL_SECONDS: Final = 0.02


def _capabilities(topk: int, gather: bool) -> tuple[str, ...]:
    return (*["topk"] * (topk > 0), *["gather"] * gather, "prompt", "generate")


def _scores(logprob_C: Any, ids_CK: Any, top_CK: Any, vocab_size: int) -> EngineScores:
    """Scores with the mass outside the top-k; K = 0: the sampled token only.

    Raises DataError for a top-k with a row of the model that the tokenizer does not have: some models have
    such rows, vLLM ranks them, and a student has nothing to compare them with.
    """
    logprob_C, top_CK = np.asarray(logprob_C, np.float32), np.asarray(top_CK, np.float32)
    ids_CK = np.asarray(ids_CK, np.int32)
    if not ids_CK.size:
        return EngineScores(logprob_C)
    if (largest := int(ids_CK.max())) >= vocab_size:
        raise DataError(
            f"a top-k holds id {largest}, a row of the model that the tokenizer with its {vocab_size} ids "
            'does not have: ask for fewer ids, or use engine = "transformers", which leaves such rows out'
        )
    return EngineScores(logprob_C, ids_CK, top_CK, np.clip(1 - np.exp(top_CK).sum(1), 0, 1))


def _with_gathered(scores: EngineScores, items: Sequence[Item], found: Sequence[np.ndarray]) -> EngineScores:
    """`scores` with the log-probabilities [T, K] `found` for each item's ids; 0 where an id is -1."""
    wanted_CK = np.concatenate([item.gather_ids_TK for item in items if item.gather_ids_TK is not None])
    gathered_CK = np.where(wanted_CK < 0, 0, np.concatenate(found)).astype(np.float32)
    return dataclasses.replace(scores, gathered_CK=gathered_CK)


# --- a server ---------------------------------------------------------------------------------------------


class VllmServer(base.Engine):
    """The vLLM server at `engine_url`; what it accepts is tried at start."""

    def __init__(
        self, config: TeacherConfig, vocab_size: int, transport: httpx.BaseTransport | None = None
    ) -> None:
        """Raises ConfigError when the server cannot be used, Unreachable after START_SECONDS without it."""
        key = os.environ.get(KEY_VARIABLE)
        self._url, self._vocab_size = (config.engine_url or "").rstrip("/"), vocab_size
        self.received_bytes = 0
        """Of all answers."""
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=TIMEOUT_SECONDS,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            transport=transport,
        )
        self._threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="server")
        try:
            models = retrying(Unreachable, within=START_SECONDS)(self._request, "GET", "/v1/models")
            card = models["data"][0]
            self._model, served = card["id"], int(card["max_model_len"]) - 1  # it must generate one token
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{self._url}/v1/models lists no model of vLLM: correct engine_url") from error
        if config.max_length is not None and config.max_length > served:
            raise ConfigError(
                f"max_length = {config.max_length}, but the server takes {served} tokens: lower it"
            )
        probe = Item(np.array([0, 0], np.int32), 1, np.array([[0]], np.int32))
        sizes = (k for k in TOPK_TRIED if k <= vocab_size)
        topk = next((k for k in sizes if _accepted(self._prompt_logprobs, [probe], k)), 0)
        self.engine_info = base.EngineInfo(
            model=config.path,
            revision=config.revision,
            dtype=config.dtype,
            engine="vllm",
            vocab_size=vocab_size,
            hidden_size=0,
            max_length=config.max_length or served,
            can=_capabilities(topk, gather=_accepted(self._gathered, probe)),
            max_topk=topk,
        )

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer. Raises DataError when the server refuses (4xx), Unreachable when it fails."""
        try:
            response = self._http.request(method, self._url + path, json=body)
        except httpx.TransportError as error:
            raise Unreachable(f"{self._url}{path}: {type(error).__name__}: {error}") from None
        self.received_bytes += len(response.content)
        if (status := response.status_code) != 200:
            kind = Unreachable if status >= 500 or status == 429 else DataError
            raise kind(f"{self._url}{path} answered {status}: {response.text[:500]}")
        return response.json()

    def score(self, items: Sequence[Item], options: base.ScoreOptions) -> EngineScores:
        scores = self._prompt_logprobs(items, options.topk)
        if not options.gather:
            return scores
        return _with_gathered(scores, items, list(self._threads.map(self._gathered, items)))

    def _prompt_logprobs(self, items: Sequence[Item], k: int) -> EngineScores:
        body = {
            "model": self._model,
            "prompt": [item.token_ids_L.tolist() for item in items],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": k,
        }
        choices = self._request("POST", "/v1/completions", body)["choices"]
        if len(choices) != len(items):
            raise DataError(f"{len(items)} prompts were sent, {len(choices)} choices came back")
        in_order = sorted(choices, key=lambda choice: int(choice["index"]))
        tables = [choice.get("prompt_logprobs") for choice in in_order]
        if None in tables:
            raise DataError("the server returns no prompt_logprobs: use a vLLM server, or another engine")
        return _read_tables(items, tables, k, self._vocab_size)

    def _gathered(self, item: Item) -> np.ndarray:
        """float32 [T, K]"""
        assert item.gather_ids_TK is not None, "the service checks that every item of a batch has them"
        body = {
            "model": self._model,
            "token_ids": item.token_ids_L.tolist(),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                "detokenize": False,
                "prompt_logprob_token_ids": item.gather_ids_TK.tolist(),
                "prompt_logprob_start": item.first - 1,
            },
        }
        text = self._request("POST", "/inference/v1/generate", body).get("prompt_token_id_logprobs")
        if text is None:
            raise DataError("the server returns no prompt_token_id_logprobs: vLLM >= 0.32 on GPUs does")
        return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)

    def generate(self, prompts: Sequence[base.EnginePrompt], params: base.GenerationParams) -> base.Steps:
        """See `Engine.generate`; a step is a poll of the server's answers."""
        futures = [self._threads.submit(self._completion, prompt, params) for prompt in prompts]
        try:
            while wait(futures, timeout=POLL_SECONDS).not_done:
                yield None
            yield [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _completion(self, prompt: base.EnginePrompt, params: base.GenerationParams) -> EngineCompletion:
        """Nothing is left to the server's defaults: a model's generation config may cut the distribution."""
        body = {
            "model": self._model,
            "prompt": prompt.token_ids_P.tolist(),
            "max_tokens": params.max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": prompt.seed,
            "stop_token_ids": list(params.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        choice = self._request("POST", "/v1/completions", body)["choices"][0]
        ids, values = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or values is None or len(ids) != len(values):
            raise DataError("the server returns no token_ids with log-probabilities: vLLM >= 0.11 does")
        ended = choice["finish_reason"] == "stop"
        return EngineCompletion(np.array(ids, np.int32), np.array(values, np.float32), ended)

    def close(self) -> None:
        self._threads.shutdown()
        self._http.close()


def _accepted(request: Callable[..., object], *arguments: object) -> bool:
    try:
        request(*arguments)
    except DataError:
        return False
    return True


def _read_tables(items: Sequence[Item], tables: Sequence[Any], k: int, vocab_size: int) -> EngineScores:
    """Scores from vLLM's prompt_logprobs: per token a dict id → {"logprob", "rank"}, None for the first.

    The dict holds the k most likely ids and the prompt's own token. Raises DataError when one is missing.
    """
    logprobs: list[float] = []
    top: list[list[tuple[int, int, float]]] = []
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
            top.append(sorted((e["rank"], int(i), e["logprob"]) for i, e in entry.items() if e["rank"] <= k))
    ids_CK = [[id_ for _, id_, _ in row[:k]] for row in top]
    return _scores(logprobs, ids_CK, [[logp for *_, logp in row[:k]] for row in top], vocab_size)


# --- in this process --------------------------------------------------------------------------------------


class InProcess(base.Engine):
    """vLLM in this process; `engine_args` of the config go to `vllm.LLM` as they are."""

    def __init__(self, config: TeacherConfig, vocab_size: int) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        others = os.environ.get("VLLM_PLUGINS", "").split(",")
        os.environ["VLLM_PLUGINS"] = ",".join({PLUGIN, *filter(None, others)})  # for its patches
        import vllm

        self._params = vllm.SamplingParams
        settings: dict[str, Any] = {
            "model": config.path,
            "revision": config.revision,
            "dtype": config.dtype,
            "trust_remote_code": config.trust_remote_code,
            "max_model_len": config.max_length,
            "max_logprobs": min(base.MAX_TOPK, vocab_size),
            "enable_prefix_caching": False,  # a cached prefix has no prompt log-probabilities
        }
        try:
            self._llm = vllm.LLM(**(settings | config.engine_args))
        except (ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"vLLM cannot serve {config.path!r}: {error}") from error
        engine = self._llm.llm_engine.vllm_config
        max_topk = engine.model_config.max_logprobs
        self.engine_info = base.EngineInfo(
            model=config.path,
            revision=config.revision,
            dtype=str(engine.model_config.dtype).removeprefix("torch."),
            engine="vllm",
            vocab_size=vocab_size,
            hidden_size=0,
            max_length=engine.model_config.max_model_len - 1,
            can=_capabilities(max_topk, gather=bool(getattr(engine, "use_v2_model_runner", False))),
            max_topk=max_topk,
        )

    def score(self, items: Sequence[Item], options: base.ScoreOptions) -> EngineScores:
        params = []
        for item in items:
            gather = {"prompt_logprob_token_ids": item.gather_ids_TK, "prompt_logprob_start": item.first - 1}
            params.append(
                self._params(
                    max_tokens=1,
                    temperature=1.0,
                    detokenize=False,
                    flat_logprobs=True,
                    prompt_logprobs=options.topk,
                    **(gather if options.gather else {}),
                )
            )
        outputs = self._run([item.token_ids_L for item in items], params)
        columns = [_columns(o.prompt_logprobs, i, options.topk) for o, i in zip(outputs, items, strict=True)]
        ids_CK, logprob_CK = (np.concatenate(arrays) for arrays in zip(*columns, strict=True))
        scores = _scores(logprob_CK[:, 0], ids_CK[:, 1:], logprob_CK[:, 1:], self.engine_info.vocab_size)
        if not options.gather:
            return scores
        return _with_gathered(scores, items, [output.prompt_token_id_logprobs for output in outputs])

    def generate(self, prompts: Sequence[base.EnginePrompt], params: base.GenerationParams) -> base.Steps:
        """See `Engine.generate`; one step, because vLLM's loop cannot be shared with `score`."""
        wanted = [
            self._params(
                max_tokens=params.max_tokens,
                temperature=1.0,
                seed=prompt.seed,
                stop_token_ids=list(params.stop_token_ids),
                logprobs=0,
                detokenize=False,
            )
            for prompt in prompts
        ]
        outputs = self._run([prompt.token_ids_P for prompt in prompts], wanted)
        yield [_completion_of(output.outputs[0]) for output in outputs]

    def _run(self, prompts: Sequence[np.ndarray], params: list[Any]) -> list[Any]:
        ids = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        return list(self._llm.generate(ids, params, use_tqdm=False))

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _completion_of(output: Any) -> EngineCompletion:
    ids = [int(token) for token in output.token_ids]
    logprobs = [table[token].logprob for token, table in zip(ids, output.logprobs, strict=True)]
    ended = output.finish_reason == "stop"
    return EngineCompletion(np.array(ids, np.int32), np.array(logprobs, np.float32), ended)


def _columns(flat: Any, item: Item, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities [T, 1 + K]: the prompt's own token, then the K most likely.

    Raises DataError when vLLM's table has another layout.
    """
    begin = flat.start_indices[item.first]
    ids = np.array(flat.token_ids[begin:], np.int32).reshape(-1, k + 1)
    if not np.array_equal(ids[:, 0], item.token_ids_L[item.first :]):
        raise DataError(
            "vLLM's prompt log-probabilities are not those of the tokens sent: use another engine"
        )
    return ids, np.array(flat.logprobs[begin:], np.float32).reshape(-1, k + 1)
