"""On-policy distillation of language models: the functions behind the commands.

    from distill import load_config, preflight, run

    config = load_config("configs/user_run.toml", ["run.steps=100"])
    preflight(config, say=print)
    print(run(config)["after"])

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.api import evaluate, load_config, load_run, plan, preflight, run
    from distill.config import RunConfig as Config
    from sync.base.errors import DistillError

__all__ = ["Config", "DistillError", "evaluate", "load_config", "load_run", "plan", "preflight", "run"]
_ELSEWHERE = {"Config": ("distill.config", "RunConfig"), "DistillError": ("sync.base.errors", "DistillError")}
"""Name → module and name there; all others are of `distill.api`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _ELSEWHERE.get(name, ("distill.api", name))
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
