"""Call an objective of the user's once, on a few made-up tokens, before anything of a run is started.

    python -m student_trainer.objectives.try_own OBJECTIVE

OBJECTIVE is an `Own` as JSON. Exit status 1, and the problem on stderr, when it cannot be used.
"""

from __future__ import annotations

import sys

import torch

from student_trainer.objectives.config import Own
from student_trainer.objectives.divergences import Targets, own_objective
from sync.base.errors import DataError, DistillError

TOKENS = 6


def try_out(objective: Own) -> None:
    """Raise ConfigError or DataError when the function cannot be used, or its gradient is not finite.

    It is given what `objective.needs` names, of a vocabulary of more than k ids.
    """
    random, vocab = torch.Generator().manual_seed(0), objective.k + 2
    logits_NV = torch.randn(TOKENS, vocab, generator=random, requires_grad=True)
    teacher_NV = torch.randn(TOKENS, vocab, generator=random).log_softmax(1)
    token_N = torch.arange(TOKENS) % vocab
    dense, top = objective.needs == "full", teacher_NV.topk(objective.k, dim=1)
    sparse = objective.needs in ("topk", "student_topk")
    targets = Targets(
        token_N=token_N,
        behavior_logp_N=torch.full((TOKENS,), -1.0),
        teacher_logp_N=teacher_NV.gather(1, token_N.unsqueeze(1)).squeeze(1),
        fresh_N=torch.zeros(TOKENS, dtype=torch.bool),
        support_NK=top.indices if sparse else None,
        support_logp_NK=top.values if sparse else None,
        teacher_logp_NV=teacher_NV if dense else None,
    )
    loss_N, _ = own_objective(objective)(logits_NV.log_softmax(1), targets)
    (grad_NV,) = torch.autograd.grad(loss_N.sum(), logits_NV, allow_unused=True)
    if grad_NV is None or not bool(torch.isfinite(grad_NV).all()):
        raise DataError(
            f"objective.type = {objective.name!r} gave a loss whose gradient in log p is "
            f"{'missing' if grad_NV is None else 'not finite'}: compute it from the first argument"
        )


if __name__ == "__main__":
    try:
        try_out(Own.model_validate_json(sys.argv[1]))
    except DistillError as error:
        sys.exit(f"{error}")
