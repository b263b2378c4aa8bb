"""Configuration of one environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sync.base.settings import Fixed, Live, ModelSource, Placement, Settings, TemplateVariables


class EnvironmentConfig(Placement):
    """One environment, served by processes of its own; episodes are spread over them."""

    type: Fixed[Literal["python", "verifiers"]] = "python"
    """python: an async function of yours. verifiers: an environment of the verifiers library."""
    environment: Fixed[str]
    """python: "package.module:function" (docs/environments.md). verifiers: the id of a taskset or environment
    package."""
    options: Fixed[dict[str, Any]] = {}
    """python: keyword arguments of the function. verifiers: further fields of its configuration."""
    chat_template_kwargs: Fixed[TemplateVariables] = {}
    """Variables of the chat template, such as {"enable_thinking": false}."""
    python: Live[Path | None] = None
    """Interpreter of a virtual environment that has the environment's packages (`make environments`); None:
    this one."""
    processes: Live[int] = Field(1, ge=1)
    """Processes started on this machine."""
    max_episodes: Live[int] = Field(256, ge=1)
    """Episodes under way in one process; beyond it one is refused with 429 and Retry-After."""
    max_turns: Fixed[int] = Field(16, ge=1)
    """Turns of an episode; one that takes more ends as truncated."""
    max_tokens: Fixed[int | None] = Field(None, ge=2)
    """Tokens of an episode, prompt and environment included; None: the student's context."""
    call_timeout_seconds: Live[float] = Field(60.0, gt=0)
    """Time limit of the environment for one turn; one that exceeds it costs the episode."""
    episode_timeout_seconds: Live[float | None] = Field(None, gt=0)
    """Time limit of an episode, generation included, by `rollout.on_timeout`; None: no limit."""
    threads: Live[int | None] = Field(1, ge=1)
    """OpenMP's threads in each process."""


class EnvironmentService(Settings):
    """The `--config` of an environment service."""

    name: str
    """Name of its section."""
    run: str
    """Name of the run."""
    environment: EnvironmentConfig
    """Its section."""
    student: ModelSource
    """Its tokenizer makes the tokens."""
    stop_token_ids: list[int] = []
    """Of the run: they end a turn besides the tokenizer's own end."""
