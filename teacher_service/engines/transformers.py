"""A teacher in this process: any causal language model of transformers, on a CPU or one CUDA device.

The base model gives last hidden states after the final norm; the head is applied here, in chunks, and only at
scored positions. Attention is causal and padding is on the right, so no mask is needed; with a
variable-length attention kernel sequences are packed and nothing is padded.

Letters in shapes: C scored positions of a batch, K ids per position, H hidden size, V vocabulary.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sync.errors import ConfigError
from sync.wire import Head, pack
from teacher_service.engines.base import (
    CAPABILITIES,
    EngineCompletion,
    EngineInfo,
    EnginePrompt,
    EngineScores,
    GenerationParams,
    Item,
    ScoreOptions,
)
from teacher_service.engines.head import find_head, score_hidden
from teacher_service.engines.packing import hidden_rows, packed_ids, padded_ids, rectangles
from teacher_service.engines.sampling import write

log = logging.getLogger(__name__)
PACKING_ATTENTION = ("flash", "flex")
"""Attention implementations whose cost does not grow with what other sequences share the row."""

PASS_TOKENS = {"cpu": 64, "cuda": 4096}
"""Tokens whose computation takes as long as the fixed part of one more forward pass, roughly."""


class TransformersEngine:
    """Marks sequences with a loaded model. Order of use: construct, then `score` and `head`, then `close`."""

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        *,
        name: str = "model",
        revision: str | None = None,
        max_length: int | None = None,
        batch_tokens: int = 16384,
        head_chunk: int = 1024,
    ) -> None:
        self._model = model.eval()
        self._decoder = model.get_decoder()
        self._head = find_head(model, vocab_size)
        self._batch_tokens, self._head_chunk = batch_tokens, head_chunk
        self.packing = model.config._attn_implementation.startswith(PACKING_ATTENTION)
        """Whether sequences are laid one after the other in one row instead of padded."""
        if self.packing and not self.packs_exactly():
            log.warning(
                "%s lets packed sequences see each other: they are padded instead", type(model).__name__
            )
            self.packing = False
        self.engine_info = EngineInfo(
            model=name,
            revision=revision,
            dtype=str(model.dtype).removeprefix("torch."),
            engine="transformers",
            vocab_size=len(self._head.weight_VH),
            hidden_size=self._head.weight_VH.shape[1],
            max_length=_longest(model.config, max_length),
            can=CAPABILITIES,
        )

    @torch.inference_mode()
    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        """See `Engine.score`."""
        overhead = PASS_TOKENS.get(self._model.device.type, 64)
        groups = rectangles([len(item.token_ids_L) for item in items], self._batch_tokens, overhead)
        order = [i for group in groups for i in group.rows]
        sorted_items = [items[i] for i in order]
        hidden_CH = torch.cat([self._hidden([items[i] for i in g.rows], g.width) for g in groups])
        scores = score_hidden(
            self._head,
            hidden_CH,
            self._targets(sorted_items),
            self._wanted(sorted_items),
            options,
            self._head_chunk,
        )
        if options.hidden:
            scores["hidden_CH"] = hidden_CH
        back = _original_order(items, order)
        return EngineScores(**{name: _to_numpy(value)[back] for name, value in scores.items()})

    def packs_exactly(self) -> bool:
        """Whether the hidden states of a packed sequence are those that it has alone."""
        ids = np.arange(24, dtype=np.int32) % self._head.weight_VH.shape[0]
        items = [Item(ids[:9], 1), Item(ids[9:], 1)]
        was, self.packing = self.packing, True
        with torch.inference_mode():
            packed_CH = self._hidden(items, 0)
            alone_CH = torch.cat([self._hidden([item], 0) for item in items])
        self.packing = was
        return bool((packed_CH - alone_CH).abs().max() <= 0.02 * alone_CH.abs().max())

    def _hidden(self, items: list[Item], width: int) -> torch.Tensor:
        """[C, H] hidden states that predict the scored positions of `items`: one forward pass."""
        lengths = np.array([len(item.token_ids_L) for item in items])
        if self.packing:
            ids, positions = packed_ids(items)
            starts = np.cumsum(lengths) - lengths
            extra = {"position_ids": self._tensor(positions)}
        else:
            ids, starts, extra = padded_ids(items, width), np.arange(len(items)) * width, {}
        output = self._decoder(input_ids=self._tensor(ids), use_cache=False, **extra).last_hidden_state
        return output.flatten(0, 1)[self._tensor(hidden_rows(items, starts))]

    def _targets(self, items: list[Item]) -> torch.Tensor:
        return self._tensor(
            np.concatenate([item.token_ids_L[item.first :] for item in items]).astype(np.int64)
        )

    def _wanted(self, items: list[Item]) -> torch.Tensor | None:
        gathers = [item.gather_ids_TK for item in items if item.gather_ids_TK is not None]
        return self._tensor(np.concatenate(gathers).astype(np.int64)) if gathers else None

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)

    def write(
        self, engine_prompts: Sequence[EnginePrompt], generation: GenerationParams
    ) -> Iterator[list[EngineCompletion] | None]:
        """See `Writer.write`."""
        ends = sorted({*_end_ids(self._model), *generation.stop_token_ids})
        return write(self._model, len(self._head.weight_VH), engine_prompts, generation, ends)

    def head(self) -> Head | None:
        """See `Engine.head`."""
        head = self._head
        sent_as = torch.bfloat16 if self._model.dtype == torch.bfloat16 else torch.float32
        weight = _to_numpy(head.weight_VH.to(sent_as))
        return Head(
            teacher=self.engine_info.model,
            weight=_packed(weight),
            bias=None if head.bias_V is None else pack(_to_numpy(head.bias_V)),
            scale=head.scale,
            soft_cap=head.soft_cap,
        )

    def close(self) -> None:
        """See `Engine.close`."""
        del self._model, self._decoder, self._head
        gc.collect()  # modules refer to each other in circles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _end_ids(model: Any) -> list[int]:
    """Ids that end a text, by the folder's generation config, else by the model's config."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return list(ids) if isinstance(ids, list | tuple) else [int(ids)]
    return []


def _longest(config: Any, options: int | None) -> int:
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    if options is not None and own is not None and options > own:
        raise ConfigError(
            f"max_length = {options} is beyond the model's own limit of {own} positions: lower it"
        )
    longest = options or own
    if longest is None:
        raise ConfigError("the model's config names no longest sequence: set max_length for this teacher")
    return int(longest)


def _original_order(items: Sequence[Item], order: list[int]) -> np.ndarray:
    """int64 [C]: where each position of the batch, in the order asked, lies in the order computed."""
    counts = np.array([item.positions for item in items])
    computed = counts[order]
    starts = np.empty_like(counts)
    starts[order] = np.cumsum(computed) - computed
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """bfloat16 as uint16 bits, float16 as float32, anything else as it is."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype == torch.float16:
        tensor = tensor.float()
    return tensor.cpu().numpy()


def _packed(weight: np.ndarray) -> Any:
    return pack(weight, "bf16" if weight.dtype == np.uint16 else "f4")


# --- loading ----------------------------------------------------------------------------------------------


def load(config: Any, vocab_size: int, leave_files: bool = False) -> TransformersEngine:
    """Engine of a TeacherConfig. Raises ConfigError when it cannot be loaded or served.

    `leave_files`: nothing that is written into its folder later changes it. On a CPU, weights loaded in the
    precision of their file are else the file's own memory.
    """
    from transformers import AutoModelForCausalLM

    if config.threads:
        torch.set_num_threads(config.threads)
    device = _device(config.device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
            attn_implementation=config.attention,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"teacher model {config.path!r} cannot be loaded: {error}") from error
    model = model.to(device)
    if leave_files and device.type == "cpu":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return TransformersEngine(
        model,
        vocab_size,
        name=config.path,
        revision=getattr(model.config, "_commit_hash", None) or config.revision,
        max_length=config.max_length,
        batch_tokens=config.batch_tokens,
        head_chunk=config.head_chunk,
    )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device = "cuda", but torch sees no CUDA device here: use "cpu" or "auto"')
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
