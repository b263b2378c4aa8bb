"""Configuration of a run: the sections of its TOML file.

A section stands beside the code that reads it; this module holds the controller's and joins them all.
`make docs` makes a page of the texts under the fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from distill.config.cluster import ClusterConfig, LocalCluster
from distill.config.evaluation import EvaluationConfig, Metric
from distill.config.prompts import PromptsConfig
from distill.environments.config import EnvironmentConfig
from student_trainer.config import TrainerSettings
from student_trainer.objectives.config import Auto, ObjectiveConfig
from sync.base.address import Host, Url
from sync.base.settings import (
    Content,
    Fixed,
    Live,
    ModelSource,
    Name,
    Placement,
    Reason,
    ReplicaConfig,
    Settings,
    VllmArgs,
    WeightsConfig,
)
from teacher_service.config import TeacherConfig


class RunConfigSection(Settings):
    """[run]: name, length and supervision of the run."""

    name: Fixed[Name]
    """Name of the run and of its folder."""
    folder: Live[Path] = Path("runs")
    """Folder in which the run's folder is created."""
    code_folder: Live[Path | None] = None
    """Folder in which the run's processes look for modules of your own, those that a key names as
    "package.module:name" (docs/extending.md), after all that is installed. None: the folder of the
    configuration file."""
    steps: Live[int] = Field(ge=1)
    """Optimizer steps."""
    precision: Live[Literal["as_set", "fastest"]] = "as_set"
    """Precision of models and training on CPU cores. fastest, of a `cluster.type` "local": float32 where
    bfloat16 is set and this machine's cores, whose products are timed, compute float32 faster. A run goes on
    as it began."""
    seed: Fixed[int] = Field(0, ge=0, lt=1 << 32)
    """Seed of prompt order, evaluation, teachers' completions and training; replica I samples with seed I."""
    grace_seconds: Live[float] = Field(60.0, gt=0)
    """Time from a stop signal to the end of the last role; in it the trainer finishes its step and saves a
    checkpoint. What wandb has not taken by then may last 5 minutes more; the run's folder is complete."""
    start_seconds: Live[float] = Field(900.0, gt=0)
    """Time for every process to become healthy after its start."""
    max_loaded_teachers: Live[int | None] = Field(None, ge=1)
    """Most teachers with `idle_unload_seconds`, started on this machine, in memory at once; loading one more
    unloads the least recently used. None: no limit."""
    health_timeout_seconds: Live[float] = Field(120.0, ge=0)
    """Liveness: a server that has answered /health and then does not for so long, or a trainer rank without a
    heartbeat for so long, is killed and, when it was started here, restarted (one of `restarts`). Keep it
    above the longest call that holds Python's interpreter lock. 0: never."""
    restarts: Live[int] = Field(10, ge=0)
    """Restarts of processes that died, all roles together; one more death ends the run."""
    share_gpus: Live[bool] = False
    """Let several processes use one GPU, where their computed memory fits; false: refuse it."""
    min_free_disk_gib: Live[float] = Field(0.5, ge=0)
    """Free disk space below which a run does not start, and a running one starts no rollouts."""


class StudentConfig(ModelSource, Placement):
    """[student]: the model that is trained, and the replicas that generate with it."""

    replicas: Live[int] = Field(1, ge=1)
    """Replicas started on this machine; ignored with `urls`."""
    dtype: Live[Literal["auto", "bfloat16", "float16", "float32"]] = "bfloat16"
    """Precision of the weights in the replicas."""
    engine_args: Live[VllmArgs] = {}
    """Any argument of vLLM's server: {"tensor-parallel-size" = 2, "enforce-eager" = true}. On GPUs logits are
    fp32 unless "hf-overrides" is {head_dtype = "model"} (docs/objectives.md)."""
    mirror_folder: Live[Path | None] = None
    """Folder on each host, on no network file system, for the checkpoints of all that follow the weights: two
    each. None: `mirrors/` in the run's folder."""
    staging_bytes: Live[int | None] = Field(None, ge=0)
    """Most host memory in which each worker of a replica stages a version while it generates, as much as its
    share of the model takes; a worker that needs more loads inside the pause. None: no limit."""

    def flags(self) -> dict[str, Any]:
        """`engine_args` under vLLM's names of its flags."""
        return flags_of(self.engine_args)

    @property
    def shares_kv(self) -> bool:
        """Whether `engine_args` let a request take KV of another: from a prefix cache or a KV connector."""
        flags = self.flags()
        connects = any(name.startswith(("kv-offloading-size", "kv-transfer-config")) for name in flags)
        return connects or bool(flags.get("enable-prefix-caching"))


AtLimit = Literal["keep", "drop", "requeue"]
NEGLIGIBLE: Final = 1e-3
"""Weight of the divergence from the teacher, against a task's of 1, up to which the reward alone counts."""
KEEP_CACHE_LR: Final = 1e-5
"""Learning rate up to which an old KV cache changes what is sampled behind it by the order of rounding
(docs/benchmarks.md)."""


class RolloutConfig(Settings):
    """[rollout]: how completions are sampled."""

    batch: Fixed[int] = Field(256, ge=1)
    """Rollouts per optimizer step."""
    per_prompt: Fixed[int] = Field(1, ge=1)
    """Completions per prompt."""
    max_tokens: Fixed[int] = Field(ge=1)
    """Most tokens of a completion."""
    temperature: Fixed[float] = Field(1.0, ge=0.001, le=2)
    """Sampling temperature, at most what vLLM takes; the trainer's log-probabilities are at the same."""
    top_k: Fixed[int] = Field(0, ge=0)
    """Sample among the so many most likely tokens; 0: all. Every token then carries the ids that it was
    sampled from, and is corrected within them (docs/objectives.md)."""
    top_p: Fixed[float] = Field(1.0, gt=0, le=1)
    """Sample among the most likely tokens with this share of the probability mass together; below 1 it needs
    `top_k`, which bounds their number."""
    min_p: Fixed[float] = Field(0.0, ge=0, lt=1)
    """Sample among the tokens with at least this share of the most likely one's probability; above 0 it needs
    `top_k`."""
    routing_replay: Fixed[bool] = False
    """For a student with experts: replicas record the experts of every token, and the trainer's routers take
    them (docs/objectives.md). Replicas on CPUs, or with kv_on_swap = "keep", are then not compiled."""
    stop_token_ids: Fixed[list[int]] = []
    """Token ids that end a completion besides the model's own."""
    request_size: Live[int] = Field(16, ge=1)
    """Prompts per request to a replica."""
    max_in_flight: Live[int] = Field(1024, ge=1)
    """Most completions in flight per replica."""
    completion_timeout_seconds: Live[float | None] = Field(None, gt=0)
    """Time limit of a completion from the dispatch of its prompt; None: no limit."""
    stall_timeout_seconds: Live[float] = Field(240.0, ge=0)
    """Progress: a replica with work that answers /health and produces no token for so long is killed and,
    when it was started here, restarted (one of `run.restarts`). Loading weights is work too. Keep it
    below `weights.timeout_seconds`. 0: never."""
    on_timeout: Live[AtLimit] = "requeue"
    """Completion cut off by `completion_timeout_seconds`. keep: train on the tokens so far, as truncated;
    drop: quarantine it; requeue: generate its prompt again."""
    on_max_tokens: Live[AtLimit] = "keep"
    """Completion cut off by `max_tokens`: as for `on_timeout`."""
    max_attempts: Live[int] = Field(5, ge=1)
    """Completions of one prompt, cut off or broken off, before it is dropped."""


class DropLate(Settings):
    """Drop a rollout older than `buffer.max_staleness`."""

    type: Literal["drop"] = "drop"


class WaitForLate(Settings):
    """Hold a batch back for rollouts in flight that would be too old for the next one."""

    type: Literal["wait"]
    seconds: float = Field(60.0, gt=0)
    """Longest wait of one batch; what is later is dropped."""


class WeighLate(Settings):
    """Train on a late rollout with weight 2^(−(age − max_staleness) / half_life)."""

    type: Literal["freshness"]
    hard_limit: int = Field(ge=1)
    """Highest age, in versions, at any weight; above `buffer.max_staleness`. What is older is dropped."""
    half_life: float = Field(1.0, gt=0)
    """Versions beyond `buffer.max_staleness` that halve the weight."""


LateConfig = Annotated[DropLate | WaitForLate | WeighLate, Field(discriminator="type")]


REFERENCE_BYTES: Final = 320
"""Scores of so many bytes a token go by reference. Those of 1,000 tokens cost the controller 2 ms of CPU;
a fetch costs rank and teacher 2 to 4 ms (docs/benchmarks.md)."""


class BufferConfig(Settings):
    """[buffer]: staleness and durability of rollouts."""

    max_staleness: int = Field(4, ge=0)
    """Highest age of a rollout, in versions, at the step that trains on it; 0: synchronous training."""
    depth: Literal["adaptive", "full"] = "adaptive"
    """How many rollouts are started ahead of the trainer. adaptive: as few as cost it no speed, so that
    they are young; full: as many as `max_staleness` allows."""
    late: LateConfig = DropLate()
    """What to do with a rollout older than that."""
    score_batch: int = Field(64, ge=1)
    """Rollouts per request to a teacher."""
    scores: Literal["auto", "inline", "reference"] = "auto"
    """How top-k, gathered log-probabilities and hidden states reach the trainer. reference: the teacher keeps
    them and the trainer's ranks fetch them there. inline: through the controller and its record. auto: by
    reference from 320 bytes a token on, such as a top-64 or hidden states of width 160."""
    fsync: Literal["always", "batch", "never"] = "batch"
    """When the record is forced to disk. always: after each record; batch: before each batch is handed out;
    never: when the system does."""

    def by_reference(self, bulk_bytes: int) -> bool:
        """Whether scores of so many bytes a token (`Want.bulk_bytes`) go by reference."""
        least = {"auto": REFERENCE_BYTES, "reference": 1, "inline": math.inf}[self.scores]
        return bulk_bytes >= least


class GuardConfig(Settings):
    """[guard]: limits that stop a diverging run, and filters of bad input.

    A step whose loss or gradient norm is not finite is never applied, and counts as a bad step.
    """

    max_reverse_kl: float | None = Field(None, gt=0)
    """Highest reverse KL of a step, nats per token; None: no limit."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Highest gradient norm, before clipping; None: no limit."""
    min_entropy: float | None = Field(None, ge=0)
    """Lowest student entropy, nats per token; None: no limit."""
    max_truncation_rate: float | None = Field(None, ge=0, le=1)
    """Highest share of a step's rollouts cut off at `rollout.max_tokens`; None: no limit."""
    min_end_share: float | None = Field(None, gt=0, le=1)
    """Lowest probability of the end of a completion, as a share of the teacher's at the same tokens
    (`train/student_end`, `train/teacher_end`); None: no limit."""
    patience: int = Field(3, ge=1)
    """Consecutive bad steps before `action`."""
    action: Literal["hold", "rollback"] = "hold"
    """hold: hand out no batch until the run is stopped. rollback: restart the trainer from the newest
    checkpoint before the first bad step, without the rollouts of the bad steps; takes one of
    `run.restarts`."""
    max_rollbacks: int = Field(3, ge=0)
    """Rollbacks before the run is held instead."""
    repeats: int | None = Field(None, ge=2)
    """Quarantine a completion that ends in so many copies of the same 1 to 8 tokens; None: never."""
    bad_answers: int = Field(8, ge=1)
    """Consecutive refusals or invalid answers of one server (a replica, a teacher's URL, the evaluator) until
    it is excluded; the run fails when the last of its kind is. Failures of a reward_fn or a prompt_transform
    are counted the same way."""


class PreflightConfig(Settings):
    """[preflight]: tolerances of the checks before the first step, and of the first step itself."""

    sequences: int = Field(8, ge=2, le=256)
    """Probe sequences per teacher."""
    score_tolerance: float | None = Field(None, gt=0)
    """Mean absolute difference, in nats per token, allowed between a teacher's scores of the same tokens,
    between them and a plain fp32 forward pass, and in the first step between its dense scores and the sampled
    ones. None: 0.001 for a teacher in float32, else 0.2: bf16 alone gives 0.06 for SmolLM2-135M-Instruct and
    0.11 once that is fine-tuned, other weights 1 and more; in the first step 0.1."""
    mismatch_tolerance: float | None = Field(None, gt=0)
    """KL(μ‖p), in nats per token, allowed between rollout engine and trainer on tokens of the same weights.
    None: 0.02, and 0.05 for a student with experts. bf16 rounding gives 1e-5 to 1e-3, and 1e-3 to 1e-2 where
    it sends tokens to other experts; another temperature, template or head gives 0.05 or more."""
    gpu_gib: float | None = Field(None, gt=0)
    """Memory of each GPU, with which the computed need of every process is compared, those of other machines
    too. None: what nvidia-smi reports of this machine's."""
    longest: bool = True
    """Probe each teacher with a sequence of the greatest length too. false: for sliding windows."""


class TrackingConfig(Settings):
    """[tracking]: Weights & Biases and TensorBoard, besides metrics.jsonl; samples of what is trained on."""

    wandb: Literal["online", "offline", "disabled"] = "offline"
    """offline: keep the records in the run's folder, for `wandb sync`."""
    project: str = "onpolicy-distill"
    """Project of the wandb run."""
    entity: str | None = None
    """User or team on wandb; None: its default."""
    group: str | None = None
    """Group of the wandb run; None: none."""
    tags: list[str] = []
    """Tags of the wandb run."""
    notes: str | None = None
    """Notes of the wandb run."""
    table_every: int = Field(5, ge=0)
    """Evaluations between two uploads of the samples to wandb; 0: at the end alone."""
    tensorboard: bool = False
    """Write event files to `tensorboard/` of the run's folder (extra `tensorboard`)."""
    samples_every: int = Field(10, ge=0)
    """Steps between batches of which samples are written to samples.jsonl; 0: none."""
    samples: int = Field(4, ge=1)
    """Rollouts of each of those batches."""


class ControllerConfig(Settings):
    """[controller]: the HTTP server that hands batches to the trainer's ranks."""

    host: Host = "127.0.0.1"
    """Address to listen on; anything but loopback needs a token."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    url: Url | None = None
    """URL at which the trainer reaches it; None: http://host:port."""
    trainer: Literal["launch", "external"] = "launch"
    """launch: start the trainer. external: it is started elsewhere with `distill train`."""


def flags_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an engine under vLLM's names of its flags, without leading dashes."""
    return {key.removeprefix("--").replace("_", "-"): value for key, value in arguments.items()}


def _changed(value: Any, change: Any) -> Any:
    """`value` with a table of changes: of a section's keys, or of sections by name; else `change` itself."""
    if not isinstance(change, dict):
        return change
    if isinstance(value, Settings):
        keys = {key: _changed(getattr(value, key), inner) for key, inner in change.items()}
        return value.model_copy(update=keys)
    if isinstance(value, dict) and any(isinstance(item, Settings) for item in value.values()):
        return value | {name: _changed(value.get(name), inner) for name, inner in change.items()}
    return change


class RunConfig(Settings):
    """A whole run. Without a teacher, `teachers` empty, it learns from rewards alone."""

    run: Annotated[RunConfigSection, Reason("rollouts on record and the order of the prompts depend on it")]
    student: Annotated[StudentConfig, Reason("the checkpoint was trained from it")]
    teachers: Annotated[dict[Name, TeacherConfig], Reason("rollouts on record were scored by it")] = {}
    prompts: Annotated[PromptsConfig, Reason("rewards on record were given by it")]
    environments: Annotated[
        dict[Name, EnvironmentConfig], Reason("rollouts on record were played against it")
    ] = {}
    rollout: Annotated[
        RolloutConfig,
        Reason("rollouts on record were sampled by it, and evaluations are compared at it"),
    ]
    buffer: Live[BufferConfig] = BufferConfig()
    objective: Annotated[Fixed[ObjectiveConfig], Reason("the weights so far were optimised for it")] = Auto()
    guard: Live[GuardConfig] = GuardConfig()
    trainer: Annotated[TrainerSettings, Reason("weights and optimizer in the checkpoint have that form")]
    weights: Live[WeightsConfig] = WeightsConfig()
    evaluation: Content[EvaluationConfig | None] = EvaluationConfig()
    preflight: Live[PreflightConfig] = PreflightConfig()
    tracking: Live[TrackingConfig] = TrackingConfig()
    controller: Live[ControllerConfig] = ControllerConfig()
    cluster: Live[ClusterConfig] = LocalCluster()

    @property
    def run_dir(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def mirrors(self) -> Path:
        """Folder of all mirrors on a host."""
        folder = self.student.mirror_folder
        return self.run_dir / "mirrors" if folder is None else folder / self.run.name

    def places(self) -> dict[str, Placement]:
        """Section of each kind of server → where its processes run: every `Placement` there is."""
        places = dict[str, Placement]()
        for name in type(self).model_fields:
            section = getattr(self, name)
            if isinstance(section, Placement):
                places[name] = section
            elif isinstance(section, dict | Settings):
                inner = dict(section).items()
                places |= {f"{name}.{key}": place for key, place in inner if isinstance(place, Placement)}
        return places

    def with_(self, **changes: Any) -> RunConfig:
        """With other values, as `with_(run={"steps": 5}, teachers={"math": {"urls": []}}, evaluation=None)`.

        Values are not checked.
        """
        config: RunConfig = _changed(self, changes)
        return config

    def with_places(self, change: Callable[[str, Any], Any]) -> RunConfig:
        """With `change` of section and place for every place in `places`."""
        changes: dict[str, Any] = {}
        for section, place in self.places().items():
            kind, _, name = section.partition(".")
            changed = change(section, place)
            changes[kind] = {**changes.get(kind, {}), name: changed} if name else changed
        return self.with_(**changes)

    @property
    def by_text(self) -> list[str]:
        """Names of the teachers that score text, as they have a tokenizer of their own."""
        return [name for name, teacher in self.teachers.items() if teacher.tokenizer == "own"]

    @property
    def metric(self) -> Metric:
        """`evaluation.metric`, auto decided."""
        metric, objective = self.evaluation.metric if self.evaluation else "auto", self.objective
        if metric != "auto":
            return metric
        factors = [objective.teacher_coefficients.get(name, 1.0) for name in self.teachers]
        alone = objective.task is not None and objective.coefficient * max(factors, default=0.0) <= NEGLIGIBLE
        return "reward" if alone else "reverse_kl"

    @property
    def uses_store(self) -> bool:
        """Whether versions go to the store: all of them, or beside broadcasts those that are evaluated."""
        return self.weights.transport == "snapshot" or self.evaluation is not None

    @property
    def keeps_cache(self) -> bool:
        """Whether running completions keep their KV cache at a swap: `weights.kv_on_swap`, auto decided."""
        if self.weights.kv_on_swap != "auto":
            return self.weights.kv_on_swap == "keep"
        excluded = self.student.shares_kv or self.rollout.routing_replay
        return self.trainer.lr <= KEEP_CACHE_LR and not excluded

    def subscriber(self, process: str) -> ReplicaConfig:
        """What `process` needs to follow the run's versions into a mirror of its own."""
        return ReplicaConfig(
            run=self.run.name,
            store=self.weights.store,
            store_path=self.run_dir / "store",
            mirror=self.mirrors / process,
            staging_bytes=self.student.staging_bytes,
            lora_rank=self.trainer.lora.rank if self.trainer.lora else None,
            routes=self.rollout.routing_replay,
            keeps_cache=self.keeps_cache,
            timeout_seconds=self.weights.timeout_seconds,
            known_ids=self.student.known_ids,
        )
