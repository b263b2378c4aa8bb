"""Configuration that more than one role reads: frozen, unknown keys refused, documented under each field."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from sync.base import secrets
from sync.base.address import Host, Url
from sync.base.errors import ConfigError
from sync.base.own_code import typed

T = TypeVar("T")


@dataclass(frozen=True)
class Law:
    """What a resume does with a change of a key."""

    words: str


LIVE, CONTENT, FIXED = Law("takes effect"), Law("same content"), Law("refused")
"""A change takes effect; is judged by the content that follows from the key; is refused, for the reason that
the section gives. LIVE and FIXED hold for all keys of a section under them."""
Live = Annotated[T, LIVE]
Content = Annotated[T, CONTENT]
Fixed = Annotated[T, FIXED]


class Reason(str):
    """Why a section's keys that are FIXED cannot change."""


class Holds(StrEnum):
    """What the path in a key leads to; of a path without it, a folder."""

    FILE = "file"
    MODEL = "model"


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
"""A name that becomes part of file names, process names and labels."""


class Settings(BaseModel):
    """A section of a configuration file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def _no_quoted_truth(variables: dict[str, Any]) -> dict[str, Any]:
    for name, value in variables.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise ValueError(f"{name} = {value!r}: every text is true to a template: write {value.lower()}")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_no_quoted_truth)]
"""Variables of a chat template by name."""


class ModelSource(Settings):
    """Where a model comes from: anything `from_pretrained` takes."""

    path: Annotated[Fixed[str], Holds.MODEL]
    """A local folder, or a Hugging Face Hub id."""
    revision: Fixed[str | None] = None
    """Commit, tag or branch on the Hub; None: its main branch."""
    trust_remote_code: Live[bool] = False
    """Run code that comes with the model."""
    chat_template: Annotated[Content[str | None], Holds.FILE] = None
    """Path of a Jinja file that replaces the tokenizer's chat template, or the folder or Hub id of a model
    whose template does. None: the tokenizer's own; of a student that has none, its teacher's."""
    template_time: Fixed[datetime | None] = None
    """What the clock of the chat template (`strftime_now`) says. None: for a student whose template reads it,
    the start of the run; a resume keeps it."""
    known_ids: Fixed[int | None] = Field(None, ge=2)
    """Token ids below it are used, and rows of the model beyond it are padding. None: those that the
    tokenizers of the student and its teachers share."""


class Placement(Settings):
    """Where a role's processes run."""

    urls: Live[list[Url]] = []
    """Processes that run already; when given, none is started here."""
    host: Live[Host] = "127.0.0.1"
    """Address to listen on; anything but loopback needs a token."""
    port: Live[int] = Field(0, ge=0, le=65535)
    """First port to listen on (replica i takes port + i); 0: any free one."""
    devices: Live[list[str]] = []
    """CUDA_VISIBLE_DEVICES of each process, such as ["0,1", "2,3"]; empty: inherited."""
    gpus: Live[int | None] = Field(None, ge=0)
    """GPUs of each process on a cluster. None: tensor x pipeline parallel size for a replica or a teacher, 1
    for the evaluator; none for an environment, for a teacher with `engine_url`, with
    `teachers.NAME.device` or `evaluation.device` = "cpu", and where no machine of the cluster has any."""
    threads: Live[int | None] = Field(None, ge=1)
    """Threads of each process that compute on cores. None: as OMP_NUM_THREADS says; without it, where the
    cores of this machine compute all of a run, as many as make a step fastest, which config.json keeps; else
    one for a replica and all cores for others."""
    env: Live[dict[str, str]] = {}
    """Environment variables to add."""


S = TypeVar("S", bound=Settings)
_Rules = Mapping[str, tuple[type[float], float, str]]
"""Argument → (type, most, what it is for and what to write)."""
_COUNTS_GPUS: Final = (int, math.inf, "GPUs are counted with it: write a whole number above 0")
_PARALLEL: Final[_Rules] = {"tensor-parallel-size": _COUNTS_GPUS, "pipeline-parallel-size": _COUNTS_GPUS}
_OF_VLLM: Final[_Rules] = {
    "max-num-seqs": (int, math.inf, "plans are computed with it: write a whole number above 0"),
    "gpu-memory-utilization": (float, 1, "memory is computed with it: write a share above 0, at most 1"),
}


def _check(rules: _Rules, arguments: dict[str, Any]) -> dict[str, Any]:
    for name, value in arguments.items():
        if rule := rules.get(name.lstrip("-").replace("_", "-")):
            number, limit, words = rule
            try:
                fits = 0 < number(str(value)) <= limit
            except ValueError:
                fits = False
            if not fits:
                raise ValueError(f"{name} = {value!r}: {words}")
    return arguments


EngineArgs = Annotated[dict[str, Any], AfterValidator(partial(_check, _PARALLEL))]
"""Arguments of an engine by name."""
check_vllm: Final = partial(_check, _OF_VLLM)
"""Raises ValueError for arguments of vLLM that nothing can be computed with; returns them."""
VllmArgs = Annotated[EngineArgs, AfterValidator(check_vllm)]
"""Arguments of vLLM by name."""


def read_settings(kind: type[S], path: Path) -> S:
    """What a role is started with, from its JSON file and the secrets beside it. Raises ConfigError."""
    try:
        return kind.model_validate_json(json.dumps(secrets.filled(json.loads(path.read_bytes()))))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"--config {path} is not a {kind.__name__}: {error}") from None
    except ValueError as error:  # malformed JSON, or bytes that are no UTF-8
        raise ConfigError(f"--config {path} is not JSON: {error}") from None


# --- weights and where they are kept --------------------------------------------------------------------


class DirectoryStoreConfig(Settings):
    """A folder that trainer and readers share."""

    type: Literal["directory"] = "directory"
    path: Path | None = None
    """The folder; None: `store/` in the run's folder."""


class XetStoreConfig(Settings):
    """Xet chunks with deduplication in a local folder, without a server."""

    type: Literal["xet"] = "xet"
    path: Path | None = None
    """The folder; None: `store/` in the run's folder."""


class BucketStoreConfig(Settings):
    """A Hugging Face bucket; the endpoint is HF_ENDPOINT, the token is HF_TOKEN."""

    type: Literal["bucket"] = "bucket"
    bucket: str
    """Owner and name, such as "acme/student-weights"."""
    prefix: str = ""
    """Folder inside the bucket."""
    create: bool = True
    """Create the bucket, private, when it is missing."""


class ObjectStoreConfig(Settings):
    """S3, Google Cloud Storage or Azure; credentials come from the environment."""

    type: Literal["object"] = "object"
    url: str
    """s3://bucket/prefix, gs://bucket/prefix or az://container/prefix."""
    options: dict[str, str] = {}
    """Options of the client, such as {"endpoint": "http://127.0.0.1:9000", "region": "eu-west-1"}."""


class OwnStoreConfig(Settings):
    """A store of your own: `type = "package.module:name"` names what makes it, or the name that an installed
    package registers (docs/extending.md)."""

    group: ClassVar = "distill.stores"
    type: Literal["own"]
    name: str
    """Filled in from `type`: a `sync.weights.stores.Store`, or a function that returns one."""
    options: dict[str, Any] = {}
    """Its keyword arguments."""


_Stores = DirectoryStoreConfig | XetStoreConfig | BucketStoreConfig | ObjectStoreConfig | OwnStoreConfig
StoreConfig = Annotated[
    Annotated[_Stores, Field(discriminator="type")], BeforeValidator(partial(typed, get_args(_Stores)))
]


class WeightsConfig(Settings):
    """How new weights reach the replicas."""

    transport: Literal["snapshot", "broadcast"] = "snapshot"
    """snapshot: versions in a store, full or delta. broadcast: straight from the trainer, NCCL or gloo."""
    store: StoreConfig = DirectoryStoreConfig()
    """Where snapshots are kept."""
    publish_every: int = Field(1, ge=1)
    """Optimizer steps between two published versions."""
    anchor_share: float = Field(4.0, gt=0)
    """A full snapshot is due when the deltas since the last one add up to this many full snapshots."""
    keep_anchors: int = Field(2, ge=1)
    """Newest full snapshots, with their deltas, that garbage collection keeps."""
    codec: Literal["auto", "small", "fast"] = "auto"
    """fast: least time. small: least bytes. auto: small while the store takes less than 5 MB/s, as measured
    by each rank on its own files of 1 MB or more; fast before, and otherwise. All are lossless."""
    kv_on_swap: Literal["auto", "recompute", "keep"] = "auto"
    """What happens to running completions at a swap: prefill again under the new weights, or go on with the
    KV cache of the old. auto: keep up to `trainer.lr` = 1e-5, where that changes as little as rounding does
    in order of magnitude, except with prefix caching or a KV connector (kv-offloading-size or
    kv-transfer-config in `student.engine_args`), which exclude it, or `rollout.routing_replay`, which it
    would slow."""
    timeout_seconds: float = Field(300.0, gt=0)
    """A transfer that takes longer has failed; a replica has as long to show its weights at a run's end."""

    @property
    def store_in_run_folder(self) -> bool:
        """Whether snapshots are kept in the run's folder."""
        return isinstance(self.store, DirectoryStoreConfig | XetStoreConfig) and self.store.path is None


# --- a replica ------------------------------------------------------------------------------------------


REPLICA_VARIABLE: Final = "DISTILL_REPLICA"
"""Environment variable that holds a ReplicaConfig as JSON, the secrets of its store among it."""


class ReplicaConfig(Settings):
    """Which run's weights a replica follows, and where it keeps them."""

    run: str
    """Name of the run; snapshots of another run are refused."""
    store: StoreConfig = DirectoryStoreConfig()
    """Where the run's versions are published."""
    store_path: Path
    """Folder of a store whose configuration names none."""
    mirror: Path
    """Folder of this replica's local mirror, on a local disk; no other replica may use it."""
    staging_bytes: int | None = Field(None, ge=0)
    """Most host memory in which a worker stages a version; more is loaded in the pause. None: no limit."""
    lora_rank: int | None = Field(None, ge=1)
    """Rank of the adapters that this replica follows; None: it follows whole checkpoints."""
    routes: bool = False
    """It is to record the experts of its tokens."""
    keeps_cache: bool = False
    """Its KV cache outlives a swap of weights (`WeightsConfig.kv_on_swap`)."""
    timeout_seconds: float = Field(300.0, gt=0)
    """A broadcast that takes longer has failed."""
    known_ids: int | None = None
    """The run's `ModelSource.known_ids`."""

    def environment(self) -> dict[str, str]:
        """The variable that `from_environment` reads."""
        return {REPLICA_VARIABLE: self.model_dump_json()}

    @classmethod
    def from_environment(cls) -> ReplicaConfig:
        """The configuration of this process. Raises ConfigError when it is missing or malformed."""
        text = os.environ.get(REPLICA_VARIABLE)
        if not text:
            raise ConfigError(
                f"{REPLICA_VARIABLE} is not set, so this replica has no weights to follow: "
                "start it with `distill student`"
            )
        try:
            config = cls.model_validate_json(text)
            secrets.found(config.model_dump(mode="json"))  # so that no log of this process shows one
            return config
        except ValidationError as error:
            raise ConfigError(f"{REPLICA_VARIABLE} cannot be used: {error}") from None
