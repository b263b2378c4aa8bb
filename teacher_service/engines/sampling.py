"""Completions sampled from a causal language model of transformers, with a key-value cache.

`grow` is the decoding loop; its caller says how a token is drawn. `generate` draws each row from a seed of
its own, so that a completion does not depend on the rest of its batch (beyond the rounding of padded ones).

Letters in shapes: B prompts of a batch, N tokens of one step, L padded length with completion, S steps,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from teacher_service.engines.base import EngineCompletion, EnginePrompt, GenerationParams, Steps

Draw = Callable[[Tensor], Tensor]
"""float32 logits [B, V] of the next token → int64 [B, 1], the token drawn."""


class Sampled(NamedTuple):
    """Completions of one batch, left-padded."""

    tokens_BL: Tensor
    attended_BL: Tensor
    """1 on prompt and completion, 0 on padding."""
    completion_BL: Tensor
    """True on completion tokens."""


def grow(
    model: Any, vocab: int, prompts: Sequence[Sequence[int]], ends: Sequence[int], steps: int, draw: Draw
) -> Iterator[Sampled]:
    """The batch after each token, until every completion has ended or has `steps` tokens.

    `ends`: ids that end a completion, the ending one is part of it. `vocab`: rows of the model that may be
    drawn.
    """
    tokens_BL, attended_BL = _left_padded(prompts, model.device)
    start, step_BN = tokens_BL.shape[1], tokens_BL
    going_B = torch.ones(len(prompts), dtype=torch.bool, device=model.device)
    end_ids = torch.tensor(list(ends), dtype=torch.int64, device=model.device)
    cache = None
    for _ in range(steps):
        positions_BN = (attended_BL.cumsum(1) - 1).clamp_min(0)[:, -step_BN.shape[1] :]
        out = model(
            input_ids=step_BN,
            attention_mask=attended_BL,
            position_ids=positions_BN,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        step_BN = draw(out.logits[:, -1, :vocab].float())
        tokens_BL = torch.cat([tokens_BL, step_BN], 1)
        attended_BL = torch.cat([attended_BL, going_B[:, None].long()], 1)
        completion_BL = attended_BL.bool()
        completion_BL[:, :start] = False
        yield Sampled(tokens_BL, attended_BL, completion_BL)
        going_B = going_B & ~torch.isin(step_BN[:, 0], end_ids)
        if not going_B.any():
            return


def _left_padded(prompts: Sequence[Sequence[int]], device: Any) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    rows = [[0] * (width - len(row)) + list(row) for row in prompts]
    attended = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
    return torch.tensor(rows, device=device), torch.tensor(attended, device=device)


def completions(sampled: Sampled) -> list[list[int]]:
    """Token ids of each completion, its end token included."""
    rows = zip(sampled.tokens_BL, sampled.completion_BL, strict=True)
    return [tokens_L[completion_L].tolist() for tokens_L, completion_L in rows]


def generate(
    model: Any, vocab: int, prompts: Sequence[EnginePrompt], params: GenerationParams, ends: Sequence[int]
) -> Steps:
    """See `Engine.generate`; `ends`: the model's own stop ids and those of `params`.

    Draws by inverting each row's cumulative distribution at random numbers from its seed.
    """
    count, logprobs = params.max_tokens, list[Tensor]()  # of every step, float32 [B]
    rows = [np.random.default_rng(prompt.seed).random(count, dtype=np.float32) for prompt in prompts]
    numbers_BS = torch.from_numpy(np.stack(rows)).to(model.device)

    def draw(logits_BV: Tensor) -> Tensor:
        logp_BV = (logits_BV / params.temperature).log_softmax(-1)
        token_B1 = inverse(logp_BV.exp().cumsum(-1), numbers_BS[:, len(logprobs), None])
        logprobs.append(logp_BV.gather(1, token_B1)[:, 0])
        return token_B1

    ids = [prompt.token_ids_P.tolist() for prompt in prompts]
    steps = grow(model, vocab, ids, ends, count, draw)
    inference = torch.inference_mode()  # not around a yield: what runs between two steps has its own mode
    while (sampled := inference(next)(steps, None)) is not None:
        last = sampled
        yield None
    logprob_BS = torch.stack(logprobs, 1).cpu().numpy()
    yield [
        EngineCompletion(np.array(ids, np.int32), logprob_S[: len(ids)], ids[-1] in ends)
        for ids, logprob_S in zip(completions(last), logprob_BS, strict=True)
    ]


def inverse(sum_BV: Tensor, number_B1: Tensor) -> Tensor:
    """The first id whose cumulative probability is above each number's share of the row's sum.

    An id that adds nothing to the sum is never drawn, whatever the number in [0, 1]: 1 gives the last one
    that does.
    """
    total_B1 = sum_BV[:, -1:]
    share_B1 = torch.minimum(number_B1 * total_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
    return torch.searchsorted(sum_BV, share_B1, right=True).clamp_max(sum_BV.shape[1] - 1)  # NaN: the last
