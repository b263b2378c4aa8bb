"""Which objective is minimised, and what it needs from the teacher. Formulas and sources: docs/objectives.md.

No torch here: the controller and the preflight read these too. The table `divergences.DIVERGENCES` shows what
an objective consists of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sync.base.own_code import typed
from sync.base.settings import Settings
from sync.wire import Want

Cap = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=True)] | None,
    AfterValidator(lambda cap: None if cap == math.inf else cap),
]
"""TOML has no None: inf is another way to write it."""


class TaskReward(Settings):
    """A task's reward, beside a divergence (L = L_task + λ·L_KL) or alone: policy gradient on the sampled
    tokens.

        L_task = −Σ_t w_t · min(ρ_t, c)·A_t · log p(y_t),     A = (R − b)/s
    """

    baseline: Literal["batch", "group"] = "batch"
    """b, what a reward is compared with: the mean reward of the step's rollouts, or that of the completions
    of the same prompt (rollout.per_prompt of them, at least 2), which are then trained on together."""
    scale: Literal["none", "std"] = "none"
    """s. none: 1; std: the standard deviation of the rewards that b is the mean of. Where these are all equal
    nothing is learned from them."""
    average: Literal["tokens", "rollouts"] = "tokens"
    """w. tokens: every supervised token of rollouts with a reward counts the same. rollouts: every such
    rollout does, so that a token of a short one counts more."""
    rho_cap: Cap = 5.0
    """Cap c of the importance weight min(ρ, c) of L_task, ρ = p(y)/μ(y); inf: uncapped."""
    clip: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0)]] | None = None
    """[low, high]: in the place of min(ρ, c)·A·log p the clipped ratio min(ρ'·A, clip(ρ', 1 − low,
    1 + high)·A) with ρ' = min(ρ, c), which the gradient goes through: a token that has moved so far already
    gives none. None: no clipping."""

    @model_validator(mode="after")
    def _check(self) -> TaskReward:
        if self.clip is not None and self.rho_cap is not None and self.rho_cap <= 1 + self.clip[1]:
            raise ValueError(
                f"rho_cap is {self.rho_cap:g} and clip {list(self.clip)}: the cap must lie above "
                f"1 + {self.clip[1]:g}; raise it, or leave clip out"
            )
        return self


class Mixing(Settings):
    """Fields of every objective: what it is mixed with, and which tokens count."""

    coefficient: float = Field(1.0, gt=0)
    """λ: weight of the divergence from the teacher, against a `task` of weight 1."""
    teacher_coefficients: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Teacher's name → a further factor of λ for the samples it scores; teachers not named: 1."""
    task: TaskReward | None = None
    """None: the divergence alone."""
    on_policy: float = Field(1.0, ge=0, le=1)
    """Share of the rollouts that the student generates. The teacher generates the others (with engine "vllm":
    its generate_url), and they are learned by cross-entropy."""
    teacher_temperature: Literal["one", "rollout"] = "one"
    """Temperature of the teacher's distribution; the student's is taken at rollout.temperature. one: the
    teacher's own distribution, which the student then matches when it is sampled at rollout.temperature.
    rollout: the same for both, so that the optimum is the teacher itself; an engine of your own must list
    "temperature"."""
    max_supervised_tokens: int | None = Field(None, ge=1)
    """Completion tokens of a rollout that are trained on, from its beginning; those of environments do not
    count. None: all are."""


class Rewards(Settings):
    """The task's reward alone: no teacher.

    What the other objectives say of a teacher has one value here, and is no key.
    """

    type: Literal["rewards"] = "rewards"
    task: TaskReward = TaskReward()
    """How the reward is learned."""
    max_supervised_tokens: int | None = Field(None, ge=1)
    """As of the other objectives: completion tokens of a rollout that are trained on."""
    coefficient: ClassVar[float] = 0.0
    teacher_coefficients: ClassVar[Mapping[str, float]] = {}
    on_policy: ClassVar[float] = 1.0
    teacher_temperature: ClassVar[Literal["one", "rollout"]] = "rollout"


class FurtherTerms(Mixing):
    """Fields of reverse divergences that further terms may be added to."""

    forward: float = Field(0.0, ge=0)
    """φ: weight of a forward KL(q‖p) beside the reverse one. Its gradient, p − q, does not vanish where the
    student has nearly lost a token that the teacher keeps."""
    ends: float = Field(0.0, ge=0)
    """η: weight of ½·Q·(log P − log Q)² beside them, P and Q the mass of student and teacher on the ids that
    end a completion; linear beyond 3 nats. Its gradient grows with what the student has lost of them."""


class Auto(FurtherTerms):
    """`full` where every teacher's engine gives hidden states and a step of them is small, else `topk`.

    Resolved before anything starts; the choice is printed with its arithmetic.
    """

    type: Literal["auto"] = "auto"
    forward: float = Field(1.0, ge=0)
    """φ, as of `full` and `topk`, whose default is 0."""
    ends: float = Field(4.0, ge=0)
    """η, as of `full` and `topk`, whose default is 0: with it a real student does not unlearn to end its
    completions."""


class PolicyGradientTerms(Mixing):
    """Fields of every objective that corrects for stale samples."""

    rho_cap: Cap = 5.0
    """Cap c of the importance weight min(ρ, c), ρ = p(y)/μ(y); inf: uncapped."""
    drop_rho_outside: tuple[float, float] | None = None
    """Tokens whose ρ is outside [low, high] give no gradient (they stay in the denominator). None: all give
    theirs."""
    discount: float = Field(0.0, ge=0, lt=1)
    """γ: how much of the later tokens' d = log p − log q is credited to a token, each times the min(ρ, c) of
    all tokens up to its own; 0: immediate credit."""


class Sampled(PolicyGradientTerms):
    """Reverse KL by policy gradient on the sampled token."""

    type: Literal["sampled"] = "sampled"


class TopK(PolicyGradientTerms, FurtherTerms):
    """Unbiased hybrid: exact on the teacher's top-k, policy gradient outside."""

    type: Literal["topk"] = "topk"
    k: int = Field(64, ge=1)
    """Ids per position that the teacher returns."""


class StudentTopK(PolicyGradientTerms):
    """The hybrid on the student's top-k at sampling time, scored by the teacher at those ids."""

    type: Literal["student_topk"] = "student_topk"
    k: int = Field(64, ge=1)
    """Ids per position that the replica returns and the teacher scores."""


class ForwardTopK(Mixing):
    """Forward KL on the teacher's top-k and one bucket for the rest."""

    type: Literal["forward_topk"] = "forward_topk"
    k: int = Field(64, ge=1)
    """Ids per position that the teacher returns."""


class Full(FurtherTerms):
    """Exact reverse KL over the full vocabulary, from the teacher's hidden states and head."""

    type: Literal["full"] = "full"


class JSD(Mixing):
    """Generalised Jensen-Shannon divergence over the full vocabulary, optionally skewed."""

    type: Literal["jsd"] = "jsd"
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture."""


class SkewReverse(Mixing):
    """Reverse KL against the mixture (1 − alpha)·q + alpha·p over the full vocabulary."""

    type: Literal["skew"] = "skew"
    alpha: float = Field(0.1, ge=0, lt=1)
    """Weight of the student in the mixture."""


class SFT(PolicyGradientTerms):
    """Cross-entropy on the teacher's own samples: cold start and baseline. Samples of the student, if any,
    are learned as by `sampled`."""

    type: Literal["sft"] = "sft"
    on_policy: float = Field(0.0, ge=0, le=1)
    """Share of the rollouts that the student generates; 0: none."""


class Own(Mixing):
    """An objective of your own: `type = "package.module:function"` names it, or the name that an installed
    package registers (docs/extending.md)."""

    group: ClassVar = "distill.objectives"
    type: Literal["own"]
    name: str
    """Filled in from `type`: a function with the protocol of `divergences.Objective`."""
    needs: Literal["sampled", "topk", "student_topk", "full"] = "sampled"
    """What the teacher sends and `Targets` holds: as for the objective of that type."""
    k: int = Field(64, ge=1)
    """Ids per position, where `needs` is "topk" or "student_topk"."""
    options: dict[str, Any] = {}
    """Further keyword arguments of the function."""


_Objectives = (
    Auto | Rewards | Sampled | TopK | StudentTopK | ForwardTopK | Full | JSD | SkewReverse | SFT | Own
)


def _typed(table: Any) -> Any:
    return typed(get_args(_Objectives), {"type": "auto", **table}) if isinstance(table, dict) else table


ObjectiveConfig = Annotated[_Objectives, Field(discriminator="type"), BeforeValidator(_typed)]
"""A table without `type` is `Auto`."""


def teacher_temperature(objective: ObjectiveConfig, rollouts: float) -> float:
    """Temperature at which q is taken where the rollouts are sampled at temperature `rollouts`."""
    return rollouts if objective.teacher_temperature == "rollout" else 1.0


def needs(objective: ObjectiveConfig, rollouts: float = 1.0) -> Want:
    """What is requested from the teacher at each completion position; `rollouts`: their temperature.

    `student_topk` needs no more: it is scored at ids that the request carries (ScoreSequence.gather_ids).
    """
    assert not isinstance(objective, Auto), "the launcher resolves it before anything starts"
    temperature = teacher_temperature(objective, rollouts)
    kind, k = _scores(objective)
    if kind == "rewards":
        return Want()
    if kind in ("full", "jsd", "skew"):
        return Want(hidden=True, temperature=temperature)
    return Want(topk=k if kind in ("topk", "forward_topk") else 0, entropy=True, temperature=temperature)


def student_topk(objective: ObjectiveConfig) -> int:
    """Ids per position that the rollout engine returns (Sampling.student_topk); 0: none."""
    kind, k = _scores(objective)
    return k if kind == "student_topk" else 0


def estimated(objective: ObjectiveConfig) -> bool:
    """Whether the divergence is estimated at the sampled token: it is then that of the distributions within
    the token's sampling mask. The others are of the whole vocabulary, or of the teacher's most likely ids."""
    return _scores(objective)[0] in ("sampled", "student_topk", "sft")


def _scores(objective: ObjectiveConfig) -> tuple[str, int]:
    """The type of objective with the same scores, and its k (0: it has none)."""
    kind: str = objective.needs if isinstance(objective, Own) else objective.type
    return kind, getattr(objective, "k", 0)
