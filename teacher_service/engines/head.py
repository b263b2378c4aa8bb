"""A model's output head, found and verified, and the scores computed through it in chunks.

Letters in shapes: C scored positions, c of one chunk, K ids per position, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from sync.base.errors import ConfigError
from sync.wire.head import HeadShape, OutputHead, probabilities, soft_cap_of, to_numpy
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import EngineScores, Item, ScoreOptions

CPU_ROWS: Final = 256
"""Rows of logits at once on a CPU, at most: more leave its caches."""
CPU_COLUMNS: Final = 4096
"""Columns of logits that are summed at once on a CPU: more leave its nearest cache."""
BLOCK: Final = 8
"""Columns of a row of which only the largest is compared first, on a CPU."""


def load_head(
    config: TeacherConfig, vocab_size: int, device: torch.device
) -> tuple[OutputHead, torch.dtype, int]:
    """The head of the checkpoint at `config.path`, on `device`; precision and rows of the model, of which the
    head has those below `vocab_size`.

    transformers loads the model without its layers: embedding, final norm and head are left, with names, ties
    and precision as in the whole model, and `find_head` verifies the formula on them. Raises ConfigError.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    source = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # every weight of a layer would be reported as unexpected
    try:
        settings = AutoConfig.from_pretrained(config.path, **source)
        text = settings.get_text_config()
        text.num_hidden_layers = 0
        if getattr(text, "layer_types", None):
            text.layer_types = []
        for part in (settings, text):
            vars(part).pop("quantization_config", None)  # the layers'
        model = AutoModelForCausalLM.from_pretrained(
            config.path, config=settings, dtype=config.dtype, **source
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"the output head of {config.path!r} cannot be read: {error}; the checkpoint must be readable "
            "here, also when a server computes"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    head = find_head(model.eval(), vocab_size, device)
    if not head.weight_VH.is_cuda:  # else its pages would be those of the checkpoint's file, which may change
        head = replace(head, weight_VH=head.weight_VH.clone())
    return head, model.dtype, len(model.get_output_embeddings().weight)


def find_head(model: Any, vocab_size: int, device: torch.device | None = None) -> OutputHead:
    """The head of a causal language model of transformers, cut to `vocab_size` rows, on `device` if given.

    Its scale is measured against the model's own logits and then taken exactly from the model's config.
    Raises ConfigError when the model's logits are not reproduced.
    """
    linear = model.get_output_embeddings()
    if linear is None or not hasattr(linear, "weight"):
        raise ConfigError(
            f"{type(model).__name__} has no output embedding: a teacher is a causal language model with a "
            "linear head, choose another"
        )
    config = model.config.get_text_config()
    cap = soft_cap_of(config)
    bias = getattr(linear, "bias", None)
    shape, bias_V = HeadShape(vocab_size), None if bias is None else bias.detach()
    plain = OutputHead(linear.weight.detach(), bias_V, shape)
    hidden_CH, expected_CV = (
        part.to(linear.weight.device) for part in _probe(model, min(vocab_size, linear.weight.shape[0]))
    )
    scale = _scale(plain.logits(hidden_CH), expected_CV, cap, config)
    head = replace(plain, shape=replace(shape, scale=scale, soft_cap=cap))
    worst = float((head.logits(hidden_CH) - expected_CV).abs().max())
    rounding = 1e-4 if linear.weight.dtype == torch.float32 else 2.0**-5
    allowed = rounding * max(1.0, float(expected_CV.abs().max()))
    if not worst <= allowed:
        raise ConfigError(
            f"the head of {type(model).__name__} is not reproduced: logits differ by {worst:.3g}, allowed "
            f"{allowed:.3g}; heads may be linear with bias, scale and soft cap, choose another model"
        )
    return head.placed(device or head.weight_VH.device)


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


@torch.inference_mode()
def score_items(
    head: OutputHead, hidden_CH: torch.Tensor, items: Sequence[Item], options: ScoreOptions, chunk: int
) -> EngineScores:
    """Scores of a batch from the hidden states of its scored positions, item after item, on any device.

    At most `chunk` rows of logits exist at once, on a CPU CPU_ROWS.
    """

    def ids(parts: Sequence[Any]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device, non_blocking=True)

    device = head.weight_VH.device
    hidden_CH = hidden_CH.to(device, non_blocking=True)
    targets_C = ids([item.token_ids_L[item.first :] for item in items])
    gather_CK = ids([item.gather_ids_TK for item in items]) if options.gather else None
    parts, chunk = [], chunk if hidden_CH.is_cuda else min(chunk, CPU_ROWS)
    for rows in (slice(first, first + chunk) for first in range(0, len(targets_C), chunk)):
        logits_cV = head.logits(hidden_CH[rows])
        if options.temperature != 1.0:
            logits_cV /= options.temperature
        gather_cK = None if gather_CK is None else gather_CK[rows]
        parts.append(_scores_of(logits_cV, targets_C[rows], gather_cK, options))
    scores = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if options.hidden:
        scores["hidden_CH"] = hidden_CH
    return EngineScores(**{name: to_numpy(value) for name, value in scores.items()})


def _scores_of(
    logits_cV: torch.Tensor, targets_c: torch.Tensor, gather_cK: torch.Tensor | None, options: ScoreOptions
) -> dict[str, torch.Tensor]:
    """Scores of a chunk but hidden states, by names of `EngineScores`; overwrites its float32 logits."""
    norm_c = log_sum_exp(logits_cV)
    scores = {"logprob_C": logits_cV.gather(1, targets_c[:, None])[:, 0] - norm_c}
    if options.topk:
        top_cK, ids_cK = largest(logits_cV, options.topk)
        scores["topk_ids_CK"] = ids_cK.int()
        scores["topk_logprob_CK"] = top_cK - norm_c[:, None]
    if gather_cK is not None:
        gathered_cK = logits_cV.gather(1, gather_cK.clamp_min(0)) - norm_c[:, None]
        scores["gathered_CK"] = gathered_cK.masked_fill(gather_cK < 0, 0.0)
    if options.entropy:
        logp_cV = logits_cV.sub_(norm_c[:, None])
        scores["entropy_C"] = -torch.linalg.vecdot(probabilities(logp_cV), logp_cV)
    return scores


def log_sum_exp(logits_cV: torch.Tensor) -> torch.Tensor:
    """[c]; on a CPU by parts of a row, at 150,000 columns in a third of a whole row's time."""
    if logits_cV.is_cuda or logits_cV.shape[1] <= CPU_COLUMNS:
        return logits_cV.logsumexp(1)
    return torch.stack([part.logsumexp(1) for part in logits_cV.split(CPU_COLUMNS, 1)]).logsumexp(0)


def largest(values_cV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row [c, k], the largest first, and their places.

    On a CPU a row is cut into blocks; what is among its k largest is in the k blocks of the largest maxima.
    """
    if values_cV.is_cuda:
        top = values_cV.topk(k, dim=1)
        return top.values, top.indices
    columns = values_cV.shape[1]
    blocks = columns // BLOCK
    if blocks <= k:
        candidates_ck = _places(values_cV, k)
    else:
        # column j is of block j % blocks: maxima are taken of long stretches
        maxima_cb = values_cV[:, : blocks * BLOCK].unflatten(1, (BLOCK, blocks)).amax(1)
        first_ck = _places(maxima_cb, k)
        within_cN = (first_ck[:, None] + blocks * torch.arange(BLOCK)[:, None]).flatten(1)
        rest_cR = torch.arange(blocks * BLOCK, columns).expand(len(values_cV), -1)
        within_cN = torch.cat([within_cN, rest_cR], dim=1)
        candidates_ck = within_cN.gather(1, _places(values_cV.gather(1, within_cN), k))
    top_ck, order_ck = values_cV.gather(1, candidates_ck).sort(1, descending=True)
    return top_ck, candidates_ck.gather(1, order_ck)


def _places(values_cV: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k largest values of each row [c, k], in no order; numpy takes half of torch's time."""
    return torch.from_numpy(np.argpartition(values_cV.numpy(), -k, axis=1)[:, -k:])
