"""Base of every configuration class: frozen, unknown keys refused, each value documented under its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sync import secrets
from sync.client import Url
from sync.errors import ConfigError


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


S = TypeVar("S", bound=Settings)


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
