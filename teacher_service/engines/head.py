"""A model's output head, found and verified, and the scores computed through it in chunks.

logits = cap(scale · (hidden · weightᵀ + bias)), with rows beyond the tokenizer's vocabulary cut off.

Letters in shapes: C scored positions, c of one chunk, K ids per position, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sync.errors import ConfigError
from teacher_service.engines.base import ScoreOptions


@dataclass(frozen=True)
class OutputHead:
    """The pieces of the head, on the device where it is applied."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """float32 [C, V]; products are accumulated and kept in float32 whatever the model's dtype."""
        weight_HV = self.weight_VH.T
        if hidden_CH.is_cuda and weight_HV.dtype in (torch.bfloat16, torch.float16):
            logits_CV = torch.mm(hidden_CH, weight_HV, out_dtype=torch.float32)
        else:
            logits_CV = hidden_CH.float() @ weight_HV.float()
        if self.bias_V is not None:
            logits_CV += self.bias_V
        if self.scale != 1.0:
            logits_CV *= self.scale
        if self.soft_cap is not None:
            logits_CV = logits_CV.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits_CV


# --- finding the head -------------------------------------------------------------------------------------


def find_head(model: Any, vocab_size: int) -> OutputHead:
    """The head of a causal language model of transformers, cut to `vocab_size` rows.

    Its scale is measured against the model's own logits and then taken exactly from the model's config.
    Raises ConfigError when the model's logits are not reproduced.
    """
    linear = model.get_output_embeddings()
    if linear is None or not hasattr(linear, "weight"):
        raise ConfigError(
            f"{type(model).__name__} has no output embedding: the transformers engine needs a causal "
            'language model with a linear head; use engine = "vllm" for this one'
        )
    config = model.config.get_text_config()
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "output_logit_soft_cap"))
    cap = next((float(value) for value in caps if value is not None), None)
    bias = getattr(linear, "bias", None)
    plain = OutputHead(linear.weight.detach(), None if bias is None else bias.detach())
    hidden_CH, expected_CV = _probe(model, min(vocab_size, linear.weight.shape[0]))
    scale = _scale(plain.logits(hidden_CH), expected_CV, cap, config)
    head = OutputHead(plain.weight_VH, plain.bias_V, scale, cap)
    _verify(head.logits(hidden_CH), expected_CV, type(model).__name__, linear.weight.dtype)
    keep = slice(0, vocab_size)
    weight_VH = plain.weight_VH[keep]
    if not weight_VH.is_cuda:
        weight_VH = weight_VH.float()  # no mixed-precision product on CPUs: convert once, not per chunk
    bias_V = None if plain.bias_V is None else plain.bias_V[keep].float()
    return OutputHead(weight_VH, bias_V, scale, cap)


@torch.inference_mode()
def _probe(model: Any, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [c, H] of a few arbitrary tokens, and the model's own logits [c, V] of the same."""
    length = 16
    ids = (torch.arange(length, device=model.device) * 7919 + 13) % vocab_size
    hidden = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    return hidden, model(input_ids=ids[None], use_cache=False).logits[0].float()


def _scale(raw_CV: torch.Tensor, expected_CV: torch.Tensor, cap: float | None, config: Any) -> float:
    """The config's factor (or its inverse) that is nearest to the measured one; 1.0 when none is nearer."""
    linear_CV = expected_CV if cap is None else torch.atanh((expected_CV / cap).clamp(-0.999, 0.999)) * cap
    measured = float((linear_CV * raw_CV).sum() / (raw_CV * raw_CV).sum().clamp_min(1e-30))
    candidates = {1.0}
    for name, value in config.to_dict().items():
        named = any(part in name for part in ("logit", "lm_head", "multiplier"))
        if named and isinstance(value, int | float) and value:
            candidates |= {float(value), 1.0 / float(value)}
    if base := getattr(config, "dim_model_base", None):
        candidates.add(base / config.hidden_size)
    return min(candidates, key=lambda value: abs(value - measured))


def _verify(ours_CV: torch.Tensor, expected_CV: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """Raise ConfigError unless both give the same logits within the rounding of `dtype`."""
    worst = float((ours_CV - expected_CV).abs().max())
    largest = float(expected_CV.abs().max())
    allowed = (1e-4 if dtype == torch.float32 else 2.0**-5) * max(1.0, largest)
    if not worst <= allowed:
        raise ConfigError(
            f"the head of {name} is not reproduced: logits differ by {worst:.3g}, allowed {allowed:.3g}; "
            'heads may be linear with bias, scale and soft cap; use engine = "vllm" for this one'
        )


# --- scores -----------------------------------------------------------------------------------------------


def score_hidden(
    head: OutputHead,
    hidden_CH: torch.Tensor,
    targets_C: torch.Tensor,
    wanted_CK: torch.Tensor | None,
    options: ScoreOptions,
    chunk: int,
) -> dict[str, torch.Tensor]:
    """All scores except hidden states, under the names of `EngineScores`, on the device of `hidden_CH`.

    At most `chunk` rows of logits exist at once.
    """
    parts = []
    for rows in (slice(first, first + chunk) for first in range(0, len(targets_C), chunk)):
        wanted_cK = None if wanted_CK is None else wanted_CK[rows]
        logits_cV = head.logits(hidden_CH[rows])
        if options.temperature != 1.0:
            logits_cV /= options.temperature
        parts.append(_scores_of(logits_cV, targets_C[rows], wanted_cK, options))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _scores_of(
    logits_cV: torch.Tensor, targets_c: torch.Tensor, wanted_cK: torch.Tensor | None, options: ScoreOptions
) -> dict[str, torch.Tensor]:
    """Scores of one chunk from its float32 logits, which are overwritten."""
    norm_c = logits_cV.logsumexp(1)
    scores = {"logprob_C": logits_cV.gather(1, targets_c[:, None])[:, 0] - norm_c}
    if options.topk:
        top_cK, ids_cK = logits_cV.topk(options.topk, dim=1)
        logp_cK = top_cK - norm_c[:, None]
        scores["topk_ids_CK"] = ids_cK.int()
        scores["topk_logprob_CK"] = logp_cK
        scores["tail_C"] = (1 - logp_cK.exp().sum(1)).clamp(0, 1)
    if wanted_cK is not None:
        found_cK = logits_cV.gather(1, wanted_cK.clamp_min(0)) - norm_c[:, None]
        scores["gathered_CK"] = found_cK.masked_fill(wanted_cK < 0, 0.0)
    if options.entropy:
        logp_cV = logits_cV.sub_(norm_c[:, None])
        scores["entropy_C"] = -(logp_cV.exp() * logp_cV).sum(1)
    return scores
