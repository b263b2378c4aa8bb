"""An objective of the user's: a function with the protocol of every divergence; its result is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from student_trainer.objectives.config import Own
from sync.base.errors import DataError
from sync.base.own_code import load_function, own_code

if TYPE_CHECKING:
    from torch import Tensor

    from student_trainer.objectives.divergences import Objective, Targets, Terms


def own_objective(objective: Own) -> Objective:
    """The function, called as function(live log p [N, V], Targets, **options).

    Raises ConfigError when it cannot be loaded. What is returned raises DataError when the function fails or
    gives something else than a loss with gradient and `reverse_kl`, both [N].
    """
    field = f"objective.type = {objective.name!r}"
    function = load_function(objective.name, "objective.type")

    def checked(logp_NV: Tensor, targets: Targets) -> Terms:
        count = targets.token_N.shape[0]
        with own_code(field, f"{count} tokens", "mend the function, or its objective.options"):
            loss_N, stats = function(logp_NV, targets, **objective.options)
            shapes = {"loss": tuple(loss_N.shape)} | {name: tuple(v.shape) for name, v in stats.items()}
            follows = bool(loss_N.requires_grad)
        if shapes != {"loss": (count,), "reverse_kl": (count,)} or not follows:
            raise DataError(
                f"{field} returned {shapes} for {count} tokens, the loss {'with' if follows else 'without'} "
                'gradient: it must return (loss, {"reverse_kl": values}), both of shape [tokens], the loss '
                "with gradient"
            )
        return loss_N, {"reverse_kl": stats["reverse_kl"].detach()}

    return checked
