"""Which rollouts are trained on, and when: lineages and ages, the capacity rule, the choice of a batch. Pure.

A lineage is one start of the trainer. A new one takes over the batches of an older one (its `origin`) up to
its `branch`, the first step whose batch it forms anew; up to that step both hold the same weights, because
they were trained on the same batches in the same order:

    L0  0 ────────── 40 ───── 47      killed at 45, batches formed up to step 47
    L1            40 ════════ 47 ── … resumes from the checkpoint of step 40, origin 0, branch 47

A batch of step s takes a rollout by its age, the versions between its oldest token and s:

    age ≤ limit          weight 1
    age ≤ hard limit     weight 2^(−(age − limit) / half_life)
    older                dropped

Under the policy "wait" the batch of step s is held while a rollout is in flight that would be too old for
step s + 1. The capacity rule leaves at most one batch of those: whatever comes in time is trained on.

The limit bounds the age; the depth of the buffer decides it. A rollout that is started sooner than needed
waits and ages, so `Depth` keeps as few outstanding as cost the trainer no speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from statistics import mean, median
from typing import Final, NamedTuple

from distill.config import RunConfig, WeighLate
from distill.prompts.stream import group_of
from distill.record.rollout import Rollout
from sync.base.errors import ConfigError
from sync.wire import Version

StepOf = Callable[[Version], int]  # a token's version as a step of the trainer's lineage
_NEVER = 1 << 62


# --- ages -------------------------------------------------------------------------------------------------


class Lineage(NamedTuple):
    """One start of the trainer."""

    id: int
    start: int  # step it begins at: its checkpoint's, or 0
    origin: int | None  # the lineage whose batches it takes over; None: the first
    branch: int  # first step whose batch is its own


class Lineages:
    """The tree of lineages of a run."""

    def __init__(self, nodes: Iterable[Lineage] = ()) -> None:
        self.nodes: list[Lineage] = []  # in the order in which they were opened; an id is its place
        self._shared: list[dict[int, int]] = []  # by lineage: ancestor → step up to which they are the same
        for lineage in nodes:
            self.add(lineage)

    def __contains__(self, lineage: int) -> bool:
        return 0 <= lineage < len(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, lineage: int) -> Lineage:
        return self.nodes[lineage]

    def add(self, lineage: Lineage) -> None:
        """Add the newest lineage; its id is the number of those before it."""
        assert lineage.id == len(self.nodes), "lineages are numbered in the order of their opening"
        self.nodes.append(lineage)
        inherited = self._shared[lineage.origin] if lineage.origin is not None else {}
        shared = {ancestor: min(until, lineage.branch) for ancestor, until in inherited.items()}
        self._shared.append(shared | {lineage.id: _NEVER})

    def step_in(self, version: Version, lineage: int) -> int:
        """Step that `version` counts as in `lineage`: its own up to where they branch, that point after it.

        Versions of a lineage that is not known count as the model folder, step 0.
        """
        if version.lineage == lineage:
            return version.step
        ours, theirs = self._shared[lineage], self._shared[version.lineage] if version.lineage in self else {}
        common = [min(until, theirs[other]) for other, until in ours.items() if other in theirs]
        return min(version.step, max(common, default=0))

    def owner(self, lineage: int, step: int) -> int:
        """The lineage that formed the batch of `step` on the path of `lineage`."""
        node = self.nodes[lineage]
        while node.origin is not None and step < node.branch:
            node = self.nodes[node.origin]
        return node.id

    def origin_of(self, checkpoint: Version | None) -> int | None:
        """The newest lineage that a trainer starting from `checkpoint` can take over; None: none yet."""
        at = checkpoint or Version(0, 0)
        fits = (node.id for node in self.nodes if self.step_in(at, node.id) == at.step)
        return max(fits, default=None)


# --- rules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """How old a rollout may be at the start of the step that trains on it, in versions."""

    limit: int  # oldest age at full weight; the capacity rule keeps to it
    hard: int  # oldest age at all; `limit` unless late rollouts are weighted by their freshness
    half_life: float = 1.0  # versions beyond `limit` that halve the weight

    def weight(self, age: int) -> float:
        """Loss weight of a rollout of this age."""
        return 1.0 if age <= self.limit else 2.0 ** ((self.limit - age) / self.half_life)


def capacity(applied_step: int, depth: float, batch: int, handed_out: int, outstanding: int) -> int:
    """Rollouts that a replica may be sent now.

    `applied_step`: what that replica has applied (not what the trainer has reached: a replica behind it makes
    older rollouts). `depth`: batches beyond the one that those weights train next, at most `Bound.limit`.
    `handed_out`: rollouts in batches on the path of the current lineage. `outstanding`: in flight, being
    scored or buffered, and taken by batches before those that are sent now.

    Replicas at different versions need no common bound. When a rollout is sent, all that were sent before it
    with the same or older weights are among `outstanding`: so at most one batch of them reaches the limit at
    any step, and `pick` takes those first, whatever was sent later with newer weights.
    """
    return max(0, int((applied_step + depth + 1) * batch) - handed_out - outstanding)


Pace = list[tuple[float, float]]
"""Of steps: seconds that each waited, and that it took in all."""


def _pace_seconds(pace: Pace) -> float:
    """Of a step: what it waits in the mean, and else in the median."""
    return mean(waited for waited, _ in pace) + median(seconds - waited for waited, seconds in pace)


def _pace_waits(pace: Pace) -> float:
    """Share of the steps spent waiting."""
    return sum(waited for waited, _ in pace) / sum(seconds for _, seconds in pace)


class Depth:
    """Batches that may be outstanding beyond the next one: as few as cost the trainer no speed.

    After a step that waited for its batch the depth rises by the wait's share of the step; after `SPAN` in a
    row that did not it falls by `DOWN`, but the next time after twice as many if the trainer waited then. But
    it also waits where replicas or teachers are the bottleneck, or processors that all share, and there a
    deeper buffer makes older rollouts and no faster steps. So now and then one batch less is tried:

        rising, falling ──`SPAN` steps──▶ one batch less ──as fast──▶ it is the most, and the next is tried
              ▲    ▲                         │ slower                   │ the trainer waits for more than then
              │    └──not again for a while──┘                          │
              └──────────────────the bound is the most──────────────────┘
    """

    TOLERATED: Final = 0.01  # share of a step spent waiting that changes nothing
    MOST_UP: Final = 0.5  # batches, after a single step
    DOWN: Final = 1 / 8  # batches
    NOTABLE: Final = 0.1  # batches up that make it another depth
    SPAN: Final = 16  # steps that tell how fast a depth is
    SETTLE: Final = 4  # steps until a change of the depth is felt
    SLOWER: Final = 1.02  # times the seconds of a step that are too many
    FAR_SLOWER: Final = 1.1  # times, after a quarter of a span
    REST: Final = 128  # steps until the next trial after one that failed; twice as many after the next
    MORE_WAIT: Final = 0.1  # share of a step by which the trainer waits for more than when a trial succeeded

    def __init__(self, bound: int, least: int = 0, adaptive: bool = True) -> None:
        """`bound`: of the age. `least`: what a run needs to go on. Not `adaptive`: always `bound`."""
        self._bound, self._least, self._adaptive = float(bound), float(least), adaptive
        self.restart()

    def restart(self) -> None:
        """A trainer starts: its first step waits for everything, and tells nothing."""
        self.batches = min(self._bound, self._floor) if self._adaptive else self._bound
        self._most = self._bound
        self._pace, self._skip = Pace(), 1  # the newest steps at this depth, and how many do not count yet
        self._before: tuple[float, float] | None = None  # of a trial: depth before, seconds to keep to
        self._waits = math.inf  # share of the steps spent waiting when a trial succeeded
        self._fastest = math.inf  # seconds of a step before the trials that have succeeded in a row
        self._rest, self._next_rest = 0, self.REST
        self._calm, self._needed = 0, self.SPAN  # steps in a row without a wait: so far, until it falls
        self._fell = False  # and nothing has waited since

    @property
    def _floor(self) -> float:
        return max(self._least, 1.0)

    def step(self, waited: float, seconds: float) -> None:
        """A step took `seconds`, `waited` among them."""
        if not self._adaptive or seconds <= 0:
            return
        if self._skip:
            self._skip -= 1
            return
        self._pace = [*self._pace, (waited, seconds)][-self.SPAN :]
        if self._before is not None:
            self._compare(*self._before)
            return
        share, before = waited / seconds, self.batches
        if share > self.TOLERATED:
            self._needed *= 2 if self._fell else 1
            self._calm, self._fell = 0, False
            self.batches = min(self._most, self.batches + min(self.MOST_UP, share))
        elif (calm := self._calm + 1) < self._needed:
            self._calm = calm
        else:
            self._needed = self.SPAN if self._fell else self._needed
            self._calm, self._fell = 0, True
            self.batches = max(self._least, self.batches - self.DOWN)
        self._rest -= 1
        if self.batches - before > self.NOTABLE:
            self._pace = []
        if len(self._pace) < self.SPAN:
            return
        if _pace_waits(self._pace) > self._waits + self.MORE_WAIT:
            self._most, self._waits, self._fastest = self._bound, math.inf, math.inf
        elif self._rest <= 0 and self.batches > self._floor:
            self._before = self.batches, min(self._fastest, _pace_seconds(self._pace))
            self._change(max(self._floor, self.batches - 1))

    def _compare(self, batches: float, seconds: float) -> None:
        """End the trial once it is known whether its steps take longer than these, else back to `batches`."""
        tried, over = self._pace, len(self._pace) == self.SPAN
        if len(tried) < self.SPAN // 4:
            return
        if _pace_seconds(tried) / seconds > (self.SLOWER if over else self.FAR_SLOWER):
            self._before, self._fastest, self._rest = None, math.inf, self._next_rest
            self._next_rest *= 2
            self._change(batches)
        elif over:
            self._most, self._waits, self._before = self.batches, _pace_waits(tried), None
            self._fastest, self._next_rest = seconds, self.REST

    def _change(self, batches: float) -> None:
        self.batches, self._pace, self._skip = batches, [], self.SETTLE


@dataclass(frozen=True)
class Rules:
    """How a run's rollouts become batches."""

    batch: int  # rollouts of a batch
    bound: Bound
    group: int = 1  # completions of a prompt that go into a batch together; `batch` is a multiple of it
    max_attempts: int = 5
    """Completions of one prompt that may be broken off or reach a limit before it is dropped."""
    on_policy: float = 1.0
    """Share of the prompts that the student completes; the teacher completes the others."""
    supervised: int | None = None
    """Tokens of each completion that are trained on; None: all."""


def rules(config: RunConfig) -> Rules:
    """The rules of a run. Raises ConfigError for a combination with which it would stall."""
    rollout, task, behind = config.rollout, config.objective.task, config.weights.publish_every - 1
    limit, late = config.buffer.max_staleness, config.buffer.late
    if behind > limit:
        raise ConfigError(
            f"weights.publish_every is {behind + 1} and buffer.max_staleness {limit}: "
            f"the replicas fall {behind} steps behind between two versions, too far for any rollout; "
            f"set max_staleness to at least {behind}, or publish more often"
        )
    if isinstance(late, WeighLate) and late.hard_limit <= limit:
        raise ConfigError(
            f"buffer.late.hard_limit is {late.hard_limit} and buffer.max_staleness {limit}: freshness weighs "
            f'what is older than max_staleness; set hard_limit to at least {limit + 1}, or late.type = "drop"'
        )
    in_groups = task is not None and task.baseline != "batch"
    if in_groups and (rollout.per_prompt < 2 or rollout.batch % rollout.per_prompt):
        raise ConfigError(
            f'objective.task.baseline is "group", rollout.per_prompt {rollout.per_prompt} and rollout.batch '
            f"{rollout.batch}: a group needs at least 2 completions, and a batch whole groups; "
            "set per_prompt to 2 or more and batch to a multiple of it"
        )
    return Rules(
        rollout.batch,
        Bound(limit, late.hard_limit, late.half_life) if isinstance(late, WeighLate) else Bound(limit, limit),
        rollout.per_prompt if in_groups else 1,
        rollout.max_attempts,
        config.objective.on_policy,
        config.objective.max_supervised_tokens,
    )


# --- the next batch ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Batch:
    """A batch, from its forming (Record.form_batch) to the checkpoint that covers it; rows: `packing`."""

    version: Version  # the weights it is trained on top of, under the lineage that formed it
    rollouts: list[Rollout]  # in order; released once a step has trained on them
    ages: list[int]  # of each rollout, in versions
    weights: list[float]  # loss weight of each rollout; empty: 1 for all
    is_part: bool = False  # it is a part of a batch that trainers died on

    @property
    def ids(self) -> list[str]:
        return [rollout.id for rollout in self.rollouts]


class Pick(NamedTuple):
    """What the next batch would be."""

    chosen: list[str]  # exactly a batch, in order; empty: too few
    too_old: list[str]
    weights: list[float]  # loss weight of each of `chosen`


def pick(
    buffer: Mapping[str, Rollout], rules: Rules, step: int, step_of: StepOf, among: Collection[str] = ()
) -> Pick:
    """The batch that would be trained on top of `step`, and what is too old for it.

    First comes what would exceed the limit in the next batch, then what was issued first, so that nothing is
    overtaken until it is too old, however long its generation took. The completions of a group are picked
    together, once all are in `buffer` (rollouts by id). `among`: only these are considered, and all that are
    young enough are the batch, however few; empty: everything is considered.
    """
    step_of, bound = cache(step_of), rules.bound
    considered = [buffer[id] for id in among] or [*buffer.values()]
    groups = _groups(considered) if rules.group > 1 else [(rollout,) for rollout in considered]
    ages = [max([rollout.age(step, step_of) for rollout in group]) for group in groups]
    too_old = [rollout.id for i, group in enumerate(groups) if ages[i] > bound.hard for rollout in group]
    ready = [i for i, group in enumerate(groups) if ages[i] <= bound.hard and len(group) == rules.group]
    count = len(ready) if among else rules.batch // rules.group
    if len(ready) < count or not ready:
        return Pick([], too_old, [])
    ready.sort(key=lambda i: groups[i][0].number)
    ready.sort(key=lambda i: ages[i] < bound.limit)
    chosen = [rollout for i in ready[:count] for rollout in groups[i]]
    weights = [bound.weight(rollout.age(step, step_of)) for rollout in chosen]
    return Pick([rollout.id for rollout in chosen], too_old, weights)


def _groups(rollouts: Iterable[Rollout]) -> Sequence[Sequence[Rollout]]:
    """The members of each group that are among these, in the order of issue."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=attrgetter("number")):
        groups.setdefault(group_of(rollout.id), []).append(rollout)
    return [*groups.values()]
