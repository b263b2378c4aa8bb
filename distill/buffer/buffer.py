"""Scored rollouts that wait to be trained on. Pure.

It is bounded by the capacity rule of `distill.buffer.staleness`: nothing is started that it could not hold.
What is picked depends on the entries and their order of admission alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from distill.buffer.staleness import Bound
from distill.prompts.stream import group_of
from distill.run_log.records import Rollout
from sync.wire import Version, VersionSpan

StepOf = Callable[[Version], int]
"""A token's version as a step of the trainer's lineage."""


@dataclass(slots=True)
class Entry:
    """A scored rollout and what the clock must know of it."""

    id: str
    number: int
    """Of its prompt, in the order of issue."""
    arrival: int
    """In the order of admission."""
    length: int
    """Completion tokens."""
    spans: list[VersionSpan]
    """Empty: the teacher wrote it."""
    by_teacher: bool = False
    rollout: Rollout | None = None
    """None: it is in the journal only."""

    def age(self, step: int, step_of: StepOf) -> int:
        """Versions between the oldest token and `step`; 0 for what the teacher wrote, which does not age."""
        return 0 if self.by_teacher else step - min(step_of(span.version) for span in self.spans)


class Pick(NamedTuple):
    """What the next batch would be."""

    chosen: list[str]
    """Exactly a batch, in order; empty: too few."""
    too_old: list[str]
    weights: list[float]
    """What each of `chosen` counts for."""


@dataclass
class _Group:
    """Entries that go into a batch together, or are too old together."""

    members: list[Entry] = field(default_factory=list)
    age: int = 0
    """Of the oldest of them, in versions."""


class Buffer:
    """Entries by id, in the order of admission.

    `order` "oldest": what would be over the limit in the next batch goes first, then what was asked first; so
    nothing is overtaken until it is too old, however long it took to write. "arrival": as admitted.
    `group`: completions of one prompt that are picked together, once all are here.
    """

    def __init__(self, bound: Bound, order: Literal["oldest", "arrival"] = "oldest", group: int = 1) -> None:
        self._bound = bound
        self._order = order
        self._size = group
        self._entries: dict[str, Entry] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, rollout: str) -> bool:
        return rollout in self._entries

    def __getitem__(self, rollout: str) -> Entry:
        return self._entries[rollout]

    def ids(self) -> list[str]:
        """In the order of admission."""
        return list(self._entries)

    def admit(self, entry: Entry) -> None:
        """Take an entry in; its arrival is set here."""
        assert entry.id not in self._entries, f"rollout {entry.id} is buffered already"
        entry.arrival = self._arrivals
        self._arrivals += 1
        self._entries[entry.id] = entry

    def remove(self, ids: list[str]) -> list[Entry]:
        """Take entries out."""
        return [self._entries.pop(rollout) for rollout in ids]

    def pick(self, step: int, batch: int, step_of: StepOf, among: Collection[str] = ()) -> Pick:
        """The batch that would be trained on top of `step`, and what is too old for it; changes nothing.

        `batch` is a multiple of the group size. `among`: only these are looked at, and all that are young
        enough are the batch, however few; empty: everything is looked at.
        """
        ready: list[_Group] = []
        too_old: list[str] = []
        for group in self._groups(step, step_of, among):
            if group.age > self._bound.hard:
                too_old += [entry.id for entry in group.members]
            elif len(group.members) == self._size:
                ready.append(group)
        batch = len(ready) * self._size if among else batch
        if len(ready) * self._size < batch or not ready:
            return Pick([], too_old, [])
        ready.sort(key=self._place)
        chosen = [entry for group in ready[: batch // self._size] for entry in _ordered(group.members)]
        weights = [self._bound.weight(entry.age(step, step_of)) for entry in chosen]
        return Pick([entry.id for entry in chosen], too_old, weights)

    def _groups(self, step: int, step_of: StepOf, among: Collection[str]) -> Sequence[_Group]:
        groups: dict[str, _Group] = {}
        for entry in [self._entries[i] for i in among] or self._entries.values():
            name = entry.id if self._size == 1 else group_of(entry.id)
            group = groups.setdefault(name, _Group())
            group.members.append(entry)
            group.age = max(group.age, entry.age(step, step_of))
        return list(groups.values())

    def _place(self, group: _Group) -> tuple[bool, int]:
        """What is picked first sorts first."""
        if self._order == "arrival":
            return False, max(entry.arrival for entry in group.members)
        return group.age < self._bound.limit, min(entry.number for entry in group.members)


def _ordered(members: list[Entry]) -> list[Entry]:
    return sorted(members, key=lambda entry: entry.number)
