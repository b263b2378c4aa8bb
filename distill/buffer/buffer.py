"""Scored rollouts that wait to be trained on. Pure.

The capacity rule of `distill.buffer.staleness` bounds it: no rollout is started that it could not hold. What
is picked depends on the rollouts and the order of their admission alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distill.buffer.staleness import Bound
from distill.prompts.stream import group_of
from distill.run_log.records import Rollout
from sync.wire import Version

StepOf = Callable[[Version], int]
"""A token's version as a step of the trainer's lineage."""


class Pick(NamedTuple):
    """What the next batch would be."""

    chosen: list[str]
    """Exactly a batch, in order; empty: too few."""
    too_old: list[str]
    weights: list[float]
    """Loss weight of each of `chosen`."""


@dataclass
class _Group:
    """Rollouts that go into a batch together, or are too old together."""

    members: list[Rollout] = field(default_factory=list)
    age: int = 0
    """Of the oldest of them, in versions."""


class Buffer:
    """Rollouts by id, in the order of admission.

    Picked first is what would exceed the limit in the next batch, then by number of issue, so that nothing is
    overtaken until it is too old, however long its generation took. `group`: completions of one prompt that
    are picked together, once all are here.
    """

    def __init__(self, bound: Bound, group: int = 1) -> None:
        self._bound = bound
        self._size = group
        self._rollouts: dict[str, Rollout] = {}

    def __len__(self) -> int:
        return len(self._rollouts)

    def __contains__(self, rollout: object) -> bool:
        return rollout in self._rollouts

    def __getitem__(self, rollout: str) -> Rollout:
        return self._rollouts[rollout]

    def ids(self) -> list[str]:
        """In the order of admission."""
        return list(self._rollouts)

    def admit(self, rollout: Rollout) -> None:
        """Take a rollout in."""
        assert rollout.id not in self._rollouts, f"rollout {rollout.id} is buffered already"
        self._rollouts[rollout.id] = rollout

    def load(self, rollout: Rollout) -> None:
        """Replace a released rollout by the same one with its arrays."""
        self._rollouts[rollout.id] = rollout

    def remove(self, ids: list[str]) -> list[Rollout]:
        """Take rollouts out."""
        return [self._rollouts.pop(rollout) for rollout in ids]

    def pick(self, step: int, batch: int, step_of: StepOf, among: Collection[str] = ()) -> Pick:
        """The batch that would be trained on top of `step`, and what is too old for it; changes nothing.

        `batch` is a multiple of the group size. `among`: only these are considered, and all that are young
        enough are the batch, however few; empty: everything is considered.
        """
        ready: list[_Group] = []
        too_old: list[str] = []
        for group in self._groups(step, step_of, among):
            if group.age > self._bound.hard:
                too_old += [rollout.id for rollout in group.members]
            elif len(group.members) == self._size:
                ready.append(group)
        batch = len(ready) * self._size if among else batch
        if len(ready) * self._size < batch or not ready:
            return Pick([], too_old, [])
        ready.sort(key=self._place)
        chosen = [one for group in ready[: batch // self._size] for one in _ordered(group.members)]
        weights = [self._bound.weight(rollout.age(step, step_of)) for rollout in chosen]
        return Pick([rollout.id for rollout in chosen], too_old, weights)

    def _groups(self, step: int, step_of: StepOf, among: Collection[str]) -> Sequence[_Group]:
        groups: dict[str, _Group] = {}
        for rollout in [self._rollouts[i] for i in among] or self._rollouts.values():
            name = rollout.id if self._size == 1 else group_of(rollout.id)
            group = groups.setdefault(name, _Group())
            group.members.append(rollout)
            group.age = max(group.age, rollout.age(step, step_of))
        return list(groups.values())

    def _place(self, group: _Group) -> tuple[bool, int]:
        """Sort key: what is picked first sorts first."""
        return group.age < self._bound.limit, min(rollout.number for rollout in group.members)


def _ordered(members: list[Rollout]) -> list[Rollout]:
    return sorted(members, key=lambda rollout: rollout.number)
