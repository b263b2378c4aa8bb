"""A run whose every event is drawn at random, and what its state is."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from in_memory import MemoryPrompts
from started import begun

from distill.buffer import Bound, Rules
from distill.prompts.stream import PromptStream, group_of
from distill.record import changes
from distill.record.changes import Checkpointed, Evaluated, HandedOut, RolledBack, Stepped, VersionApplied
from distill.record.load import load
from distill.record.record import Record
from distill.record.rollout import Rollout
from distill.record.state import RunState
from distill.record.store import Store, open_read_only
from sync.wire import EvalReport, Kept, Scored, Version, VersionSpan, pack

PLAIN = Rules(3, Bound(2, 2))
FRESHNESS = Rules(3, Bound(1, 4, 1.5))
GROUPS = Rules(4, Bound(2, 2), group=2)
BOTH = Rules(4, Bound(1, 3), group=2)
KINDS = {"plain": PLAIN, "freshness": FRESHNESS, "groups": GROUPS, "both": BOTH}


def opened(folder: Path, rules: Rules = PLAIN, store: Store | None = None) -> Record:
    store = store or Store(folder, "never", file_bytes=1500, retry_seconds=0.001)
    prompts = PromptStream(MemoryPrompts(), seed=0, per_prompt=rules.group)
    return begun(store, prompts, rules)


def scored(issued: Rollout, *versions: Version, name: str = "", kept: bool = False) -> Rollout:
    """A token of each version."""
    spans = tuple(VersionSpan(version, place, place + 1) for place, version in enumerate(versions))
    values, ids = pack(np.zeros(len(spans), "f4")), pack(np.arange(len(spans), dtype="i4"))
    name = name or issued.id
    where = Kept("http://t", "1-2", 3, b"0123") if kept else None
    scores = Scored(name, pack(np.zeros(0, "f4")) if kept else values, kept=where)
    return Rollout(
        name, issued.number, ids, ids, values, spans, False, "t", scores, continues=name != issued.id
    )


def seen(state: RunState) -> dict[str, Any]:
    """What a state is, without what only memory has: arrays of rollouts, and who was sent what."""
    fields = {name: getattr(state, name) for name in state.__struct_fields__ if name != "rules"}
    fields["pending"] = [msgspec.structs.replace(rollout, since=None) for rollout in state.pending.values()]
    fields["buffer"] = [rollout.released() for rollout in state.buffer.values()]
    fields["batches"] = [
        dataclasses.replace(batch, rollouts=[rollout.released() for rollout in batch.rollouts])
        for _, batch in sorted(state.batches.items())
    ]
    fields["lineages"] = state.lineages.nodes
    return copy.deepcopy(fields)


def lived(folder: Path, seed: int, rules: Rules, events: int, after: Any = None, of: Any = None) -> History:
    """A history of so many events, committed and closed; `after`: awaited behind each, `of`: its class."""

    async def live() -> History:
        history: History = (of or History)(folder, seed, rules)
        for _ in range(events):
            await history.event()
            if after is not None:
                await after(history)
        await history.record.store.commit()
        history.record.store.close()
        return history

    return asyncio.run(live())


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (one[name], other[name]) for name in one if one[name] != other[name]}


class FullDisk:
    """Takes `room` bytes of arrays, and part of what it is given last."""

    def __init__(self, room: int, write: Callable[[int, memoryview], int] = os.write) -> None:
        self.room, self._write = room, write

    def __call__(self, file: int, data: memoryview) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._write(file, data[: self.room])
        self.room -= count
        return count


class History:
    """A run whose every event is drawn at random."""

    def __init__(self, folder: Path, seed: int, rules: Rules, store: Store | None = None) -> None:
        self.folder, self.rng, self.rules = folder, random.Random(seed), rules
        self.keep = self.rng.randint(1, 3)
        self.record = opened(folder, rules, store)
        self.applied = Version(0, 0)
        self.trainer: Version | None = None
        self.ledger: dict[int, dict[int, list[str]]] = {}
        """What the trainer knows: lineage → step after → ids."""

    @property
    def state(self) -> RunState:
        return self.record.state

    async def event(self) -> None:
        usual = [self.issue, self.issue, self.admit, self.admit, self.step, self.step, self.follow]
        rare = [self.kill_trainer, self.restart, self.requeue, self.drop, self.save, self.roll_back]
        rare += [self.evaluate, self.die_on_a_batch, self.spend_attempts, self.fill_disk]
        await self.rng.choice(rare if self.rng.random() < 0.15 else usual)()

    async def reloaded(self) -> RunState:
        """What a controller that starts now would find."""
        await self.record.store.commit()
        connection = open_read_only(self.folder / "run.db")
        try:
            return load(connection, self.rules, self.record.store.read)
        finally:
            connection.close()

    async def issue(self) -> None:
        if room := self.state.room(self.applied, self.rules.bound.limit):
            self.record.issue(self.rng.randint(1, room))

    async def admit(self) -> None:
        pending = list(self.state.pending.values())
        some = self.rng.sample(pending, min(len(pending), self.rng.randint(0, 4)))
        done = [scored(rollout, *self.versions(), kept=self.rng.random() < 0.3) for rollout in some]
        if done and self.rules.group == 1 and self.rng.random() < 0.1:
            more = scored(some[0], self.applied, self.applied, name=f"{some[0].id}+1")
            episode = msgspec.structs.replace(scored(some[0], *[self.applied] * 5), own=((0, 2), (4, 5)))
            done = [*([more, episode] if self.rng.random() < 0.5 else [episode, more]), *done[1:]]
        for rollout in done:
            self.record.admit(rollout)

    def versions(self) -> tuple[Version, ...]:
        """Of a completion's tokens."""
        return (self.applied,)

    async def hello(self) -> None:
        kept = self.state.kept(self.keep)
        back = self.state.rolled_back
        checkpoint = back.to if back else kept[-1] if kept else None
        if kept and not back and self.rng.random() < 0.3:
            checkpoint = self.rng.choice(kept)
        opening = await self.record.open_lineage(checkpoint, "model", back.without if back else None)
        self.trainer = Version(opening.lineage, opening.start)
        self.ledger[opening.lineage] = {}

    async def step(self) -> None:
        if self.trainer is None:
            await self.hello()
        batch = self.state.batch_of(self.trainer.step) or await self.record.form_batch()
        if batch is None:
            return
        rollouts = self.record.rollouts(batch)
        assert [rollout.id for rollout in rollouts] == batch.ids
        assert batch.is_part or len(rollouts) == self.rules.batch
        groups = Counter(group_of(id) for id in batch.ids)
        assert self.rules.group == 1 or {*groups.values()} == {self.rules.group}
        assert all(rollout.tokens.data for rollout in rollouts)
        self.record.write(HandedOut(self.trainer))
        self.trainer = Version(self.trainer.lineage, self.trainer.step + 1)
        self.ledger[self.trainer.lineage][self.trainer.step] = batch.ids
        self.record.write(Stepped(self.trainer))
        kind = "delta" if self.rng.random() < 0.8 else "broadcast"
        self.record.write(changes.VersionPublished(self.trainer, kind, 1, 2, 0.1))

    async def follow(self) -> None:
        target = self.state.target
        if target and self.state.step_of(target.version) >= self.state.step_of(self.applied):
            self.applied = target.version
            self.record.write(VersionApplied("r0", self.applied, 1, 0.1, 0.2, 0.3, 0.6))

    async def kill_trainer(self) -> None:
        self.trainer = None

    async def die_on_a_batch(self) -> None:
        """The trainer takes a batch, and is not heard of again."""
        if self.trainer is not None and self.state.batch_of(self.trainer.step) is not None:
            self.record.write(HandedOut(self.trainer))
        self.trainer = None

    async def restart(self) -> None:
        """SIGKILL: what was not committed is gone."""
        await self.record.store.commit()
        committed = seen(self.state)
        if self.rng.random() < 0.7:
            lost = self.rng.choice([self.issue, self.admit, self.requeue, self.drop])
            await lost()  # and is never committed
            self.record.store._items.clear()
        self.record.store.close()
        self.tear()
        self.trainer = None
        found = load(opening := open_read_only(self.folder / "run.db"), self.rules, self.record.store.read)
        opening.close()
        assert not differences(committed, seen(found))
        self.record = opened(self.folder, self.rules)

    def tear(self) -> None:
        """What else a kill leaves."""

    async def requeue(self) -> None:
        for rollout in list(self.state.pending.values())[:2]:
            self.record.requeue(rollout, "replica_lost")

    async def spend_attempts(self) -> None:
        for _ in range(self.rng.randint(1, self.rules.max_attempts)):
            for rollout in list(self.state.pending.values())[:1]:
                self.record.requeue(rollout, "aborted", 7)

    async def fill_disk(self) -> None:
        """For a moment there is no space, for rows or for arrays, while any of these waits for its commit."""
        store = self.record.store
        await store.commit()
        room, write = self.rng.randint(0, 300), store._write
        if self.rng.random() < 0.5:
            store._write = FullDisk(room, write)
        else:
            (pages,) = store.connection.execute("PRAGMA page_count").fetchone()
            store.connection.execute(f"PRAGMA max_page_count = {pages}")
        for _ in range(self.rng.randint(0, 20)):
            await self.rng.choice([self.issue, self.admit, self.requeue, self.evaluate])()
        waiting = asyncio.create_task(self.rng.choice([self.step, self.save, store.commit])())
        await asyncio.sleep(0.003)
        store._write = write
        space = f"PRAGMA max_page_count = {1 << 30}"
        await asyncio.get_running_loop().run_in_executor(store._writer, store.connection.execute, space)
        await waiting

    async def drop(self) -> None:
        self.record.drop(list(self.state.pending)[:1], "empty", "nothing came", 0)

    async def save(self) -> None:
        if self.trainer is not None and self.trainer not in self.state.checkpoints:
            self.record.write(Checkpointed(self.trainer, "somewhere"))
            await self.record.tidy(self.keep)

    async def roll_back(self) -> None:
        if self.trainer is None or self.rng.random() < 0.5:
            return
        kept = self.state.kept(self.keep)
        to = kept[-1] if kept else None
        trained, begin = self.state.trained_tokens, to.step if to else 0
        bad = [
            batch
            for version, batch in self.state.batches.items()
            if version.step in trained and version.step >= begin
        ]
        self.record.write(RolledBack(to, [id for batch in bad for id in batch.ids], "worse"))
        self.trainer = None

    async def evaluate(self) -> None:
        if self.trainer is not None:
            self.record.write(Evaluated(EvalReport(self.trainer, 0.25, None, 4, 40, 0.5, 1.5)))
