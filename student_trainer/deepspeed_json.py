"""DeepSpeed's JSON with the user's overrides over it, and what the trainer needs of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from student_trainer.config import TrainerSettings
from sync.errors import ConfigError


def deepspeed_config(settings: TrainerSettings) -> dict[str, Any]:
    """DeepSpeed's JSON under the overrides, with trainer.lr. Imports deepspeed.

    Raises ConfigError for what the trainer cannot work with, and for what DeepSpeed would ignore.
    """
    from student_trainer.deepspeed_fields import refuse_ignored

    config = _read(settings.deepspeed)
    _lay_over(config, settings.overrides, settings.deepspeed)
    source = f"trainer.deepspeed {settings.deepspeed}"
    source = f"{source} with trainer.overrides" if settings.overrides else source
    _check(config, source)
    _check_rate(config, settings, source)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1} | config
    params = config["optimizer"].get("params", {}) | {"lr": settings.lr}
    config["optimizer"] = config["optimizer"] | {"params": params}
    refuse_ignored(config, source)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"trainer.deepspeed {path} cannot be read ({error.strerror}): name a DeepSpeed JSON file"
        ) from None
    except ValueError as error:  # malformed JSON, or bytes that are no UTF-8
        raise ConfigError(f"trainer.deepspeed {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"trainer.deepspeed {path} holds {type(config).__name__}: it must be a JSON object")
    return config


def _lay_over(section: dict[str, Any], over: Mapping[str, Any], source: Path) -> None:
    """Put `over` into `section`, in place and table by table; a key's dots lead into tables too."""
    for path, value in over.items():
        *parents, last = path.split(".")
        inner = _inside(section, parents, path, source)
        if isinstance(value, Mapping):
            _lay_over(_inside(inner, [last], path, source), value, source)
        else:
            inner[last] = value


def _inside(section: dict[str, Any], names: list[str], path: str, source: Path) -> dict[str, Any]:
    for name in names:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"trainer.overrides {path!r}: {name!r} is {section!r} in {source}, not a section"
            )
    return section


def _check(config: dict[str, Any], source: str) -> None:
    zero, fp16 = (_table(config, name) for name in ("zero_optimization", "fp16"))
    if zero.get("stage") != 3:
        raise ConfigError(
            f"{source}: zero_optimization.stage is {zero.get('stage')}: weights are published from ZeRO-3 "
            "shards, set 3"
        )
    if fp16.get("enabled"):
        raise ConfigError(f"{source}: fp16 skips steps that overflow: enable bf16, or neither for fp32")
    if _table(zero, "offload_param").get("device") == "nvme":
        raise ConfigError(
            f"{source}: zero_optimization.offload_param.device is 'nvme': weights are published from "
            "shards in memory, set cpu, or leave offload_param out"
        )
    for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        if config.get(name, 1) != 1:
            raise ConfigError(
                f"{source}: {name} is {config[name]}: batches come from the controller, leave it 1"
            )
    if "train_batch_size" in config:
        raise ConfigError(
            f"{source}: train_batch_size is the controller's: set rollout.batch and leave it out"
        )
    if not _table(config, "optimizer").get("type"):
        raise ConfigError(f"{source} has no optimizer section with a type: name one, such as AdamW")


def _check_rate(config: dict[str, Any], settings: TrainerSettings, source: str) -> None:
    """Raise ConfigError where another learning rate or schedule than [trainer]'s is given."""
    if "scheduler" in config:
        raise ConfigError(
            f"{source}: scheduler is {_table(config, 'scheduler').get('type')!r}: the schedule is set by "
            "trainer.warmup_steps and trainer.lr_schedule alone: set those and leave it out"
        )
    params = _table(_table(config, "optimizer"), "params")
    for key, table in {"lr": config, "optimizer.params.lr": params}.items():
        if (lr := table.get("lr", settings.lr)) != settings.lr:
            raise ConfigError(
                f"{source}: {key} is {lr} and trainer.lr {settings.lr}: the learning rate is set by "
                f"trainer.lr alone: set trainer.lr = {lr}, or leave {key} out"
            )


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A section; empty where there is none."""
    found = config.get(name, {})
    return found if isinstance(found, dict) else {}
