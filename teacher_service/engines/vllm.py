"""A teacher computed by vLLM: a stock server by URL, or vLLM in this process.

Scores are prompt log-probabilities at temperature 1, which vLLM normalises over all rows of the model,
padded ones included. Gathering needs `prompt_logprob_token_ids` (the V2 model runner, on GPUs; a server also
needs --enable-scale-out): tried once at start, and not offered where it is refused. Top-k is bounded by
--max-logprobs. Hidden states and entropy are not offered.

Completions are written at temperature 1. vLLM inside this process writes a whole batch before it scores
again; a server does both at once.

Letters in shapes: L tokens of one sequence, T its scored positions, K ids per position.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final

import numpy as np

from sync.errors import ConfigError, DataError
from sync.replica.plugin import PLUGIN
from sync.wire import Head
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import (
    Engine,
    EngineCompletion,
    EngineInfo,
    EnginePrompt,
    EngineScores,
    GenerationParams,
    Item,
    ScoreOptions,
)
from teacher_service.engines.http_engine import HttpEngine, assemble, longest, only_known, scores_from_dicts

GENERATE: Final = "/inference/v1/generate"
TOPK_TRIED: Final = (1024, 256, 128, 64, 32, 20, 8, 1)
CONCURRENCY: Final = 64
POLL_SECONDS: Final = 0.02


def connect(config: TeacherConfig, vocab_size: int) -> Engine:
    """Engine of a TeacherConfig. Raises ConfigError when it cannot serve."""
    if config.engine_url is None:
        return InProcess(config, vocab_size)
    return ByUrl(HttpEngine(config.engine_url), config, vocab_size)


def largest_topk(accepts: Callable[[int], bool], vocab_size: int) -> int:
    """The largest of TOPK_TRIED that `accepts`; 0: none."""
    return next((k for k in TOPK_TRIED if k <= vocab_size and accepts(k)), 0)


def capabilities(topk: int, gather: bool, write: bool = True) -> tuple[str, ...]:
    """What vLLM gives, by what was tried."""
    tried = {"topk": topk > 0, "gather": gather, "prompt": True, "write": write}
    return tuple(name for name, given in tried.items() if given)


def _check_temperature(generation: GenerationParams) -> None:
    """Raise DataError for what vLLM would report the wrong log-probabilities of."""
    if generation.temperature != 1.0:
        raise DataError(
            f"temperature is {generation.temperature:g}, and vLLM tells log-probabilities at temperature 1: "
            'ask for 1, or use engine = "transformers"'
        )


class ByUrl:
    """A vLLM server that runs already."""

    def __init__(self, upstream: HttpEngine, config: TeacherConfig, vocab_size: int) -> None:
        self._upstream = upstream
        card = upstream.model()
        self._model = card["id"]
        self._threads = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="upstream")
        max_topk = largest_topk(self._accepts_topk, vocab_size)
        self.engine_info = EngineInfo(
            model=config.path,
            revision=config.revision,
            dtype=config.dtype,
            engine="vllm",
            vocab_size=vocab_size,
            hidden_size=0,
            max_length=longest(config, card),
            can=capabilities(max_topk, self._accepts_gather(), self._accepts_write()),
            max_topk=max_topk,
        )

    def _accepts_topk(self, k: int) -> bool:
        try:
            self._completions([Item(np.array([0, 0], np.int32), 1)], k)
        except DataError:
            return False
        return True

    def _accepts_gather(self) -> bool:
        probe = Item(np.array([0, 0], np.int32), 1, np.array([[0]], np.int32))
        try:
            self._gathered(probe)
        except DataError:
            return False
        return True

    def _accepts_write(self) -> bool:
        try:
            self._text(EnginePrompt(np.array([0], np.int32), 0), GenerationParams(1, 1.0, ()))
        except DataError:
            return False
        return True

    def write(
        self, engine_prompts: Sequence[EnginePrompt], generation: GenerationParams
    ) -> Iterator[list[EngineCompletion] | None]:
        """See `Writer.write`."""
        _check_temperature(generation)
        futures = [
            self._threads.submit(self._text, engine_prompt, generation) for engine_prompt in engine_prompts
        ]
        try:
            while wait(futures, timeout=POLL_SECONDS).not_done:
                yield None
            yield [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _text(self, engine_prompt: EnginePrompt, generation: GenerationParams) -> EngineCompletion:
        """Nothing is left to the server's defaults: a model's generation config may cut the distribution."""
        body = {
            "model": self._model,
            "prompt": engine_prompt.token_ids_P.tolist(),
            "max_tokens": generation.max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": engine_prompt.seed,
            "stop_token_ids": list(generation.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        choice = self._upstream.post("/v1/completions", body)["choices"][0]
        ids, values = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or values is None or len(ids) != len(values):
            raise DataError("the server returns no token_ids with log-probabilities: vLLM >= 0.11 does")
        ended = choice["finish_reason"] == "stop"
        return EngineCompletion(np.array(ids, np.int32), np.array(values, np.float32), ended)

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`."""
        scores = only_known(self._completions(items, options.topk), self.engine_info.vocab_size)
        if not options.gather:
            return scores
        gathered = list(self._threads.map(self._gathered, items))
        return dataclasses.replace(scores, gathered_CK=np.concatenate(gathered))

    def _completions(self, items: Sequence[Item], k: int) -> EngineScores:
        body = {
            "model": self._model,
            "prompt": [item.token_ids_L.tolist() for item in items],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": k,
        }
        choices = self._upstream.post("/v1/completions", body)["choices"]
        tables = [choice.get("prompt_logprobs") for choice in sorted(choices, key=lambda c: int(c["index"]))]
        if None in tables or len(tables) != len(items):
            raise DataError("the server returns no prompt_logprobs: use a vLLM server, or another engine")
        return scores_from_dicts(items, tables, k)

    def _gathered(self, item: Item) -> np.ndarray:
        """float32 [T, K]"""
        assert item.gather_ids_TK is not None
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
        text = self._upstream.post(GENERATE, body).get("prompt_token_id_logprobs")
        if text is None:
            raise DataError("the server returns no prompt_token_id_logprobs: vLLM >= 0.32 on GPUs does")
        found_TK = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
        return np.where(item.gather_ids_TK < 0, 0, found_TK).astype(np.float32)

    def head(self) -> Head | None:
        """vLLM shows no hidden states."""
        return None

    def close(self) -> None:
        """See `Engine.close`."""
        self._threads.shutdown()
        self._upstream.close()


class InProcess:
    """vLLM in this process; `engine_args` of the config go to `vllm.LLM` as they are."""

    def __init__(self, config: TeacherConfig, vocab_size: int) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        others = os.environ.get("VLLM_PLUGINS", "").split(",")
        os.environ["VLLM_PLUGINS"] = ",".join({PLUGIN, *filter(None, others)})  # for its mends
        import vllm

        self._params = vllm.SamplingParams
        settings: dict[str, Any] = {
            "model": config.path,
            "revision": config.revision,
            "dtype": config.dtype,
            "trust_remote_code": config.trust_remote_code,
            "max_model_len": config.max_length,
            "max_logprobs": min(1024, vocab_size),
            "enable_prefix_caching": False,  # a cached prefix has no prompt log-probabilities
        }
        try:
            self._llm = vllm.LLM(**(settings | config.engine_args))
        except (ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"vLLM cannot serve {config.path!r}: {error}") from error
        engine = self._llm.llm_engine.vllm_config
        gather = bool(getattr(engine, "use_v2_model_runner", False))
        max_topk = engine.model_config.max_logprobs
        self.engine_info = EngineInfo(
            model=config.path,
            revision=config.revision,
            dtype=str(engine.model_config.dtype).removeprefix("torch."),
            engine="vllm",
            vocab_size=vocab_size,
            hidden_size=0,
            max_length=engine.model_config.max_model_len - 1,
            can=capabilities(max_topk, gather),
            max_topk=max_topk,
        )

    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`."""
        prompts = [{"prompt_token_ids": item.token_ids_L.tolist()} for item in items]
        params = [self._sampling(item, options) for item in items]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        columns = [
            _columns(output.prompt_logprobs, item, options.topk)
            for output, item in zip(outputs, items, strict=True)
        ]
        ids_CK, logprob_CK = (np.concatenate(arrays) for arrays in zip(*columns, strict=True))
        if options.topk:
            scores = assemble(logprob_CK[:, 0], ids_CK[:, 1:], logprob_CK[:, 1:])
            only_known(scores, self.engine_info.vocab_size)
        else:
            scores = EngineScores(logprob_CK[:, 0])
        if not options.gather:
            return scores
        wanted_CK = np.concatenate([item.gather_ids_TK for item in items if item.gather_ids_TK is not None])
        found_CK = np.concatenate([output.prompt_token_id_logprobs for output in outputs])
        return dataclasses.replace(
            scores, gathered_CK=np.where(wanted_CK < 0, 0, found_CK).astype(np.float32)
        )

    def write(
        self, engine_prompts: Sequence[EnginePrompt], generation: GenerationParams
    ) -> Iterator[list[EngineCompletion] | None]:
        """See `Writer.write`; one step, because vLLM's loop cannot be shared with `score`."""
        _check_temperature(generation)
        prompts = [
            {"prompt_token_ids": engine_prompt.token_ids_P.tolist()} for engine_prompt in engine_prompts
        ]
        params = [
            self._params(
                max_tokens=generation.max_tokens,
                temperature=1.0,
                seed=engine_prompt.seed,
                stop_token_ids=list(generation.stop_token_ids),
                logprobs=0,
                detokenize=False,
            )
            for engine_prompt in engine_prompts
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        yield [_completion_of(output.outputs[0]) for output in outputs]

    def _sampling(self, item: Item, options: ScoreOptions) -> Any:
        gather = {}
        if options.gather:
            gather = {"prompt_logprob_token_ids": item.gather_ids_TK, "prompt_logprob_start": item.first - 1}
        return self._params(
            max_tokens=1,
            temperature=1.0,
            detokenize=False,
            flat_logprobs=True,
            prompt_logprobs=options.topk,
            **gather,
        )

    def head(self) -> Head | None:
        """vLLM shows no hidden states."""
        return None

    def close(self) -> None:
        """See `Engine.close`."""
        self._llm.llm_engine.engine_core.shutdown()


def _completion_of(output: Any) -> EngineCompletion:
    """vLLM's completion of one prompt."""
    ids = [int(token) for token in output.token_ids]
    logprobs = [table[token].logprob for token, table in zip(ids, output.logprobs, strict=True)]
    return EngineCompletion(
        np.array(ids, np.int32), np.array(logprobs, np.float32), output.finish_reason == "stop"
    )


def _columns(flat: Any, item: Item, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities [T, 1 + K]: the prompt's own token, then the K most likely.

    Raises DataError when vLLM's table is not laid out so.
    """
    begin = flat.start_indices[item.first]
    ids = np.array(flat.token_ids[begin:], np.int32).reshape(-1, k + 1)
    if not np.array_equal(ids[:, 0], item.token_ids_L[item.first :]):
        raise DataError(
            "vLLM's prompt log-probabilities are not those of the tokens sent: use another engine"
        )
    return ids, np.array(flat.logprobs[begin:], np.float32).reshape(-1, k + 1)
