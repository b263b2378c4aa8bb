"""config.json of a run: how it ran, and what of that a resume may change.

A changed key takes effect, or is refused, or is judged by its content: prompts, held-out prompts and
DeepSpeed's configuration are compared themselves (`content`), wherever they come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from distill.config import RunConfig
from distill.config.laws import decide
from distill.config.loading import CONFIG_FORMAT, PUT_BACK, recorded, validate
from distill.prompts.sources import PromptSplit, sample_prompts
from distill.prompts.stream import Mixture, Prompt, PromptSource
from student_trainer.deepspeed_json import deepspeed_config
from sync.base import secrets
from sync.base.errors import ConfigError
from sync.base.settings import LIVE

_FORM: Final = "refused: weights and optimizer in the checkpoint have that form"
_OF_CONTENT: Final = {
    **dict.fromkeys(("deepspeed.optimizer.type", "deepspeed.bf16", "deepspeed.fp16"), _FORM),
    "prompts": "refused: other prompts would be trained on, some of them held out or trained on before",
    "held_out": "refused: evaluations before and after would use different prompts",
}
"""Key below `content` → what a resume does with a change of it, and of all below it; else it takes effect."""
_OPTIONAL: Final = ("prompts", "held_out")
"""Parts of `content` that a run may not have."""
_DIGESTED: Final = 8
"""First fields of a Prompt, which are in every digest; of later ones those that a prompt has, so that a new
field does not make the prompts of an earlier release look like others."""


def record_of(config: RunConfig, content: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json of a run holds; secrets are hidden."""
    hidden: dict[str, Any] = secrets.hide(config.model_dump(mode="json"))
    return {**hidden, "format": CONFIG_FORMAT, "content": secrets.hide(content)}


def resumed(run_dir: Path, record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What config.json is to hold when a run goes on with `record`, and a line for every change.

    What this start has no prompts of keeps its digest, for the next one. Raises ConfigError when a run must
    not change so, or when what it ran with is not known; changes nothing.
    """
    path, kept = run_dir / "config.json", recorded(run_dir)
    if not isinstance(kept.get("content"), dict):
        raise ConfigError(f"{path} has no table 'content', which every run writes: {PUT_BACK}")
    ran = {name: table for name, table in kept.items() if name not in ("content", "format")}
    before = validate(ran, str(path)).model_dump(mode="json")
    lines = compare({**before, "format": CONFIG_FORMAT, "content": kept["content"]}, record)
    content = {
        name: kept["content"][name]
        for name in _OPTIONAL
        if record["content"].get(name) is None and name in kept["content"]
    }
    return {**record, "content": {**record["content"], **content}}, lines


def content(config: RunConfig, split: PromptSplit) -> dict[str, Any]:
    """Digests of what a run trains on and with, wherever it comes from; of endless prompts, of a sample."""
    deepspeed = deepspeed_config(config.trainer)
    deepspeed["optimizer"]["params"].pop("lr")  # trainer.lr says it
    return {
        "prompts": _content(split.train),
        "held_out": _digest(split.held_out) if split.held_out else None,
        "deepspeed": deepspeed,
    }


def _content(source: PromptSource) -> Any:
    """Digest of a source's rows, of a mixture by part; of endless prompts, of a sample."""
    if isinstance(source, Mixture):
        return {name: _content(part) for name, part in source.parts.items()}
    if isinstance(source, Sized):
        return _digest(source)
    return _digest(sample_prompts(PromptSplit(source, [], None)), "the first of endless")


def _digest(prompts: Any, which: str = "") -> str:
    state, defaults, fields = blake3(), Prompt.__struct_defaults__, len(Prompt.__struct_fields__)
    for index in range(len(prompts)):
        values = [*msgspec.structs.astuple(prompts[index])]
        while len(values) > _DIGESTED and values[-1] == defaults[len(values) - fields - 1]:
            values.pop()
        state.update(msgspec.msgpack.encode(values))
    return f"{which} {len(prompts)} prompts, {state.hexdigest(length=16)}".strip()


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for every key that changed between two records of a run. Raises ConfigError for a refused one.

    What one record lacks (a newer field, prompts without an evaluator) is not compared with the other's.
    """
    lines: list[str] = []
    refused: list[str] = []
    for path, old, new in _differences(before, now):
        if path in [("content", name) for name in _OPTIONAL] and None in (old, new):
            continue
        decision = _decide(path)
        line = f"{'.'.join(path).removeprefix('content.')}: {old!s:.80} -> {new!s:.80} ({decision})"
        (refused if decision.startswith("refused") else lines).append(line)
    if refused:
        raise ConfigError(
            "\n".join(["the run cannot be resumed with these changes:", *refused])
            + "\nundo them, or start a new run under another run.name"
        )
    return lines


def _decide(path: tuple[str, ...]) -> str:
    if path[0] != "content":
        return decide(RunConfig, path)
    key = ".".join((*path[1:], ""))
    return next((words for part, words in _OF_CONTENT.items() if key.startswith(f"{part}.")), LIVE.words)


def _differences(
    before: Any, now: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Path and both values of what differs; a table that one side lacks is one difference."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), (*path, key))
    elif before != now:
        yield path, before, now
