"""Which fields of a DeepSpeed JSON nobody reads: DeepSpeed refuses misspelt ones in some sections only.

There is no list of fields here. DeepSpeed reads the configuration as it does in the trainer, from a table
that notes what it is asked for: a field that was not asked for would be ignored. Parameters of the optimizer
are those of its constructors.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from sync.errors import ConfigError


class Asked(dict[str, Any]):
    """A table that notes which of its keys somebody asked for, whether they are there or not."""

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__({k: Asked(v) if isinstance(v, dict) else v for k, v in table.items()})
        self.names: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        """Also keeps `**table` from going past `__getitem__`."""
        return super().__iter__()

    def keys(self) -> Any:
        """Asked for one by one, as `"x" in table.keys()` does, or all by who goes through them."""
        return _Keys(self)

    def items(self) -> Any:
        """Whoever takes all has asked for all."""
        self.names |= set(self)
        return super().items()

    def __copy__(self) -> Asked:
        return self


class _Keys:
    def __init__(self, table: Asked) -> None:
        self._table = table

    def __contains__(self, key: object) -> bool:
        return key in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)


def refuse_ignored(config: dict[str, Any], source: str) -> None:
    """Raise ConfigError for a field that DeepSpeed refuses or would ignore, with the nearest known one."""
    silenced = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the trainer says it again
    try:
        from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

        asked = Asked(config)
        try:
            DeepSpeedConfig(asked)
        except ValidationError as error:
            raise ConfigError(f"{source}: {'; '.join(_refused(error))}") from None
        except (DeepSpeedConfigError, ValueError, AssertionError, TypeError) as error:
            raise ConfigError(f"{source} is refused by DeepSpeed: {error}") from None
    finally:
        logging.disable(silenced)
    optimizer = asked["optimizer"]
    problems = [*_ignored(asked), *_unknown(optimizer, _parameters(optimizer["type"]))]
    if problems:
        raise ConfigError(f"{source}: {'; '.join(problems)}")


def _refused(error: ValidationError) -> Iterator[str]:
    """What a section of DeepSpeed's that checks itself says of each field."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    sections = {section.__name__: section for section in DeepSpeedConfigModel.__subclasses__()}
    known = set(sections[error.title].model_fields) if error.title in sections else set()
    for detail in error.errors():
        name = ".".join(map(str, detail["loc"]))
        remedy = _nearest(name, known) if detail["type"] == "extra_forbidden" else ""
        yield f"{name} = {detail['input']!r:.80} is refused by {error.title}: {detail['msg']}{remedy}"


def _ignored(table: Asked, path: str = "") -> Iterator[str]:
    for name, value in dict.items(table):
        if name not in table.names and table.names:
            yield f"{path}{name} is not read by DeepSpeed{_nearest(name, table.names)}"
        elif isinstance(value, Asked) and f"{path}{name}" != "optimizer.params":
            yield from _ignored(value, f"{path}{name}.")


def _parameters(optimizer: str) -> set[str]:
    """What the constructors behind an optimizer's name take. Raises ConfigError when there is none."""
    import torch
    from deepspeed.ops import adagrad, adam, lamb, lion
    from deepspeed.runtime import config
    from deepspeed.runtime.engine import DeepSpeedEngine

    name = optimizer.lower()
    kinds = {name, "adam"} if name in (config.ADAMW_OPTIMIZER, config.MUON_OPTIMIZER) else {name}
    names = {f"{maker}{kind}" for maker in ("", "fused", "deepspeedcpu") for kind in kinds}
    classes = {n: c for m in (torch.optim, adagrad, adam, lamb, lion) for n, c in vars(m).items()}
    known = {p for n, c in classes.items() if n.lower() in names for p in inspect.signature(c).parameters}
    if "adam" in kinds:
        known |= {config.TORCH_ADAM_PARAM, config.ADAM_W_MODE}
    if name == config.MUON_OPTIMIZER:
        known |= {*DeepSpeedEngine._MUON_HALF_KEYS, "muon_lr", "adam_lr"}
    if not known:
        choice = {n for n, c in classes.items() if inspect.isclass(c)} | set(config.DEEPSPEED_OPTIMIZERS)
        raise ConfigError(f"optimizer.type {optimizer!r} is unknown{_nearest(optimizer, choice)}")
    return known - {"params", "model_params"}


def _unknown(optimizer: dict[str, Any], known: set[str]) -> Iterator[str]:
    for name in sorted(set(optimizer["params"]) - known):
        yield f"optimizer.params.{name} is unknown to {optimizer['type']}{_nearest(name, known)}"


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else f": known here are {', '.join(sorted(known))}"
