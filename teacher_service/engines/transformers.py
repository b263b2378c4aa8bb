"""A teacher in this process: any causal language model of transformers, on a CPU or on CUDA devices.

Several devices share the layers (device_map = "auto"): they hold a model that one cannot, and compute one
after the other. Engine "vllm" computes on all at once.

The base model gives last hidden states after the final norm; the head is applied here, in chunks, and only at
scored positions. Attention is causal and padding is on the right, so no mask is needed.

Letters in shapes: L tokens of a sequence, or padded length with completion; B rows and W columns of a forward
pass, N tokens of one decoding step, S steps, C scored positions of a batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sync.base.errors import ConfigError
from sync.wire import Head
from teacher_service.config import CAPABILITIES, TeacherConfig
from teacher_service.engines import base
from teacher_service.engines.base import EngineCompletion, EngineInfo, EngineScores, Item, ScoreOptions
from teacher_service.engines.head import find_head, score_items

PASS_TOKENS: Final = {"cpu": 64, "cuda": 4096}
"""Tokens whose computation takes as long as the fixed part of one more forward pass, roughly."""
PAD_ID: Final = 0
"""Any valid id: padding is on the right and attention is causal, so it changes no scored position."""


class TransformersEngine:
    """Scores and completes with a loaded model; see `Engine`."""

    def __init__(
        self, model: Any, vocab_size: int, config: TeacherConfig = TeacherConfig(path="model")
    ) -> None:
        self._model = model.eval()
        self._decoder = model.get_decoder()
        self._head = find_head(model, vocab_size)
        self._batch_tokens, self._head_chunk = config.batch_tokens, config.head_chunk
        self.engine_info = EngineInfo(
            model=config.path,
            revision=getattr(model.config, "_commit_hash", None) or config.revision,
            dtype=str(model.dtype).removeprefix("torch."),
            engine="transformers",
            vocab_size=len(self._head.weight_VH),
            hidden_size=self._head.weight_VH.shape[1],
            max_length=_max_length(model.config, config.max_length),
            can=CAPABILITIES,
        )

    @torch.inference_mode()
    def score(self, items: Sequence[Item], options: ScoreOptions) -> EngineScores:
        overhead = PASS_TOKENS.get(self._model.device.type, 64)
        groups = rectangles([len(item.token_ids_L) for item in items], self._batch_tokens, overhead)
        hidden_of: dict[int, Tensor] = {}
        for rows in groups:
            ids_BW = torch.from_numpy(padded_ids([items[i] for i in rows]))
            ids_BW = ids_BW.to(self._model.device, non_blocking=True)
            hidden_BWH = self._decoder(input_ids=ids_BW, use_cache=False).last_hidden_state
            for row, i in enumerate(rows):  # the state one place before a token predicts it
                last = len(items[i].token_ids_L) - 1
                hidden_of[i] = hidden_BWH[row, items[i].first - 1 : last].clone()
        hidden_CH = torch.cat([hidden_of[i] for i in range(len(items))])
        return score_items(self._head, hidden_CH, items, options, self._head_chunk)

    def generate(self, prompts: Sequence[base.EnginePrompt], params: base.GenerationParams) -> base.Steps:
        """See `Engine.generate`; sampled with a key-value cache.

        Draws by inverting each row's cumulative distribution at random numbers from the row's own seed, so
        that a completion does not depend on the rest of its batch (beyond the rounding of padded ones).
        """
        model, vocab = self._model, len(self._head.weight_VH)  # `close` may come between two steps
        seeded = [np.random.default_rng(prompt.seed) for prompt in prompts]
        drawn = [numbers.random(params.max_tokens, dtype=np.float32) for numbers in seeded]
        start = max(len(prompt.token_ids_P) for prompt in prompts)
        rows = [np.pad(prompt.token_ids_P, (start - len(prompt.token_ids_P), 0)) for prompt in prompts]
        attended = [np.arange(start) >= start - len(prompt.token_ids_P) for prompt in prompts]
        numbers_BS, step_BN, attended_BL = (
            torch.from_numpy(np.stack(table)).to(model.device) for table in (drawn, rows, attended)
        )
        step_BN, attended_BL = step_BN.long(), attended_BL.long()
        going_B = torch.ones(len(prompts), dtype=torch.bool, device=model.device)
        end_ids = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=model.device)
        tokens, logprobs, cache = list[Tensor](), list[Tensor](), None
        while going_B.any() and len(tokens) < params.max_tokens:
            with torch.inference_mode():  # not around a yield: what runs between two steps has its own mode
                out = model(
                    input_ids=step_BN,
                    attention_mask=attended_BL,
                    position_ids=(attended_BL.cumsum(1) - 1).clamp_min(0)[:, -step_BN.shape[1] :],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                cache = out.past_key_values
                logp_BV = (out.logits[:, -1, :vocab].float() / params.temperature).log_softmax(-1)
                step_BN = inverse(logp_BV.exp().cumsum(-1), numbers_BS[:, len(tokens), None])
                tokens.append(step_BN)
                logprobs.append(logp_BV.gather(1, step_BN))
                attended_BL = torch.cat([attended_BL, going_B[:, None].long()], 1)
                going_B = going_B & ~torch.isin(step_BN[:, 0], end_ids)
            yield None
        token_BS, logprob_BS = (torch.cat(steps, 1).cpu().numpy() for steps in (tokens, logprobs))
        lengths = attended_BL[:, start:].sum(1).tolist()
        completions = zip(token_BS, logprob_BS, lengths, going_B.tolist(), strict=True)
        yield [
            EngineCompletion(token_S[:length].astype(np.int32), logprob_S[:length], not going)
            for token_S, logprob_S, length, going in completions
        ]

    def head(self) -> Head:
        return self._head.message(self._model.dtype)

    def close(self) -> None:
        del self._model, self._decoder, self._head
        gc.collect()  # modules refer to each other in circles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# --- sequences of unequal length in one forward pass ------------------------------------------------------


def rectangles(lengths: Sequence[int], budget: int, overhead: int) -> list[list[int]]:
    """Indices of the sequences of each forward pass, longest first, right-padded to at most `budget` tokens.

    A pass is closed when its padding would pass `overhead`, the tokens that one more forward pass costs. A
    sequence longer than the budget gets a pass of its own.
    """
    result: list[list[int]] = []
    padding = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if result:
            rows, width = result[-1], lengths[result[-1][0]]
            padding += width - lengths[i]
            if padding <= overhead and width * (len(rows) + 1) <= budget:
                rows.append(i)
                continue
        result.append([i])
        padding = 0
    return result


def padded_ids(items: Sequence[Item]) -> np.ndarray:
    """int64 [B, W] token ids, padded on the right to the longest."""
    lengths_B = np.array([len(item.token_ids_L) for item in items])
    ids_BW = np.full((len(items), lengths_B.max()), PAD_ID, np.int64)
    ids_BW[np.arange(ids_BW.shape[1]) < lengths_B[:, None]] = np.concatenate([i.token_ids_L for i in items])
    return ids_BW


def inverse(sum_BV: Tensor, number_B1: Tensor) -> Tensor:
    """The first id whose cumulative probability is above each number's share of the row's sum.

    An id that adds nothing to the sum is never drawn, whatever the number in [0, 1]: 1 gives the last one
    that does.
    """
    total_B1 = sum_BV[:, -1:]
    share_B1 = torch.minimum(number_B1 * total_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
    return torch.searchsorted(sum_BV, share_B1, right=True).clamp_max(sum_BV.shape[1] - 1)  # NaN: the last


# --- the model's own settings, and loading ----------------------------------------------------------------


def _max_length(config: Any, asked: int | None) -> int:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is not None and positions is not None and asked > positions:
        raise ConfigError(
            f"max_length = {asked} is beyond the model's own limit of {positions} positions: lower it"
        )
    if (length := asked or positions) is None:
        raise ConfigError("the model's config names no longest sequence: set max_length for this teacher")
    return int(length)


def load(config: TeacherConfig, vocab_size: int, leave_files: bool = False) -> TransformersEngine:
    """Engine of a TeacherConfig. Raises ConfigError when it cannot be loaded or served.

    `leave_files`: nothing that is written into its folder later changes it. On a CPU, weights loaded in the
    precision of their file are else the file's own memory.
    """
    from transformers import AutoModelForCausalLM

    device = find_device(config.device)
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
            attn_implementation=config.attention,
            device_map="auto" if several else None,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"teacher model {config.path!r} cannot be loaded: {error}") from error
    if several:
        check_fits(config.path, model.hf_device_map)
    else:
        model = model.to(device)
    if leave_files and device.type == "cpu":
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return TransformersEngine(model, vocab_size, config)


def check_fits(path: str, device_map: Mapping[str, Any]) -> None:
    """Raise ConfigError when parts of a model were placed outside of its GPUs, where a pass takes minutes."""
    elsewhere = [part for part, device in device_map.items() if str(device) in ("cpu", "disk")]
    if elsewhere:
        raise ConfigError(
            f"teacher model {path!r} does not fit on its {torch.cuda.device_count()} GPUs: {len(elsewhere)} "
            f"parts such as {elsewhere[0]} are left over; give it more devices, or a smaller dtype"
        )


def find_device(name: str) -> torch.device:
    """The device of a TeacherConfig's `device`, the first of several. Raises ConfigError without CUDA."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError('device = "cuda", but torch sees no CUDA device here: use "cpu" or "auto"')
    return torch.device("cuda" if there and name != "cpu" else "cpu")
