"""DeepSpeed's JSON with the user's overrides over it, the trainer's rules for it, and fields it would ignore.

DeepSpeed refuses misspelt fields in some sections only. There is no list of fields here: DeepSpeed reads the
configuration as it does in the trainer, from a table that records every look-up, and a field that was never
looked up would be ignored. Parameters of the optimizer are those of its constructors.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from student_trainer.config import TrainerSettings
from sync.base.errors import ConfigError

OWN_AUTO: Final = frozenset(
    ("keep_in_fp32_modules", "select_strategy", "select_interval", "update_interval", "stages", "job_name")
)
"""Fields in which DeepSpeed itself reads "auto", and a name that may be any word."""


def deepspeed_config(settings: TrainerSettings) -> dict[str, Any]:
    """DeepSpeed's JSON under the overrides, with trainer.lr. Imports deepspeed.

    Raises ConfigError for what the trainer cannot work with, and for what DeepSpeed refuses or would ignore.
    """
    path = settings.deepspeed
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"trainer.deepspeed {path} cannot be read ({error.strerror})") from None
    except ValueError as error:  # malformed JSON, or bytes that are no UTF-8
        raise ConfigError(f"trainer.deepspeed {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"trainer.deepspeed {path} holds {type(config).__name__}: it must be a JSON object")
    _lay_over(config, settings.overrides, path)
    source = f"trainer.deepspeed {path}{' with trainer.overrides' if settings.overrides else ''}"
    if problem := next(_problems(config, settings), None):
        raise ConfigError(f"{source}: {problem}")
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, **config}
    optimizer, params = config["optimizer"]["type"], config["optimizer"].setdefault("params", {})
    params["lr"] = settings.lr
    problems = list(_ignored(_read_by_deepspeed(config, source)))  # first: its import is the silenced one
    known = _parameters(optimizer)
    for name in sorted(set(params) - known):
        problems.append(f"optimizer.params.{name} is unknown to {optimizer}{_nearest(name, known)}")
    if problems:
        raise ConfigError(f"{source}: {'; '.join(problems)}")
    return config


def in_bf16(config: Mapping[str, Any]) -> bool:
    """Whether the model computes with weights in bf16; else they are fp32."""
    return bool(_fields(config).get(f"{bf16_section(config)}.enabled"))


def bf16_section(config: Mapping[str, Any]) -> str:
    """The section that says it: DeepSpeed reads the old name where the new one is not there."""
    return "bfloat16" if "bfloat16" in config and "bf16" not in config else "bf16"


def offloads(config: Mapping[str, Any], name: str) -> bool:
    """Whether ranks keep "param", or "optimizer" with the gradients, outside of the GPU."""
    return _fields(config).get(f"zero_optimization.offload_{name}.device") in ("cpu", "nvme")


def _lay_over(section: dict[str, Any], over: Mapping[str, Any], source: Path) -> None:
    """Put `over` into `section`, in place and table by table; a key's dots lead into tables too."""
    for path, value in over.items():
        *parents, last = path.split(".")
        inner = section
        for name in [*parents, last] if isinstance(value, Mapping) else parents:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"trainer.overrides {path!r}: {name!r} is {inner!r} in {source}, not a section"
                )
        if isinstance(value, Mapping):
            _lay_over(inner, value, source)
        else:
            inner[last] = value


def _fields(table: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in a table by its path, such as "zero_optimization.stage"; the sections too."""
    fields = dict(table)
    for name, value in table.items():
        if isinstance(value, dict):
            fields |= {f"{name}.{path}": inner for path, inner in _fields(value).items()}
    return fields


def _problems(config: dict[str, Any], settings: TrainerSettings) -> Iterator[str]:
    """What the trainer cannot work with."""
    fields = _fields(config)
    if (stage := fields.get("zero_optimization.stage")) != 3:
        yield f"zero_optimization.stage is {stage}: weights are published from ZeRO-3 shards, set 3"
    yield from _decided_elsewhere(fields, settings)
    names = ((path, path.rpartition(".")[2]) for path, value in fields.items() if value == "auto")
    if unset := [path for path, name in names if name not in OWN_AUTO]:
        yield (
            f'{", ".join(unset)} is "auto", which DeepSpeed ignores (Hugging Face\'s Trainer fills it in): '
            "write the value, or leave it out"
        )
    for section in ("bf16", "bfloat16", "fp16"):
        if (value := fields.get(f"{section}.enabled", False)) not in (True, False):
            yield f"{section}.enabled is {value!r}: write true or false"
    if fields.get("fp16.enabled"):
        yield "fp16 skips steps that overflow: enable bf16, or neither for fp32"
    for old, section in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if value := fields.get(f"zero_optimization.{old}"):
            yield (
                f"zero_optimization.{old} is {value!r}, a deprecated name: leave it out, and set "
                f'zero_optimization.{section}.device to "cpu"'
            )
    if fields.get("zero_optimization.offload_param.device") == "nvme":
        yield (
            "zero_optimization.offload_param.device is 'nvme': weights are published from shards in memory, "
            "set cpu, or leave offload_param out"
        )
    if not isinstance(name := fields.get("optimizer.type"), str) or not name:
        yield f"there is no optimizer section with a type (it is {name!r}): name one, such as AdamW"
    if not isinstance(params := fields.get("optimizer.params", {}), dict):
        yield f"optimizer.params is {params!r}: it must be a section"
    if settings.expert_parallel > 1:
        if config.get("use_data_before_expert_parallelism"):
            yield "use_data_before_expert_parallelism is set: neighbouring ranks share experts, leave it out"
        for name in ("param", "optimizer"):
            if offloads(config, name):
                yield (
                    f"zero_optimization.offload_{name} is set and trainer.expert_parallel is "
                    f"{settings.expert_parallel}: AutoEP is not tested with offload, leave one out"
                )


def _decided_elsewhere(fields: Mapping[str, Any], settings: TrainerSettings) -> Iterator[str]:
    """Problems with fields whose value follows from a key of the run's configuration."""
    decided_by = {
        "expert_parallel": (None, "trainer.expert_parallel"),
        "sequence_parallel_size": (None, "trainer.sequence_parallel"),
        "gradient_accumulation_steps": (1, "rollout.batch"),
        "train_micro_batch_size_per_gpu": (1, "trainer.micro_batch_tokens"),
        "train_batch_size": (None, "rollout.batch"),
        "scheduler": (None, "trainer.lr_schedule"),
        "lr": (settings.lr, "trainer.lr"),
        "optimizer.params.lr": (settings.lr, "trainer.lr"),
    }
    for name, (harmless, key) in decided_by.items():
        if (value := fields.get(name, harmless)) != harmless:
            yield f"{name} is {value!r}: {key} decides this alone: set {key} and leave {name} out"


# --- fields that DeepSpeed would ignore ---------------------------------------------------------------------


class _Recorded(dict[str, Any]):
    """A table that records which of its keys were looked up, whether they are there or not."""

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__({k: _Recorded(v) if isinstance(v, dict) else v for k, v in table.items()})
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
        """The same as before; being defined here keeps `**table` from going past `__getitem__`."""
        return super().__iter__()

    def keys(self) -> Any:
        """Looked up one by one, as by `"x" in table.keys()`, or all at once by iteration."""
        return self

    def items(self) -> Any:
        """Looks up all."""
        self.names |= set(self)
        return super().items()

    def __copy__(self) -> _Recorded:
        return self


def _read_by_deepspeed(config: dict[str, Any], source: str) -> _Recorded:
    """The configuration after DeepSpeed has read it. Raises ConfigError with DeepSpeed's reason."""
    silenced, recorded = logging.root.manager.disable, _Recorded(config)
    logging.disable(logging.WARNING)  # the trainer logs it again
    try:
        from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

        try:
            DeepSpeedConfig(recorded)
        except (DeepSpeedConfigError, ValueError, AssertionError, TypeError) as error:
            raise ConfigError(f"{source} is refused by DeepSpeed: {error}") from None
    finally:
        logging.disable(silenced)
    return recorded


def _ignored(table: _Recorded, path: str = "") -> Iterator[str]:
    for name, value in dict.items(table):
        if name not in table.names and table.names:
            yield f"{path}{name} is not read by DeepSpeed{_nearest(name, table.names)}"
        elif isinstance(value, _Recorded) and f"{path}{name}" != "optimizer.params":
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


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else f": known here are {', '.join(sorted(known))}"
