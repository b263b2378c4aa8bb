"""What disk a run needs, from its shapes: at once, and more with every token.

at once        checkpoints, published versions, mirrors of replicas, what training leaves: `fixed`
               journal since the oldest kept checkpoint: `journal`
with time      traces of rollouts, ledger, metrics: SLOPE bytes a rollout, and nothing else
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distill.config import RunConfig
from distill.launch.run_folder import GIB
from distill.preflight.checks import text_config
from student_trainer.deepspeed_json import deepspeed_config
from student_trainer.objectives.config import needs, student_topk
from sync.errors import ConfigError
from sync.settings import ModelSource
from sync.snapshots import checkpoint

SLOPE: Final = 100
"""Bytes a rollout that stay for good: trace, ledger, a share of its step's lines (`distill bench soak`)."""
ASSUMED_RATE: Final = 1000.0
"""Completion tokens a second, where nobody knows."""
DAY: Final = 86400


@dataclass(frozen=True)
class Needs:
    """Bytes."""

    checkpoint: int
    """One."""
    fixed: int
    """Everything but the journal, at once."""
    token: int
    """Of the journal, per completion token, while a restart may need it."""
    held_tokens: float
    """Completion tokens whose arrays are in the journal at once."""

    @property
    def journal(self) -> float:
        return self.token * self.held_tokens


def estimate(config: RunConfig, rate: float = ASSUMED_RATE) -> Needs:
    """What the run needs at `rate` completion tokens a second. Raises ConfigError for an unreadable model."""
    parameters, trainer, weights = count_parameters(config.student), config.trainer, config.weights
    item = 2 if deepspeed_config(trainer).get("bf16", {}).get("enabled") else 4
    model = item * parameters
    one = model + (0 if trainer.lora else 12 * parameters)  # fp32 master and two moments
    mirrors = 2 * (0 if config.student.urls else config.student.replicas) + 2 * (
        config.evaluation is not None
    )
    store = 0 if weights.transport == "broadcast" else (weights.keep_anchors + 1) * (1 + weights.anchor_share)
    fixed = (trainer.keep_checkpoints + 1) * one + (store + mirrors + 2) * model
    seconds = 60 * trainer.checkpoint_minutes
    steps = trainer.checkpoint_every * config.rollout.batch * config.rollout.max_tokens
    apart = min([tokens for tokens in (rate * seconds, steps) if tokens], default=0.0)
    everything = config.run.steps * config.rollout.batch * config.rollout.max_tokens
    held = min((trainer.keep_checkpoints + 1) * apart or everything, everything)
    return Needs(one, int(fixed), bytes_per_token(config), held)


def bytes_per_token(config: RunConfig) -> int:
    """Journal bytes of a completion token; prompts, which come once a rollout, are left out."""
    want, own = needs(config.objective), student_topk(config.objective)
    here: list[ModelSource] = [teacher for teacher in config.teachers.values() if not teacher.urls] or [
        config.student
    ]
    width = max(map(_width, here)) if want.hidden else 0
    id_logprob_score = 4 + 4 + 4
    return id_logprob_score + 4 * want.entropy + (8 * want.topk + 4 if want.topk else 0) + 8 * own + 2 * width


def _width(source: ModelSource) -> int:
    return int(text_config(source).hidden_size)


def count_parameters(source: ModelSource) -> int:
    """Parameters of a folder's tensors; of a Hub id, those of a model made from its config."""
    folder = Path(source.path)
    if any(folder.glob("*.safetensors")):
        places = checkpoint.tensors(folder).values()
        return sum(place.nbytes // checkpoint.BITS[place.kind].itemsize for place in places)
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_config(source))
    return sum(parameter.numel() for parameter in model.parameters())


def lines(config: RunConfig, found: Needs, rate: float = ASSUMED_RATE) -> list[str]:
    """The estimate in words."""
    trainer, day = config.trainer, rate * DAY
    completion = config.rollout.max_tokens
    return [
        f"disk at once: {_gib(found.fixed)} for {trainer.keep_checkpoints} + 1 checkpoints of "
        f"{_gib(found.checkpoint)}, published versions and mirrors, and {_gib(found.journal)} of journal",
        f"journal: {found.token:,} bytes a token, {_gib(found.token * 1e6)} a million tokens, archived to "
        f"{SLOPE} bytes a rollout once {trainer.keep_checkpoints} checkpoints cover it",
        f"a day at {rate:,.0f} tokens/s: {_gib(found.token * day)} written to the journal, "
        f"{_gib(SLOPE * day / completion)} or more stay ({completion} tokens a rollout or less)",
    ]


def check_room(config: RunConfig, found: Needs) -> str | None:
    """Raise ConfigError when not even checkpoints and versions fit; a warning when the journal may not."""
    path = next(one for one in (config.run_dir, *config.run_dir.absolute().parents) if one.is_dir())
    free = shutil.disk_usage(path).free
    if found.fixed > free:
        raise ConfigError(
            f"{path} has {_gib(free)} free, and checkpoints, published versions and mirrors of this run take "
            f"{_gib(found.fixed)} at once: set run.folder to another disk, or lower trainer.keep_checkpoints "
            "or weights.keep_anchors"
        )
    if found.fixed + found.journal <= free:
        return None
    return (
        f"{path} has {_gib(free)} free, and this run may take {_gib(found.fixed + found.journal)} at once: "
        "lower trainer.checkpoint_minutes, so that less of the journal is held, or take another disk"
    )


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count < 100 * GIB else f"{count / GIB:,.0f} GiB"
