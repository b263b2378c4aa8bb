"""Tasks that generate prompts and reward completions: one module each, found by name.

A task module has `make(**options) -> Task`; "package.module:function", or an entry point of distill.tasks,
names such a function of any module. A module whose models can be made from scratch also has
`make_models(folder, seed) -> Models` (see `distill.tasks.sort_letters`).
"""

from __future__ import annotations

import pkgutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from sync.base.errors import ConfigError, DistillError
from sync.base.own_code import registered, resolve

HELD_OUT_SHARE: Final = 16
"""One text in so many is never trained on."""


class TaskPrompt(NamedTuple):
    """One prompt that a task made."""

    text: str
    token_ids: Sequence[int] | None = None
    """Ids of the prompt; None: `text` is encoded with the student's tokenizer."""
    answer: str | None = None


class RewardedPrompt(Protocol):
    """A prompt as a task's check reads it."""

    @property
    def text(self) -> str: ...
    @property
    def answer(self) -> str | None: ...


class Task(Protocol):
    """Prompts by number, and rewards of completions. Pure: the same (seed, index) gives the same prompt."""

    def prompt(self, seed: int, index: int) -> TaskPrompt:
        """Training prompt `index` >= 0."""
        ...

    def held_out(self, seed: int, index: int) -> TaskPrompt:
        """Held-out prompt `index`: no seed ever trains on it."""
        ...

    def reward(self, prompt: RewardedPrompt, completion: Sequence[int]) -> Any:
        """Reward of the completion's token ids, end token included: a bool, a number, or a pair of that and
        the answer as text, as of `prompts.reward_fn`. It passes from `prompts.pass_threshold` on."""
        ...


class Models(NamedTuple):
    """Folders that `from_pretrained` loads, tokenizer included."""

    teacher: Path
    student: Path


def is_held_out(text: str) -> bool:
    """Which side of the split a text belongs to, by its hash alone, whatever the seed."""
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def load(name: str, options: dict[str, Any] | None = None) -> Task:
    """The task called `name`: a module of this package, any "package.module", or "package.module:function".

    Raises ConfigError when there is none, or when it does not take `options`.
    """
    built_in = any(name == module.name for module in pkgutil.iter_modules(__path__))
    try:
        named = f"{__name__}.{name}" if built_in else registered(name, "distill.tasks")
        make = resolve(named if ":" in named else f"{named}:make")
    except Exception as error:  # importing runs the user's own code
        raise ConfigError(
            f"prompts.task {name!r} cannot be loaded ({type(error).__name__}: {error}): "
            'name a module of distill.tasks, "package.module" with make(**options), another function as '
            '"package.module:function", or an entry point of distill.tasks'
        ) from error
    try:
        task: Task = make(**(options or {}))
    except DistillError:
        raise
    except Exception as error:
        raise ConfigError(
            f"prompts.options do not fit task {name!r} ({type(error).__name__}: {error}): give those that "
            "its make(**options) takes"
        ) from error
    if lacking := [name for name in ("prompt", "held_out", "reward") if not hasattr(task, name)]:
        raise ConfigError(
            f"prompts.task {name!r} made a {type(task).__name__} without {', '.join(lacking)}: a task has "
            "prompt(seed, index), held_out(seed, index) and reward(prompt, completion)"
        )
    return task
