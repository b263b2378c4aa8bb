"""Configuration of one teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, Field, ValidationInfo

from sync.base.address import Url
from sync.base.own_code import OWN, is_own, registered
from sync.base.settings import EngineArgs, Fixed, Live, ModelSource, Placement, check_vllm

CAPABILITIES: Final = ("topk", "gather", "entropy", "hidden", "generate", "temperature")
"""What `EngineInfo.can` may hold."""


class EngineKind(NamedTuple):
    """What is known of an engine before it is loaded; no field has a default, so that none is forgotten."""

    can: tuple[str, ...]
    """The most of `EngineInfo.can`; without "generate" a server at `generate_url` completes prompts."""
    computes: Literal["layers", "vllm", "own"]
    """layers: one layer after the other, spread over its GPUs, in passes of `batch_tokens`; it can be
    unloaded, and loaded with other weights. vllm: vLLM's engine, all GPUs at once, in the share of their
    memory that it reserves. own: the user's; GPUs and memory are computed as of layers."""


ENGINES: Final = {
    "transformers": EngineKind(CAPABILITIES, "layers"),
    "vllm": EngineKind(tuple(name for name in CAPABILITIES if name != "generate"), "vllm"),
}
"""Engines by name; `load` of teacher_service.engines.NAME makes one."""
OWN_ENGINE: Final = EngineKind(CAPABILITIES, "own")
"""An engine of the user's own; what it can is known when it is loaded."""


def _known_engine(name: str) -> str:
    if name in ENGINES or is_own(name := registered(name, "distill.engines")):
        return name
    raise ValueError(
        f"input should be {' or '.join(map(repr, ENGINES))}, or an engine of your own: {OWN}, or an entry "
        "point of distill.engines"
    )


def _of_engine(arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    kind = ENGINES.get(info.data.get("engine", ""), OWN_ENGINE)
    return check_vllm(arguments) if kind.computes == "vllm" else arguments


class TeacherConfig(ModelSource, Placement):
    """One teacher; several replicas when `replicas` > 1 or several urls are given."""

    engine: Live[Annotated[str, AfterValidator(_known_engine)]] = "transformers"
    """transformers: everything, one layer after the other on its devices. vllm: every score, at full speed on
    one or many GPUs; completions by another server, at `generate_url`. "package.module:name": one of your
    own, or the name that an installed package registers for it (docs/extending.md)."""
    engine_url: Live[Url | None] = None
    """A vLLM server with the pooling runner, for engine "vllm"; None: vLLM is started with the teacher."""
    generate_url: Live[Url | None] = None
    """A vLLM server of the same model that generates, for engine "vllm" with objective.on_policy < 1."""
    replicas: Live[int] = Field(1, ge=1)
    """Processes started on this machine."""
    dtype: Live[Literal["auto", "bfloat16", "float16", "float32"]] = "auto"
    """Precision of the weights; auto: as they are stored."""
    device: Live[Literal["auto", "cpu", "cuda"]] = "auto"
    """auto: the GPUs that the process sees, if any; engine "transformers" spreads its layers over all."""
    attention: Live[str] = "sdpa"
    """transformers' attn_implementation."""
    max_length: Live[int | None] = Field(None, ge=2)
    """Longest sequence, in tokens; None: the model's own limit, or what memory takes when that is less."""
    batch_tokens: Live[int] = Field(16384, ge=1)
    """Padded tokens of one forward pass."""
    head_chunk: Live[int] = Field(1024, ge=1)
    """Positions whose full-vocabulary logits are in memory at once."""
    queue_tokens: Live[int | None] = Field(None, ge=1)
    """Tokens queued or not yet answered. A request that passes it with those of others is refused with 429
    and Retry-After; several sequences that pass it by themselves with 413, and clients send them in halves.
    None: as many as a quarter of this machine's free memory holds the scores of."""
    keep_memory_gib: Live[float] = Field(4.0, ge=0)
    """Memory for scores that trainers fetch (`buffer.scores`); the oldest beyond it go to disk."""
    keep_disk_gib: Live[float] = Field(64.0, ge=0)
    """Disk for them, as far as 2 GiB stay free; the oldest beyond it are dropped, and computed again when a
    trainer needs them."""
    keep_folder: Live[Path | None] = None
    """Folder for them, emptied at the start; None: `scores/` in the run's folder."""
    wire_dtype: Live[Literal["float16", "float32"]] = "float16"
    """Precision of top-k and gathered log-probabilities on the wire."""
    engine_args: Live[Annotated[EngineArgs, AfterValidator(_of_engine)]] = {}
    """Any argument of vLLM's engine, for engine "vllm": {tensor_parallel_size = 4}. An engine of your own
    reads what it likes; the parallel sizes are its GPUs on a cluster."""
    idle_unload_seconds: Live[float | None] = Field(None, gt=0)
    """Time without work after which engine "transformers" unloads its model, until work comes; for teachers
    that share a machine. None: never."""
    follow_student_every: Fixed[int | None] = Field(None, ge=1)
    """Published steps after which this teacher loads the student's weights (self-distillation; engine
    "transformers", objectives without hidden states); it begins with those of `path`. None: never."""
    route: Fixed[list[str]] = []
    """Data sources whose samples go to this teacher; with no `route_by` either: every source that no other
    teacher takes."""
    route_by: Fixed[str | None] = None
    """A "module:function" from a data source to whether this teacher takes it; None: `route` alone."""
    tokenizer: Fixed[Literal["auto", "student", "own"]] = "auto"
    """student: ids mean the same to it as to the student. own: it has another vocabulary or chat template,
    and scores the text of completions by its own, for objectives "sampled" and "topk". auto: own where
    vocabularies differ."""
    prompt_transform: Fixed[str | None] = None
    """A "module:function" from a Prompt to the token ids the teacher sees instead; None: the same ids."""

    @property
    def kind(self) -> EngineKind:
        """What is known of its engine."""
        return ENGINES.get(self.engine, OWN_ENGINE)

    @property
    def runs_vllm(self) -> bool:
        """Whether it has vLLM in its process."""
        return self.kind.computes == "vllm" and self.engine_url is None
