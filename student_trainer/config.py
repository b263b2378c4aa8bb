"""Configuration of the student trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from student_trainer.objectives.config import Full, ObjectiveConfig
from sync.base.address import Url
from sync.base.settings import Content, Fixed, Holds, Live, ModelSource, Settings, WeightsConfig


class LoRAConfig(Settings):
    """Train adapters only, and send adapters only."""

    rank: int = Field(32, ge=1)
    """Rank of the adapters' matrices."""
    alpha: float = Field(64.0, gt=0)
    """The adapters' product is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get an adapter; embeddings and output layer get none."""


class TrainerSettings(Settings):
    """What a user sets in [trainer]."""

    ranks: Live[int] = Field(2, ge=1)
    """Processes on this machine; with `nodes` or `hostfile`, processes on each machine."""
    nodes: Live[int] = Field(1, ge=1)
    """Machines with ranks, which meet through the controller; for machines that it starts by ssh see
    `hostfile`."""
    hostfile: Live[Path | None] = None
    """DeepSpeed hostfile, one `NAME slots=N` a line; None: this machine alone."""
    launcher_args: Live[list[str]] = []
    """Further arguments of the deepspeed launcher: of its `runner` with `hostfile`, else of its `launch`."""
    devices: Live[str | None] = None
    """CUDA_VISIBLE_DEVICES of the trainer; None: inherited."""
    env: Live[dict[str, str]] = {}
    """Environment variables of the ranks; no secrets with `hostfile`."""
    lr: Live[float] = Field(3e-6, gt=0)
    """Learning rate after the warm-up. The only place for it: DeepSpeed's JSON holds no other, and a resume
    takes this one, whatever the checkpoint was trained with."""
    warmup_steps: Live[int] = Field(0, ge=0)
    """Steps in which the rate grows linearly from 0 to `lr`."""
    lr_schedule: Live[Literal["constant", "linear", "cosine"]] = "constant"
    """After the warm-up: `lr`, or down to 0 at run.steps in a line or half a cosine."""
    deepspeed: Annotated[Content[Path], Holds.FILE]
    """DeepSpeed's JSON: optimizer, ZeRO-3, precision, offload and the rest. A field that it would ignore
    is refused."""
    overrides: Content[dict[str, Any]] = {}
    """Fields put over the JSON, table by table: "optimizer.params.eps" = 1e-6 leaves all other params."""
    attention: Live[str] = "sdpa"
    """transformers' attn_implementation."""
    packing: Live[Literal["varlen", "padded"]] = "varlen"
    """How the rows of a micro-batch lie: "varlen" end to end in one sequence, each attending to itself alone;
    "padded" as a rectangle, padded to the longest. Loss and gradients are the same. Models with layers other
    than attention need "padded": the trainer refuses "varlen" for them, and compares packed rows with single
    ones before the first step."""
    activation_checkpointing: Live[bool] = False
    """Recompute activations in the backward pass."""
    head_chunk: Live[int] = Field(512, ge=1)
    """Positions whose full-vocabulary logits are in memory at once."""
    micro_batch_tokens: Live[int] = Field(16384, ge=1)
    """Tokens of one forward pass of one rank, prompts included, and padding with packing = "padded"; a longer
    row gets a pass of its own. Ranks that share rows have as many each, and their rows may be longer by as
    much."""
    checkpoint_every: Live[int] = Field(0, ge=0)
    """Optimizer steps between checkpoints; 0: `checkpoint_minutes` alone decides."""
    checkpoint_minutes: Live[float] = Field(15.0, ge=0)
    """Minutes after which a step ends with a checkpoint, whatever `checkpoint_every` says; 0: never for that
    reason. Another is saved when the run ends or is stopped. What was trained on since the oldest kept
    checkpoint stays on record whole."""
    keep_checkpoints: Live[int] = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    lora: Fixed[LoRAConfig | None] = None
    """None: full fine-tuning."""
    expert_parallel: Fixed[int] = Field(1, ge=1)
    """Ranks that share the experts of a layer, each holding its part whole: tokens travel to their experts,
    and no rank gathers all of them. Divides the ranks and the experts. For students of the families
    qwen3_moe, qwen2_moe, mixtral, olmoe and deepseek_v3, without `lora` and offload; the trainer compares
    every layer with the original before it trains. 1: ZeRO-3 gathers experts like all other weights."""
    sequence_parallel: Live[int] = Field(1, ge=1)
    """Neighbouring ranks that train on the same rows, each computing its part of every row's positions, and
    attention for its part of the heads (DeepSpeed's Ulysses): for rows that are too long for one rank.
    Divides the ranks and the student's attention heads. For attention "sdpa" and "eager", and students that
    see other positions by attention alone; the trainer compares split rows with whole ones before it trains.
    1: every rank has whole rows."""
    threads: Live[int | None] = Field(None, ge=1)
    """Threads of each rank that compute on cores; None: as for the other roles (`student.threads`)."""
    init_timeout_seconds: Live[float] = Field(600.0, gt=0)
    """Time the ranks have to find each other, and rank 0 the controller; later the longest that ranks wait
    for one another."""

    @model_validator(mode="after")
    def _check(self) -> TrainerSettings:
        if self.nodes > 1 and self.hostfile is not None:
            raise ValueError(
                f"nodes is {self.nodes} and hostfile is {self.hostfile}: machines meet through the "
                "controller, or are started by ssh; leave one out"
            )
        return self

    def lr_share(self, step: int, steps: int) -> float:
        """Share of `lr` for the step after n = `step` others, in a run of N = `steps`; W = warmup_steps.

        n < W       n / W
        constant    1
        linear      (N − n) / (N − W)                       transformers' get_linear_schedule_with_warmup
        cosine      (1 + cos(π (n − W) / (N − W))) / 2      get_cosine_schedule_with_warmup
        """
        warmup = self.warmup_steps
        if step < warmup:
            return step / warmup
        if self.lr_schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 1.0 - done if self.lr_schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


class TrainerConfig(Settings):
    """Everything a rank is started with: roles/trainer.json in the run's folder."""

    run: str
    """Name of the run."""
    run_dir: Path
    """Shared by all ranks."""
    controller_url: Url
    """Where batches come from."""
    student: ModelSource
    """What training starts from."""
    objective: ObjectiveConfig = Full()
    """What is optimised."""
    trainer: TrainerSettings
    """The user's settings."""
    weights: WeightsConfig = WeightsConfig()
    """How new versions are published."""
    keep_every: int | None = Field(None, ge=0)
    """With broadcasts: steps between two versions that go to the store too, for evaluations, beside the first
    and the last; 0: those alone. None: nothing goes to the store."""
    steps: int = Field(ge=1)
    """Optimizer steps of the whole run."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the rollouts; the trainer's log-probabilities use the same."""
    stop_token_ids: list[int] = []
    """Ids that end a rollout beside those of the student's tokenizer and generation config."""
    seed: int = 0
    """Seed of new adapters."""
    heartbeat_seconds: float = Field(0.0, ge=0)
    """Time between two heartbeats of a rank; 0: none are sent."""

    def keeps(self, step: int) -> bool:
        """Whether the version of this step is the last, or the first to pass a multiple of `keep_every`."""
        every, before = self.keep_every or 0, max(0, step - self.weights.publish_every)
        return step >= self.steps or (every > 0 and step // every > before // every)
