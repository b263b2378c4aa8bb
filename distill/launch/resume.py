"""What may change between a stop and `--resume`, key by key; a test holds the tables complete.

A changed key takes effect, or is refused, or is judged by what it gives: prompts, held-out prompts and
DeepSpeed's configuration are compared themselves (`content`), wherever they come from. `*`: a teacher's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from blake3 import blake3

from distill.config import RunConfig
from distill.prompts.held_out import PromptSplit, sample_prompts
from student_trainer.deepspeed_json import deepspeed_config
from sync.errors import ConfigError


def _keys(names: Mapping[str, str]) -> frozenset[str]:
    return frozenset(f"{section}.{name}" for section, all_ in names.items() for name in all_.split())


TAKES_EFFECT: Final = _keys(
    {
        "run": "folder steps grace_seconds start_seconds health_timeout_seconds max_loaded_teachers restarts "
        "min_free_disk_gib",
        "student": "trust_remote_code urls host port devices env replicas dtype engine_args",
        "teachers.*": "trust_remote_code urls host port devices env engine engine_url replicas dtype device "
        "attention max_length batch_tokens head_chunk queue_tokens wire_dtype engine_args threads "
        "idle_unload_seconds",
        "rollout": "request_size max_in_flight completion_timeout_seconds stall_timeout_seconds on_timeout "
        "on_max_tokens max_attempts",
        "buffer": "max_staleness score_batch fsync",
        "buffer.late": "type seconds hard_limit half_life",
        "guard": "max_reverse_kl max_grad_norm min_entropy max_truncation_rate patience action max_rollbacks "
        "repeats bad_answers",
        "trainer": "ranks hostfile launcher_args devices env lr warmup_steps lr_schedule attention "
        "activation_checkpointing head_chunk micro_batch_tokens checkpoint_every checkpoint_minutes "
        "keep_checkpoints threads init_timeout_seconds",
        "content": "deepspeed",
        "weights": "transport publish_every anchor_share keep_anchors codec kv_on_swap timeout_seconds",
        "weights.store": "type path bucket prefix create url options",
        "evaluation": "every batch metric patience threads device",
        "evaluation.placement": "urls host port devices env",
        "preflight": "sequences score_tolerance mismatch_tolerance longest",
        "tracking": "wandb project entity tags",
        "controller": "host port url trainer",
    }
)
BY_CONTENT: Final = frozenset({"evaluation"}) | _keys(
    {
        "student": "chat_template",
        "prompts": "type path field source_field answer_field template name split revision",
        "trainer": "deepspeed overrides",
        "evaluation": "prompts",
    }
)
_REASONS: Final[dict[str, dict[str, str]]] = {
    "the journal's rollouts and the order of the prompts are of it": {
        "run": "name seed",
        "rollout": "per_prompt batch",
    },
    "the checkpoint was trained from it": {"student": "path revision"},
    "rollouts in the journal were scored by it": {
        "teachers": "*",
        "teachers.*": "path revision chat_template follow_student_every route route_by prompt_transform",
    },
    "rewards in the journal were given by it": {"prompts": "reward_fn task options"},
    "rollouts in the journal were sampled and cut by it, and evaluations are compared at it": {
        "rollout": "max_tokens temperature top_p stop_token_ids"
    },
    "it is what the weights so far were optimised for": {
        "objective": "type k beta alpha coefficient teacher_coefficients rho_cap drop_rho_outside discount "
        "on_policy max_supervised_tokens teacher_temperature task",
        "objective.task": "baseline rho_cap",
    },
    "the checkpoint holds weights and an optimizer of that form": {
        "trainer": "lora",
        "trainer.lora": "rank alpha dropout target_modules",
        "content.deepspeed": "optimizer.type bf16 fp16",
    },
    "other prompts would be trained on, some of them held out or trained on before": {"content": "prompts"},
    "evaluations before and after would be of different prompts": {"content": "held_out"},
}
REFUSED: Final = {key: reason for reason, names in _REASONS.items() for key in _keys(names)}


def content(config: RunConfig, split: PromptSplit) -> dict[str, Any]:
    """What a run trains on and with, wherever it comes from; of prompts without end, a sample is digested."""
    endless = not hasattr(split.train, "__len__")
    rows = sample_prompts(split._replace(held_out=[])) if endless else split.train
    deepspeed = deepspeed_config(config.trainer)
    deepspeed["optimizer"]["params"].pop("lr")  # trainer.lr says it
    return {
        "prompts": _digest(rows, "the first of endless" if endless else ""),
        "held_out": _digest(split.held_out) if split.held_out else None,
        "deepspeed": deepspeed,
    }


def _digest(prompts: Any, which: str = "") -> str:
    """Number and BLAKE3 of prompts, with all that training and judging know of them."""
    state, count = blake3(), len(prompts)
    for index in range(count):
        state.update(msgspec.msgpack.encode(prompts[index]))
    return " ".join(filter(None, [which, f"{count} prompts,", state.hexdigest(length=16)]))


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for every key that changed between two records of a run. Raises ConfigError for a refused one.

    What one record lacks (a newer field, prompts without an evaluator) is not compared with the other's.
    """
    lines, refused = [], []
    for path, old, new in _differences(before, now):
        key, decision = ".".join(path).removeprefix("content."), decide(path)
        reason = REFUSED.get(decision)
        if path[0] == "content" and path[1:] in (("prompts",), ("held_out",)) and None in (old, new):
            continue
        said = "takes effect" if decision in TAKES_EFFECT else "same content"
        line = f"{key}: {old!s:.80} -> {new!s:.80}"
        refused.append(f"{line} (refused: {reason})") if reason else lines.append(f"{line} ({said})")
    if refused:
        raise ConfigError(
            "\n".join(["the run cannot be resumed with these changes:", *refused])
            + "\nundo them, or start a new run under another run.name"
        )
    return lines


def decide(path: tuple[str, ...]) -> str:
    """The key of the tables that decides about a changed one: itself, or what it is inside of."""
    parts = [*path[:1], "*", *path[2:]] if path[0] == "teachers" else [*path]
    for length in range(len(parts), 0, -1):
        key = ".".join(parts[:length])
        if key in TAKES_EFFECT or key in BY_CONTENT or key in REFUSED:
            return key
    raise AssertionError(f"{'.'.join(path)} is in none of the tables")


def _differences(
    before: Any, now: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Path and both values of what differs; a table that one side lacks is one difference."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), (*path, key))
    elif before != now:
        yield path, before, now
