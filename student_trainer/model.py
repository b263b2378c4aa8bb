"""The student: a transformers model whose head is applied in chunks, ready for DeepSpeed ZeRO-3.

Letters: R rows, L longest row, C completion tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from student_trainer.head import HeadShape, HeadWeights, Loss, chunked_loss, log_probs, project, token_logp
from student_trainer.objectives.targets import Targets, future_credit
from sync.errors import ConfigError

log = logging.getLogger(__name__)


class Head(nn.Module):
    """The model's output layer under another forward: it shares the very parameters, tied or not.

    Being a module, DeepSpeed's hooks gather its weight when it runs, as for any other.
    """

    def __init__(self, layer: Any, shape: HeadShape, chunk: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = layer.weight
        self.bias: nn.Parameter | None = getattr(layer, "bias", None)
        self.shape = shape
        self.chunk = chunk

    def forward(self, hidden_CH: Tensor, targets: Targets | None, loss: Loss | None) -> Any:
        """Loss sum and statistics (see head.chunked_loss); without targets, the raw projection [C, V]."""
        head = HeadWeights(self.weight, self.bias, self.shape)
        if targets is None or loss is None:
            return project(hidden_CH, self.weight, self.bias)
        if loss.discount is not None and targets.row_N is not None:
            logp_C = token_logp(hidden_CH.detach(), head, targets.token_N, self.chunk)
            factor_C = loss.discount.factor(logp_C, targets)
            future_C = future_credit(logp_C - targets.teacher_logp_N, factor_C, targets.row_N)
            targets = replace(targets, future_N=future_C)
        return chunked_loss(hidden_CH, head, targets, loss, self.chunk)


class Student(nn.Module):
    """Hidden states of the model, then the loss in chunks."""

    def __init__(self, model: nn.Module, shape: HeadShape, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.head = Head(plain(model).get_output_embeddings(), shape, chunk)

    def forward(
        self,
        tokens_RL: Tensor,
        positions_C: Tensor,
        targets: Targets | None = None,
        loss: Loss | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss sum over the C positions and statistics (see head.chunked_loss).

        Without targets: log p [C, V] at temperature 1, ours and the model's own, for `check_head`.
        """
        base = plain(self.model).base_model
        hidden_RLH = base(input_ids=tokens_RL, use_cache=False).last_hidden_state
        hidden_CH = hidden_RLH.flatten(0, 1).index_select(0, positions_C)
        if targets is not None:
            total, stats = self.head(hidden_CH, targets, loss)
            return total, stats
        shape = replace(self.head.shape, temperature=1.0)
        theirs_RLV = self.model(input_ids=tokens_RL, use_cache=False).logits
        theirs_CV = theirs_RLV.flatten(0, 1).index_select(0, positions_C)[:, : shape.vocab]
        ours_CV = log_probs(self.head(hidden_CH, None, None)[:, : shape.vocab], shape)
        return ours_CV, theirs_CV.float().log_softmax(1)


def plain(model: nn.Module) -> Any:
    """The transformers model inside, without peft's wrapping."""
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


def head_shape(config: Any, vocab: int, temperature: float) -> HeadShape:
    """How this family of models turns its head's output into logits, from its transformers configuration."""
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    return HeadShape(
        vocab=vocab,
        scale=float(scale) if scale is not None else 1.0 / float(divisor) if divisor else 1.0,
        soft_cap=getattr(config, "final_logit_softcapping", None),
        temperature=temperature,
    )


@torch.no_grad()
def check_head(student: Student, run: nn.Module, device: torch.device) -> float:
    """Largest difference in nats between our log-probabilities and the model's own on 12 tokens.

    `run` is what to call in the student's place: the student itself, or the engine that wraps it.
    Raises ConfigError when it is more than the model's precision explains: then the family's head does
    something that `head_shape` does not know, and every objective would be wrong.
    """
    tokens_RL = torch.arange(12, device=device).remainder(student.head.shape.vocab).reshape(1, 12)
    run.eval()
    ours_CV, theirs_CV = run(tokens_RL, torch.arange(12, device=device))
    run.train()
    difference = float((ours_CV - theirs_CV).abs().max())
    precise = student.head.weight.dtype == torch.float32
    limit = 1e-4 if precise else 2.0**-6 * max(1.0, float(theirs_CV.abs().max()))
    if not difference <= limit:
        raise ConfigError(
            f"{type(plain(student.model)).__name__}: our head differs from the model's own logits by "
            f"{difference:.3g} nats (limit {limit:.3g}): this model family's head is not supported"
        )
    log.info("head agrees with the model's own logits to %.2g nats", difference)
    return difference
