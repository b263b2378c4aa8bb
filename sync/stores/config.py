"""Where published versions are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sync.settings import Settings


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


StoreConfig = Annotated[
    DirectoryStoreConfig | XetStoreConfig | BucketStoreConfig | ObjectStoreConfig, Field(discriminator="type")
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
    codec: Literal["small", "fast"] = "fast"
    """fast: least time. small: least bytes. Both are lossless."""
    kv_on_swap: Literal["recompute", "keep"] = "recompute"
    """What happens to running completions at a swap: prefill again under the new weights, or go on."""
    timeout_seconds: float = Field(300.0, gt=0)
    """A transfer that takes longer has failed; a replica has as long to show its weights at a run's end."""
