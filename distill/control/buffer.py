"""Scored rollouts that wait to be trained on. Pure.

It is bounded by the capacity rule of `distill.control.clock`: nothing is started that it could not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from distill.control.records import Rollout
from sync.wire import Version, VersionSpan


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

    def age(self, step: int, step_of: Callable[[Version], int]) -> int:
        """Versions between the oldest token and `step`; 0 for what the teacher wrote, which does not age."""
        return 0 if self.by_teacher else step - min(step_of(span.version) for span in self.spans)


class Pick(NamedTuple):
    """What the next batch would be."""

    chosen: list[str]
    """Exactly a batch, in order; empty: too few."""
    too_old: list[str]


class Buffer:
    """Entries by id, in the order of admission."""

    def __init__(self, max_staleness: int, order: Literal["oldest", "arrival"] = "oldest") -> None:
        self._max_staleness = max_staleness
        self._key: Callable[[Entry], int] = _number if order == "oldest" else _arrival
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

    def discard(self, rollout: str) -> None:
        """Take an entry out if it is there."""
        self._entries.pop(rollout, None)

    def pick(self, step: int, batch: int, step_of: Callable[[Version], int]) -> Pick:
        """The batch that would be trained on top of `step`, and what is too old for it; changes nothing.

        `step_of`: a token's version as a step of the trainer's lineage.
        """
        fresh, too_old = [], []
        for entry in self._entries.values():
            if entry.age(step, step_of) > self._max_staleness:
                too_old.append(entry.id)
            else:
                fresh.append(entry)
        if len(fresh) < batch:
            return Pick([], too_old)
        fresh.sort(key=self._key)
        return Pick([entry.id for entry in fresh[:batch]], too_old)


def _number(entry: Entry) -> int:
    return entry.number


def _arrival(entry: Entry) -> int:
    return entry.arrival
