"""[evaluation]: when the student is evaluated, and on what."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from distill.config.prompts import SinglePrompts
from sync.base.settings import Content, Live, Name, Placement, Settings

Metric = Literal["reverse_kl", "pass_rate", "reward"]
HELD_OUT: Final = "held_out"
"""Name of the held-out prompts among the sets of an evaluation."""


class EvaluationSet(Settings):
    """[evaluation.sets.NAME]: task quality on prompts of any source, which must have rewards."""

    source: SinglePrompts
    """The prompts, as in [prompts]; of a task, its held-out ones."""
    every: int | None = Field(None, ge=0)
    """Optimizer steps between evaluations, a multiple of `evaluation.every`; None: with every evaluation; 0:
    only before and after the run."""
    prompts: int | None = Field(None, ge=1)
    """Most prompts, the first ones; None: all of a file or dataset, 512 of a task."""
    completions: int = Field(1, ge=1)
    """k of avg@k and maj@k: completions of each prompt."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of a completion; None: `rollout.max_tokens`."""
    temperature: float = Field(1.0, ge=0.001, le=2)
    """Sampling temperature, at most what vLLM takes."""
    top_k: int = Field(0, ge=0)
    """Most likely tokens that are sampled from; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Share of the probability mass that is sampled from."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Least probability of a token that is sampled, as a share of the most likely one's."""


class EvaluationConfig(Settings):
    """[evaluation]: reverse KL, and the pass rate where there is a reward, on held-out prompts.

    At most a tenth of a file's or dataset's prompts is held out. `evaluation = false` above all sections:
    none.
    """

    every: Live[int] = Field(0, ge=0)
    """Optimizer steps between evaluations; 0: only before and after the run."""
    prompts: Content[int] = Field(512, ge=1)
    """Held-out prompts, never trained on."""
    sets: Live[dict[Name, EvaluationSet]] = {}
    """Named sets beside the held-out prompts, such as [evaluation.sets.gsm8k]."""
    batch_tokens: Live[int] = Field(16384, ge=1)
    """Padded tokens of one forward pass of the student."""
    metric: Live[Literal["auto", "reverse_kl", "pass_rate", "reward"]] = "auto"
    """Metric on the held-out prompts that decides which version is the best; reward: its mean. auto: reward
    where there is no teacher, or the divergence from it weighs next to nothing against a task's, else
    reverse_kl."""
    patience: Live[int | None] = Field(None, ge=1)
    """Early stopping: consecutive evaluations without a new best version; None: never stop early."""
    replica: Live[Placement | None] = None
    """Where a replica that generates for evaluations alone runs; None: one of the student's is held at the
    version until it has generated the completions."""
    placement: Live[Placement] = Placement()
    """Where the evaluator runs."""
    device: Live[Literal["auto", "cpu", "cuda"]] = "auto"
    """auto: a GPU where there is one."""

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        for name, evaluation_set in self.sets.items():
            if name == HELD_OUT:
                raise ValueError(
                    f"sets.{name}: not a name of a set: {HELD_OUT!r} stands for the held-out prompts"
                )
            if evaluation_set.every and (self.every == 0 or evaluation_set.every % self.every):
                raise ValueError(
                    f"sets.{name}.every is {evaluation_set.every} and evaluations come every {self.every} "
                    "steps: give a multiple of evaluation.every (0 there means only before and after the run)"
                )
        return self
