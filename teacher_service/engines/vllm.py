"""A teacher computed by vLLM: hidden states of all tokens by its pooling runner, scores by our head on them.

    batch ──▶ hidden states ──▶ OutputHead ──▶ EngineScores
              LocalStates       of vLLM's engine processes, started here, with any of its parallelism
              ServedStates      of the server at `engine_url`: `vllm serve MODEL` and POOLING_FLAGS

vLLM's other runner generates and cannot return hidden states, so completions come from a server of their own
at `generate_url`; their log-probabilities are scored here.

Letters in shapes: T tokens of a completion, L of a sequence, C scored positions of a batch, H hidden size.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import PurePath
from typing import Any, Final

import msgspec
import numpy as np
import torch

from sync.base.errors import ConfigError, DataError, Overloaded, RemoteError, Unreachable
from sync.base.retry import retrying
from sync.vllm.plugin import PLUGIN
from sync.weights.snapshots.checkpoint import vllm_formats
from sync.wire import Head
from sync.wire.client import BlockingPeer, in_loop
from sync.wire.head import OutputHead
from teacher_service.config import CAPABILITIES, TeacherConfig
from teacher_service.engines import base
from teacher_service.engines.base import EngineCompletion, EnginePrompt, EngineScores, GenerationParams, Item
from teacher_service.engines.head import load_head, score_items
from teacher_service.engines.transformers import find_device

CONCURRENCY: Final = 3
"""Batches at once: one is computed by vLLM, one waits there so that it never idles, one is under the head."""
COMPLETIONS_AT_ONCE: Final = 64
POLL_SECONDS: Final = 0.02
SHUTDOWN_SECONDS: Final = 5.0
DEFAULTS: Final = {
    "gpu_memory_utilization": 0.85,  # of the rest, the head and its logits take a few GB of the first GPU
    "disable_log_stats": True,
}
PARALLEL: Final = ("tensor_parallel_size", "pipeline_parallel_size")
"""Arguments by which an engine computes in several processes, above 1."""
KEY_VARIABLE: Final = "TEACHER_API_KEY"
"""Environment variable with the bearer token of the servers."""
TIMEOUT_SECONDS: Final = 600.0
"""Limit of one request; that of a completion is a second more for each of its `max_tokens`."""
START_SECONDS: Final = 60.0
"""How long a server that is still starting is waited for."""
POOLING_FLAGS: Final = """--runner pooling --convert embed --pooler-config '{"task": "token_embed"}'"""


class VllmEngine(base.Engine):
    """See `Engine`; `score` overlaps batches, of which one at a time is under the head."""

    def __init__(
        self,
        config: TeacherConfig,
        head: OutputHead,
        dtype: torch.dtype,
        states: LocalStates | ServedStates,
        completions: ServedCompletions | None = None,
    ) -> None:
        """Raises ConfigError when the server of `completions` takes shorter sequences than are scored."""
        self._states, self._completions = states, completions
        self._head, self._dtype, self._head_chunk = head, dtype, config.head_chunk
        self._scoring = threading.Lock()
        self._threads = ThreadPoolExecutor(COMPLETIONS_AT_ONCE, thread_name_prefix="completion")
        self._rescoring = threading.Semaphore(CONCURRENCY)  # bounds the hidden states in memory
        if completions is not None and completions.max_length < states.max_length:
            raise ConfigError(
                f"generate_url takes {completions.max_length} tokens, and {states.max_length} are scored: "
                f"start it with --max-model-len {states.max_length}, or set max_length = "
                f"{completions.max_length}"
            )
        self.engine_info = base.EngineInfo(
            model=config.path,
            revision=config.revision,
            dtype=str(dtype).removeprefix("torch."),
            engine="vllm",
            vocab_size=len(head.weight_VH),
            hidden_size=head.weight_VH.shape[1],
            max_length=states.max_length,
            can=tuple(name for name in CAPABILITIES if completions is not None or name != "generate"),
            concurrency=CONCURRENCY,
        )

    def score(self, items: Sequence[Item], options: base.ScoreOptions) -> EngineScores:
        hidden_CH = self._states.read(items)
        with self._scoring:
            return score_items(self._head, hidden_CH, items, options, self._head_chunk)

    def generate(self, prompts: Sequence[EnginePrompt], params: GenerationParams) -> base.Steps:
        """See `Engine.generate`; a step is a poll of the server's answers."""
        futures = [self._threads.submit(self._complete, prompt, params) for prompt in prompts]
        try:
            while wait(futures, timeout=POLL_SECONDS).not_done:
                yield None
            yield [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _complete(self, prompt: EnginePrompt, params: GenerationParams) -> EngineCompletion:
        assert self._completions is not None, 'the service checks for "generate"'
        ids_T, ended = self._completions.complete(prompt, params)
        if (largest := int(ids_T.max())) >= self.engine_info.vocab_size:
            raise DataError(
                f"id {largest} was generated, a row of the model that the tokenizer with its "
                f"{self.engine_info.vocab_size} ids does not have: try again, or use another model"
            )
        whole = Item(np.concatenate([prompt.token_ids_P, ids_T]), len(prompt.token_ids_P))
        with self._rescoring:
            scores = self.score([whole], base.ScoreOptions(temperature=params.temperature))
        return EngineCompletion(ids_T, scores.logprob_C, ended)

    def head(self) -> Head | None:
        return self._head.message(self._dtype)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._states.close()


def load(config: TeacherConfig, vocab_size: int) -> VllmEngine:
    """Engine of a TeacherConfig. Raises ConfigError when it cannot be loaded or served.

    The head comes first: it takes seconds, and what it refuses is known before vLLM loads the model.
    """
    head, dtype, rows = load_head(config, vocab_size, find_device(config.device))
    completions = None
    if config.generate_url is not None:
        completions = ServedCompletions(config.generate_url, config, range(len(head.weight_VH), rows))
    if config.engine_url is None:
        states: LocalStates | ServedStates = LocalStates(config, dtype)
    else:
        states = ServedStates(config.engine_url, config, dtype, head.weight_VH.shape[1])
    return VllmEngine(config, head, dtype, states, completions)


class LocalStates:
    """vLLM's engine in processes of its own, one for each of its workers, driven by the loop of all clients.

    All sequences of all batches are in its scheduler at once: it fills every step up to
    `max_num_batched_tokens`, and splits a sequence that is longer.
    """

    def __init__(self, config: TeacherConfig, dtype: torch.dtype) -> None:
        """Start it; returns once the weights are loaded. Raises ConfigError."""
        others = os.environ.get("VLLM_PLUGINS", "").split(",")
        os.environ["VLLM_PLUGINS"] = ",".join({PLUGIN, *filter(None, others)})  # for its patches
        from vllm import PoolingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_args(config, dtype)
        if current_platform.is_cpu():
            arguments = on_cpu(arguments)
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (TypeError, ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"vLLM cannot serve {config.path!r}: {error}") from error
        self.max_length = int(self._llm.model_config.max_model_len)
        self._params = PoolingParams(task="token_embed", use_activation=False)
        self._numbers = itertools.count()

    def read(self, items: Sequence[Item]) -> torch.Tensor:
        """[C, H] in the model's dtype, after the final norm: of the token before each scored one; for up to
        CONCURRENCY threads. Raises DataError for a batch that is refused, Unreachable when all would be."""
        return torch.cat(in_loop(self._batch(items)).result())

    async def _batch(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """By item."""
        from vllm.v1.engine.exceptions import EngineDeadError

        parts: list[Any] = await asyncio.gather(*map(self._sequence, items), return_exceptions=True)
        for part in parts:
            if isinstance(part, EngineDeadError):
                raise base.EngineEnded("vLLM's engine has ended, its log names the cause") from part
            if isinstance(part, BaseException):
                raise DataError(f"vLLM refuses a sequence: {part}") from part
        return parts

    async def _sequence(self, item: Item) -> torch.Tensor:
        from vllm.inputs.engine import tokens_input

        prompt, number = tokens_input(item.token_ids_L.tolist()), str(next(self._numbers))
        async for output in self._llm.encode(prompt, self._params, number):
            hidden_LH = output.outputs.data
        if len(hidden_LH) != len(item.token_ids_L):
            raise DataError(f"{len(item.token_ids_L)} tokens were sent, {len(hidden_LH)} states came back")
        part: torch.Tensor = hidden_LH[item.first - 1 : -1]
        return part

    def close(self) -> None:
        self._llm.shutdown(timeout=SHUTDOWN_SECONDS)
        del self._llm  # or it would be shut down again at the interpreter's end, without its modules


def engine_args(config: TeacherConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of vLLM's engine; `dtype`: of the checkpoint, which vLLM's own "auto" would narrow.

    Raises ConfigError for an argument in `config.engine_args` that this engine sets itself.
    """
    arguments = {**vllm_formats(config.path), **config.engine_args}
    args = {name.replace("-", "_"): value for name, value in arguments.items()}
    overrides = {"head_dtype": "model"} | args.pop("hf_overrides", {})  # states as they are, not widened
    fixed = {
        "model": config.path,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": config.max_length,
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": {"task": "token_embed", "use_activation": False},
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # a cached prefix has no hidden states
    }
    if taken := sorted(fixed.keys() & args.keys()):
        raise ConfigError(
            f"engine_args sets {', '.join(taken)}, which follow from the teacher's own keys (path, revision, "
            "dtype, max_length) and from what a teacher returns: remove them"
        )
    return DEFAULTS | args | fixed | {"hf_overrides": overrides}


def on_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` with what a CPU shared with other roles wants; vLLM reads the rest from variables set here.

    Its executor for several processes waits for the only worker in a busy loop: a core that others need.
    """
    defaults: dict[str, Any] = {"enforce_eager": True}
    if all(arguments.get(name, 1) == 1 for name in PARALLEL):
        defaults["distributed_executor_backend"] = "uni"
    arguments = defaults | arguments
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if arguments.get("distributed_executor_backend") == "uni":
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or vLLM has several processes all the same
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return arguments


# --- vLLM servers -------------------------------------------------------------------------------------------


class VllmServer:
    """Requests to one server that serves the teacher's model."""

    def __init__(self, url: str, config: TeacherConfig) -> None:
        """Raises ConfigError when it serves another model, Unreachable after START_SECONDS without it."""
        self._peer = BlockingPeer(url, os.environ.get(KEY_VARIABLE), content_type="application/json")
        self._url = self._peer.url
        try:
            listing = retrying(Unreachable, within=START_SECONDS)(self.call, "/v1/models")
            card = msgspec.json.decode(listing)["data"][0]
            self.model, self.max_length = str(card["id"]), int(card["max_model_len"])
        except (KeyError, IndexError, TypeError, msgspec.DecodeError) as error:
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
        self, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> memoryview:
        """The answer. Raises DataError for a refusal (4xx), Unreachable when the server fails or is full."""
        try:
            return self._peer.once(path, None if body is None else msgspec.json.encode(body), timeout)
        except Overloaded as error:
            raise Unreachable(str(error)) from None
        except RemoteError as error:
            raise DataError(str(error)) from None

    def close(self) -> None:
        """Nothing is held between two requests."""


class ServedStates(VllmServer):
    """Hidden states of a server with the pooling runner."""

    def __init__(self, url: str, config: TeacherConfig, dtype: torch.dtype, hidden_size: int) -> None:
        """Raises ConfigError when the server gives no hidden states, and what VllmServer raises."""
        super().__init__(url, config)
        self._dtype, self._hidden_size = dtype, hidden_size
        try:
            self.read([Item(np.zeros(2, np.int32), 1)])
        except DataError as error:
            raise ConfigError(
                f"{url} gives no hidden states of this model ({error}): start it with {POOLING_FLAGS}"
            ) from error

    def read(self, items: Sequence[Item]) -> torch.Tensor:
        """See `LocalStates.read`."""
        body = {
            "model": self.model,
            "input": [item.token_ids_L.tolist() for item in items],
            "task": "token_embed",
            "use_activation": False,
            "encoding_format": "bytes_only",
            "embed_dtype": str(self._dtype).removeprefix("torch."),
            "endianness": "little",
        }
        answer = self.call("/pooling", body)
        lengths = [len(item.token_ids_L) for item in items]
        row = self._hidden_size * self._dtype.itemsize
        if len(answer) != sum(lengths) * row:
            raise DataError(
                f"{sum(lengths)} tokens of {row} bytes were expected, {len(answer)} bytes came back: the "
                "server computes another model, or leaves tokens out"
            )
        states = torch.frombuffer(answer, dtype=self._dtype).view(-1, self._hidden_size)
        parts = [
            part_LH[item.first - 1 : -1] for item, part_LH in zip(items, states.split(lengths), strict=True)
        ]
        return torch.cat(parts)


class ServedCompletions(VllmServer):
    """Completions by a server with the generate runner."""

    def __init__(self, url: str, config: TeacherConfig, without_token: Sequence[int] = ()) -> None:
        """`without_token`: rows of the model that are never sampled. Raises what VllmServer raises."""
        super().__init__(url, config)
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
        choice = msgspec.json.decode(self.call("/v1/completions", body, seconds))["choices"][0]
        if not (ids := choice.get("token_ids")):
            raise DataError("the server returns no token_ids: vLLM >= 0.11 does")
        return np.array(ids, np.int32), choice["finish_reason"] == "stop"
