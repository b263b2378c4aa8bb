"""One file configures a run: the sections of a TOML file and the rules between them.

A section lives beside its owner; this module holds those of the controller and joins them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from student_trainer.config import TrainerSettings
from student_trainer.objectives.config import Full, ObjectiveConfig
from sync.settings import ModelSource, Placement, Settings
from sync.stores.config import WeightsConfig
from sync.urls import Url
from teacher_service.config import TeacherConfig


class RunConfigSection(Settings):
    """[run]: what the run is called, how long it is, and how it ends."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder."""
    folder: Path = Path("runs")
    """Where the run's folder is made."""
    steps: int = Field(ge=1)
    """Optimizer steps."""
    seed: int = 0
    """Of prompts' order, evaluation, what teachers write, and training; replica I samples with seed I."""
    grace_seconds: float = Field(60.0, gt=0)
    """Time from a stop signal to the last child's end: the step, a checkpoint, an orderly exit."""
    start_seconds: float = Field(900.0, gt=0)
    """Time every role has to come up."""
    max_loaded_teachers: int | None = Field(None, ge=1)
    """Teachers with idle_unload_seconds, started on this machine, that may be loaded at once; one more makes
    the one that was used the longest time ago give its memory back. None: all."""
    health_timeout_seconds: float = Field(120.0, ge=0)
    """Seconds without an answer from the /health of a server that answered before, or without a heartbeat of
    a rank of the trainer, after which its process counts as hung: it is killed and started again, if it was
    started here (one of run.restarts). Answers come from a thread that shares Python's interpreter lock with
    the work: keep it above the longest call that holds the lock. 0: never."""
    restarts: int = Field(10, ge=0)
    """Deaths of child processes that the supervisor mends, all roles together."""
    min_free_disk_gib: float = Field(0.5, ge=0)
    """Free space below which the run does not start, and pauses."""


class StudentConfig(ModelSource, Placement):
    """[student]: the model, and the replicas that generate."""

    replicas: int = Field(1, ge=1)
    """Servers started on this machine; with `urls`, theirs is the number."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the replicas' weights."""
    engine_args: dict[str, Any] = {}
    """Any argument of vLLM's server: {"tensor-parallel-size" = 2, "enforce-eager" = true}."""


class TaskPrompts(Settings):
    """A task that makes its own prompts and judges completions."""

    type: Literal["task"]
    task: str
    """Name of a module in distill.tasks, or "package.module"."""
    options: dict[str, Any] = {}
    """What the task's constructor is given."""


class JsonlPrompts(Settings):
    """One JSON object a line."""

    type: Literal["jsonl"]
    path: Path
    """The file."""
    field: str = "prompt"
    """A string, or a list of chat messages."""
    source_field: str | None = None
    """Field that names the data source, for routing to teachers; None: every row is "default"."""
    answer_field: str | None = None
    """Field with a reference answer, which `reward_fn` reads; None: the rows have none."""
    reward_fn: str | None = None
    """Who gives the task's reward and the pass rate. "exact": 1 when the completion is the answer, else 0;
    "contains": when the answer stands in it as words of its own; "number": when both end on the same number.
    "package.module:function": what function(prompt, completion) returns, a bool or a finite number, of
    `prompt.answer`, `prompt.text` and the completion's text. Above 0 passes. None: no reward, no pass rate.
    The controller calls the function in its event loop and does nothing else meanwhile: let it take
    milliseconds. The evaluator calls it in a thread, where signals (so `signal.alarm`) do not work.
    """
    template: Literal["chat", "plain"] = "chat"
    """chat: the student's chat template, applied once. plain: the text as it is."""


class DatasetPrompts(Settings):
    """A dataset that `datasets.load_dataset` knows."""

    type: Literal["dataset"]
    path: str
    """A Hub id, or a folder of Parquet, JSON, CSV or Arrow files."""
    name: str | None = None
    """Configuration of the dataset; None: its only one."""
    split: str = "train"
    """Such as "train" or "train[:10%]"."""
    revision: str | None = None
    """Commit, tag or branch on the Hub."""
    field: str = "prompt"
    """Column of the prompts: texts, or lists of chat messages."""
    source_field: str | None = None
    """Column that names the data source, for routing to teachers; None: every row is "default"."""
    answer_field: str | None = None
    """Column of reference answers, which `reward_fn` reads; None: the rows have none."""
    reward_fn: str | None = None
    """Who gives the task's reward and the pass rate: as for type = "jsonl"."""
    template: Literal["chat", "plain"] = "chat"
    """chat: the student's chat template, applied once. plain: the text as it is."""


PromptsConfig = Annotated[TaskPrompts | JsonlPrompts | DatasetPrompts, Field(discriminator="type")]


AtLimit = Literal["keep", "drop", "requeue"]


class RolloutConfig(Settings):
    """[rollout]: how the student writes."""

    batch: int = Field(256, ge=1)
    """Rollouts of one optimizer step."""
    per_prompt: int = Field(1, ge=1)
    """Completions of each prompt."""
    max_tokens: int = Field(ge=1)
    """Longest completion."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling; the trainer's log-probabilities use the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1 only: a token that nucleus sampling cuts off has no log-probability to correct by."""
    stop_token_ids: list[int] = []
    """Ids that end a completion besides the model's own."""
    request_size: int = Field(16, ge=1)
    """Prompts in one request to a replica."""
    max_in_flight: int = Field(1024, ge=1)
    """Completions that one replica works on at once."""
    completion_timeout_seconds: float | None = Field(None, gt=0)
    """Seconds from its sending that a completion may take; None: no limit."""
    stall_timeout_seconds: float = Field(240.0, ge=0)
    """Seconds without a new token after which a replica with work (completions or an update) is hung, though
    it answers: its prompts are asked elsewhere, and its process, if it was started here, is killed and
    started again (one of run.restarts). Keep it below weights.timeout_seconds. 0: never."""
    on_timeout: AtLimit = "requeue"
    """What becomes of a completion that `completion_timeout_seconds` ends. keep: the part generated is
    trained on, marked truncated; drop: it is quarantined; requeue: its prompt is generated again."""
    on_max_tokens: AtLimit = "keep"
    """What becomes of a completion that `max_tokens` ends. keep: it is trained on, marked truncated; drop: it
    is quarantined; requeue: its prompt is asked again."""
    max_attempts: int = Field(5, ge=1)
    """Completions of one prompt that may be asked again at a limit or broken off before it is dropped."""


class DropLate(Settings):
    """A rollout older than `buffer.max_staleness` is dropped."""

    type: Literal["drop"] = "drop"


class WaitForLate(Settings):
    """A batch waits for rollouts under way that would be too old for the next one; the clock is held."""

    type: Literal["wait"]
    seconds: float = Field(60.0, gt=0)
    """Longest wait of one batch; what is later than that is dropped."""


class WeighLate(Settings):
    """A late rollout is trained on at weight 2^(−(age − max_staleness) / half_life)."""

    type: Literal["freshness"]
    hard_limit: int = Field(ge=1)
    """Oldest age, in versions, at any weight; above `buffer.max_staleness`. What is older is dropped."""
    half_life: float = Field(1.0, gt=0)
    """Versions beyond `buffer.max_staleness` that halve the weight."""


LateConfig = Annotated[DropLate | WaitForLate | WeighLate, Field(discriminator="type")]


class BufferConfig(Settings):
    """[buffer]: what may be trained on."""

    max_staleness: int = Field(4, ge=0)
    """Oldest age, in versions, at the start of the step that trains on a rollout; 0: synchronous."""
    late: LateConfig = DropLate()
    """What becomes of a rollout that took so long that it is older than that."""
    score_batch: int = Field(64, ge=1)
    """Rollouts in one request to a teacher."""
    fsync: Literal["always", "batch", "never"] = "batch"
    """When the journal is forced to disk: every record, every batch handed out, or left to the system."""


class GuardConfig(Settings):
    """[guard]: what is not to be trained on, and which steps end the trust in the weights.

    A step whose loss or gradient norm is not finite is never applied; it counts as a bad one.
    """

    max_reverse_kl: float | None = Field(None, gt=0)
    """Highest reverse KL of a step, nats a token; None: no limit."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Highest gradient norm, before clipping; None: no limit."""
    min_entropy: float | None = Field(None, ge=0)
    """Lowest student entropy, nats a token; None: no limit."""
    max_truncation_rate: float | None = Field(None, ge=0, le=1)
    """Largest share of a step's rollouts that were cut off at rollout.max_tokens; None: no limit."""
    patience: int = Field(3, ge=1)
    """Bad steps, one after the other, after which `action` is taken."""
    action: Literal["hold", "rollback"] = "hold"
    """hold: hand out no batch until the run is stopped. rollback: start the trainer again from the newest
    checkpoint before the first bad step, without the rollouts of the bad ones; takes one of run.restarts."""
    max_rollbacks: int = Field(3, ge=0)
    """Rollbacks after which the run is held instead."""
    repeats: int | None = Field(None, ge=2)
    """A completion that ends in so many copies of 1 to 8 tokens is quarantined; None: none is."""
    bad_answers: int = Field(8, ge=1)
    """Unusable answers of one server (a replica, a teacher's URL, the evaluator), one after the other, after
    which it is asked nothing any more; when none of its kind is left the run stops with an error. Failures of
    a reward_fn or a prompt_transform are counted the same way."""


class EvaluationConfig(Settings):
    """[evaluation]: exact reverse KL, and pass rate where somebody judges, on held-out prompts.

    At most a tenth of a file's or dataset's rows is held out. `evaluation = false` above all sections: none.
    """

    every: int = Field(0, ge=0)
    """Optimizer steps between evaluations; 0: before and after only."""
    prompts: int = Field(512, ge=1)
    """Held-out prompts, never trained on."""
    batch: int = Field(128, ge=1)
    """Held-out prompts in one forward pass."""
    metric: Literal["reverse_kl", "pass_rate"] = "reverse_kl"
    """Which one says what the best version is."""
    patience: int | None = Field(None, ge=1)
    """Evaluations without a better one after which the run stops; None: never early."""
    placement: Placement = Placement()
    """Where the evaluator runs."""
    threads: int | None = Field(None, ge=1)
    """torch's threads; None: its default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""


class PreflightConfig(Settings):
    """[preflight]: what the engines must agree in before the first step, and after it."""

    sequences: int = Field(8, ge=2, le=256)
    """Sequences that each teacher is probed with."""
    score_tolerance: float | None = Field(None, gt=0)
    """Nats per token, mean absolute difference: a teacher's scores against each other and against a plain
    fp32 forward pass. None: 0.001 for a teacher in float32, 0.1 for one in less."""
    mismatch_tolerance: float = Field(0.02, gt=0)
    """Nats per token: KL(μ‖p) between rollout engine and trainer on tokens sampled from the very weights that
    are trained. Rounding gives 1e-5 to 1e-3 in bf16; another temperature, template or head gives 0.05 up."""
    longest: bool = True
    """Probe each teacher with a sequence of the greatest length too; false: for teachers that cannot see a
    sequence's first token from its end."""


class TrackingConfig(Settings):
    """[tracking]: where metrics go besides metrics.jsonl."""

    wandb: Literal["online", "offline", "disabled"] = "offline"
    """offline: kept in the run's folder, for `wandb sync`."""
    project: str = "onpolicy-distill"
    """Of the wandb run."""
    entity: str | None = None
    """User or team on wandb; None: its default."""
    tags: list[str] = []
    """Of the wandb run."""


class ControllerConfig(Settings):
    """[controller]: the HTTP server that trainer ranks ask for batches."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs a token."""
    port: int = Field(0, ge=0, le=65535)
    """0: any free one."""
    url: Url | None = None
    """How the trainer reaches it; None: http://host:port."""
    trainer: Literal["launch", "external"] = "launch"
    """external: the trainer is started elsewhere with `distill train`."""


class RunConfig(Settings):
    """A whole run."""

    run: RunConfigSection
    """Name, length and end of the run."""
    student: StudentConfig
    """The model that learns, and who generates with it."""
    teachers: dict[str, TeacherConfig] = Field(min_length=1)
    """Who marks, by name."""
    prompts: PromptsConfig
    """What the student is asked."""
    rollout: RolloutConfig
    """How the student writes."""
    buffer: BufferConfig = BufferConfig()
    """What may be trained on."""
    objective: ObjectiveConfig = Full()
    """What is optimised."""
    guard: GuardConfig = GuardConfig()
    """What is not trusted."""
    trainer: TrainerSettings
    """Who trains."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the replicas."""
    evaluation: EvaluationConfig | None = EvaluationConfig()
    """Held-out marks; `evaluation = false`: none."""
    preflight: PreflightConfig = PreflightConfig()
    """What the engines must agree in."""
    tracking: TrackingConfig = TrackingConfig()
    """Where metrics go."""
    controller: ControllerConfig = ControllerConfig()
    """The server between all of them."""

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return self.run.folder / self.run.name
