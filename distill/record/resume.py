"""What a start of a run goes on from: one function of its folder and of the start's configuration.

    run.db, arrays/ ──▶ RunState ──────────────────┐
    checkpoints/latest ──▶ where the trainer begins ┤
    config.json ──▶ what changed, or a refusal ─────┼▶ Resume ──▶ Controller; `distill run --resume --dry-run`
    stream-*.json ──▶ where blocks begin ───────────┤
    metrics.jsonl ──▶ seconds of earlier starts ────┘

Each source has a format number; one that another release wrote is refused. The audit reads the same sources.

A changed key of config.json takes effect, or is refused, or is judged by its content: prompts, held-out
prompts and DeepSpeed's configuration are compared themselves (`content`), wherever they come from.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sized
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, NamedTuple

import msgspec
from blake3 import blake3

from distill.buffer import Rules, rules
from distill.config import RunConfig
from distill.config.laws import decide
from distill.config.loading import CONFIG_FORMAT, PUT_BACK, recorded, validate
from distill.metrics.results import Earlier, earlier_starts
from distill.prompts.sources import PromptSplit, sample_prompts
from distill.prompts.stream import Mixture, Prompt, PromptSource, PromptStream
from distill.prompts.streaming import Starts, saved_starts
from distill.record.changes import Opened
from distill.record.journal import JOURNAL
from distill.record.load import load
from distill.record.state import RunState
from distill.record.store import FORMAT, RECORD, last_at, open_read_only, reader
from student_trainer import checkpoint_files
from student_trainer.checkpoint_files import CHECKPOINTS, choose
from student_trainer.deepspeed_json import deepspeed_config
from sync.base import secrets
from sync.base.errors import ConfigError, DataError
from sync.base.settings import LIVE
from sync.wire import Version

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


class Handover(NamedTuple):
    """What a trainer that begins from a checkpoint takes over."""

    checkpoint: Version | None
    """None: the model folder."""
    origin: int | None
    """Lineage whose batches it takes over; None: it takes over none."""
    branch: int
    """First step whose batch is formed anew; those from the checkpoint on are trained again."""

    @property
    def start(self) -> int:
        """Step of the checkpoint."""
        return self.checkpoint.step if self.checkpoint else 0


def handover(state: RunState, checkpoint: Version | None, *, rolled_back: bool = False) -> Handover:
    """What a trainer that starts from `checkpoint` takes over; `rolled_back`: no batch is used again."""
    origin = state.lineages.origin_of(checkpoint)
    branch = checkpoint.step if checkpoint else 0
    while origin is not None and not rolled_back:
        batch = state.batches.get(Version(state.lineages.owner(origin, branch), branch))
        if batch is None or batch is state.suspect:
            break  # it is gone, or trainers died on it
        branch += 1
    return Handover(checkpoint, origin, branch)


@dataclass(frozen=True)
class Start:
    """What a start of a controller brings along; it must fit the run that is on record."""

    run: str
    """`run.name`"""
    seed: int
    rules: Rules
    prompts: PromptStream
    config: Mapping[str, Any] | None = None
    """What its config.json holds; None: it has none, and nothing is compared."""

    @classmethod
    def of(cls, config: RunConfig, prompts: PromptStream, split: PromptSplit | None = None) -> Start:
        """`split`: of the prompts; None: nothing is compared."""
        record = None if split is None else record_of(config, content(config, split))
        return cls(config.run.name, config.run.seed, rules(config), prompts, record)


@dataclass(frozen=True)
class Resume:
    """What a start goes on from; of a new run: an empty state, and no checkpoint."""

    state: RunState
    """Cursor, pending prompts, buffered rollouts, batches, lineages, evaluations, counters."""
    at: int
    """Number of the newest change on record."""
    opening: Opened
    """The row of this start; the run's name, seed and identity."""
    trainer: Handover
    """Of a trainer that begins with this start."""
    notes: list[str]
    """For people: a line for every key that has changed since the newest start, and one where checkpoints are
    damaged."""
    config: Mapping[str, Any]
    """What config.json is to hold; empty: there is none."""
    streams: Mapping[str, Starts]
    """Where blocks of streamed prompts begin, by the name of their file."""
    earlier: Earlier
    formats: Mapping[str, int]
    """Format by source, of those that were read."""


def resume(folder: Path, start: Start, connection: sqlite3.Connection | None = None) -> Resume:
    """What `start` goes on from in a run's folder; changes nothing.

    `connection`: of run.db, where it is open already.

    Raises ConfigError when the run must not go on so, DataError for what is damaged, contradicts itself, or
    has a format that this release does not read.
    """
    exists = connection is not None or (folder / RECORD).is_file()
    if not exists and (folder / JOURNAL).is_dir():
        raise DataError(f"{folder} holds a journal and no {RECORD}: leave --dry-run out, and it is made")
    config, notes, formats = start.config, list[str](), dict[str, int]()
    if exists and config is not None:
        config, changes = resumed(folder, config)
        notes += (f"resumed with {line}" for line in changes)
        formats["config.json"] = config["format"]
    state, at = RunState(start.rules), 0
    if exists:
        formats[f"{RECORD} and arrays/"] = FORMAT
        opened = closing(open_read_only(folder / RECORD)) if connection is None else nullcontext(connection)
        with opened as tables:
            state = load(tables, start.rules, reader(folder))
            at = last_at(tables)
    opening = _opening(folder, state, start)
    state.bisection.handed_out = -1  # a trainer that ends with its controller died of that
    choice, back = choose(folder / CHECKPOINTS), state.rolled_back
    if choice.path is not None:
        formats[f"{CHECKPOINTS}/"] = checkpoint_files.FORMAT
    begins = back.to if back else Version.parse(choice.path.name) if choice.path else None
    streams = saved_starts(folder)
    formats |= {name: saved.format for name, saved in streams.items()}
    return Resume(
        state,
        at,
        opening,
        handover(state, begins, rolled_back=back is not None),
        notes + [choice.line] * bool(choice.line),
        config or {},
        streams,
        earlier_starts(folder),
        formats,
    )


def _opening(folder: Path, state: RunState, start: Start) -> Opened:
    """Raises ConfigError when the cursor on record would give out ids that were given out before."""
    before, bound, prompts = state.opened, start.rules.bound, start.prompts
    now = Opened(
        start.run,
        start.seed,
        start.rules.batch,
        bound.limit,
        bound.hard,
        bound.half_life,
        start.rules.group,
        prompts.per_prompt,
        prompts.rows,
        (before.id if before else None) or token_hex(8),
        start.rules.supervised,
    )
    if before is None:
        return now
    if (before.run, before.seed) != (now.run, now.seed):
        raise ConfigError(
            f"the record in {folder} is of run {before.run!r} with seed {before.seed}, this is {now.run!r} "
            f"with seed {now.seed}: its prompts come in another order; start a new run"
        )
    if (before.per_prompt, before.rows) != (now.per_prompt, now.rows):
        raise ConfigError(
            f"the record in {folder} is of {before.rows or 'endless'} prompts, {before.per_prompt} of each, "
            f"and these are {now.rows or 'endless'} prompts, {now.per_prompt} of each: some would be asked "
            "twice; undo the change of the prompts, rollout.per_prompt, evaluation or evaluation.prompts, or "
            "start a new run"
        )
    return now


def lines(goes_on: Resume) -> Iterator[str]:
    """What people read of it."""
    state, trainer = goes_on.state, goes_on.trainer
    yield from goes_on.notes
    again = trainer.branch - trainer.start
    yield f"goes on from {trainer.checkpoint or 'the model folder'}"
    yield f"batches that are trained again: {again}" + (
        f", of steps {trainer.start + 1} to {trainer.branch}" if again else ""
    )
    waiting = len(state.buffer)
    yield f"prompts that are generated again: {len(state.pending)}; scored rollouts that wait: {waiting}"
    cursor = state.cursor
    yield f"next prompt: epoch {cursor.epoch}, position {cursor.position}; seed {goes_on.opening.seed}"
    target = state.target.version if state.target else "the model folder"
    yield f"replicas serve {target} until the trainer publishes"
    yield f"files of arrays that are read: {len(state.files)}"
    yield "formats: " + ", ".join(f"{source} {number}" for source, number in goes_on.formats.items())


# --- config.json of a run: how it ran, and what of that a resume may change ------------------------------


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
