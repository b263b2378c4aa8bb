"""Base of every configuration class: frozen, unknown keys refused, each value documented under its field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from sync.urls import Url


class Settings(BaseModel):
    """A section of a configuration file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True
    )


class ModelSource(Settings):
    """Where a model comes from: anything `from_pretrained` takes."""

    path: str
    """A local folder, or a Hugging Face Hub id."""
    revision: str | None = None
    """Commit, tag or branch on the Hub; the commit it resolved to is recorded with the run."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""


class Placement(Settings):
    """Where a role's processes run."""

    urls: list[Url] = []
    """Processes that run already; when given, none is started here."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs a token."""
    port: int = Field(0, ge=0, le=65535)
    """First port to listen on (replica i takes port + i); 0: any free one."""
    devices: list[str] = []
    """CUDA_VISIBLE_DEVICES of each process, such as ["0,1", "2,3"]; empty: inherited."""
    env: dict[str, str] = {}
    """Environment variables to add, such as OMP_NUM_THREADS."""
