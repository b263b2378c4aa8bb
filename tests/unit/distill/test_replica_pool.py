"""The replica pool: joining, following, losing and broadcasting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from in_memory import MemoryReplica, weights_of
from msgspec.structs import replace
from small_config import make_config
from small_record import apply
from started import common_of
from virtual_time import LONG, now

from distill.aio import cancel
from distill.buffer import Bound, Lineage, Rules
from distill.controller import compare_weights
from distill.events import Membership, Stalled
from distill.metrics.summary import identity
from distill.record.changes import VersionApplied, VersionPublished
from distill.record.state import RunState
from distill.rollout.broadcasts import Broadcasts
from distill.rollout.replica_pool import Phase, Replica, ReplicaPool
from sync.base.errors import RemoteError, Unreachable
from sync.wire import Audience, FinalDigests, Published, ReplicaState, UpdateReply, UpdateRequest, Version

pytestmark = pytest.mark.virtual_time


class World:
    """A pool, the version it should follow, and what it reported."""

    def __init__(self, stall_timeout_seconds: float = 0.0, **replicas: MemoryReplica) -> None:
        self.stalled: list[str] = []
        self.applied: list[VersionApplied] = []
        self.said: list[str] = []
        self.state = RunState(Rules(1, Bound(0, 0)))
        config = make_config(rollout={"stall_timeout_seconds": stall_timeout_seconds})
        common = common_of(config, SimpleNamespace(state=self.state, write=lambda change: None))
        self.events = common.events
        self.events.on(VersionApplied, self.applied.append)
        self.events.on(Membership, lambda event: self.said.append(f"{event.replica} {event.what}"))
        self.events.on(Stalled, lambda event: self.stalled.append(event.role))
        self.pool = ReplicaPool(common)
        self.pool.poll_seconds = self.pool.retry_seconds = 0.02
        self.broadcasts = Broadcasts(self.pool)
        for name, engine in replicas.items():
            self.pool.add(name, engine)

    def publish(self, version: Version) -> None:
        self.record(version, "full")
        self.pool.published()

    def record(self, version: Version, *kinds: Literal["full", "broadcast"]) -> None:
        for lineage in range(len(self.state.lineages), version.lineage + 1):
            self.state.lineages.add(Lineage(lineage, 0, None, 0))
        apply(self.state, *(VersionPublished(version, kind, 1, 1, 0.0) for kind in kinds))

    def broadcast(self, step: int, lineage: int = 0, attempt: str | None = None) -> Audience:
        """Announce and record one, as TrainerSession does."""
        version = Version(lineage, step)
        announced = Published(version, "broadcast", 1, 1, 0.0, "h:1", attempt)
        audience = self.broadcasts.announce(announced, ending=True)
        self.record(version, "broadcast")
        return audience

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(600):
            while not condition():
                await self.events.changed.wait(0.01)

    def serving(self) -> list[str]:
        return [replica.name for replica in self.pool.serving()]

    def oldest(self) -> Version | None:
        """The oldest version that replicas take requests with; None: the model folder, or none takes any."""
        versions = [replica.version for replica in self.pool.able()]
        return None if None in versions else min(versions, default=None)  # type: ignore[type-var]

    @asynccontextmanager
    async def running(self, serving: int = 0) -> AsyncIterator[None]:
        """From when so many replicas serve on."""
        task = asyncio.create_task(self.pool.run())
        await self.until(lambda: len(self.serving()) == serving or not serving)
        yield
        await cancel([task])
        assert task.cancelled()
        await self.broadcasts.close()


@dataclass
class Asked(MemoryReplica):
    """What it is asked for, what it does before each update, and what becomes of its answers."""

    asked: list[UpdateRequest] = field(default_factory=list)
    first: Callable[[UpdateRequest], Awaitable[object]] = lambda _: asyncio.sleep(0)
    replies: Callable[[UpdateReply], UpdateReply] = lambda reply: reply
    states: Callable[[ReplicaState], ReplicaState] = lambda state: state

    async def update(self, request: UpdateRequest, timeout: float) -> UpdateReply:
        self.asked.append(request)
        await self.first(request)
        return self.replies(await super().update(request, timeout))

    async def state(self, digests: bool = False) -> ReplicaState:
        return self.states(await super().state(digests))


def endless(_: UpdateRequest) -> Awaitable[object]:
    """For `Asked.first`."""
    return asyncio.Event().wait()


def uncounted(state: ReplicaState) -> ReplicaState:
    """For `Asked.states`: of an engine that keeps no count of tokens."""
    return replace(state, tokens=None)


@pytest.mark.parametrize(
    ("settings", "keeps"),
    [
        ({"trainer": {"lr": 1e-5}}, True),
        ({"trainer": {"lr": 1.1e-5}}, False),
        ({"trainer": {"lr": 1e-6}, "student": {"engine_args": {"--enable_prefix_caching": True}}}, False),
        ({"trainer": {"lr": 1e-6}, "student": {"engine_args": {"enable-prefix-caching": False}}}, True),
        ({"trainer": {"lr": 1e-6}, "student": {"engine_args": {"kv-offloading-size": 10}}}, False),
        ({"trainer": {"lr": 1e-6}, "student": {"engine_args": {"--kv_transfer_config": "{}"}}}, False),
        ({"trainer": {"lr": 1e-6}, "rollout": {"routing_replay": True}}, False),
        ({"trainer": {"lr": 1e-6}, "weights": {"kv_on_swap": "recompute"}}, False),
        ({"trainer": {"lr": 1e-3}, "weights": {"kv_on_swap": "keep"}}, True),
    ],
)
async def test_the_cache_is_kept_where_that_changes_rounding_alone(settings: Any, keeps: bool) -> None:
    config = make_config(**settings)
    assert config.keeps_cache is config.subscriber("student-0").keeps_cache is keeps
    pool, engine = World().pool, Asked()
    pool.keeps_cache = config.keeps_cache
    assert await pool.update(Replica("student-0", engine), Version(0, 1))
    assert [request.kv_on_swap for request in engine.asked] == ["keep" if keeps else "recompute"]


async def test_every_replica_follows_at_its_own_pace_and_the_slowest_counts() -> None:
    go_on = asyncio.Event()

    async def late(request: UpdateRequest) -> None:
        if request.version.step:
            await go_on.wait()
            await asyncio.sleep(0.05)

    fast, slow = MemoryReplica(), Asked(first=late)
    world = World(fast=fast, slow=slow)
    world.publish(Version(0, 0))
    async with world.running(2):
        for step in range(1, 6):
            world.publish(newest := Version(0, step))
            await world.until(lambda newest=newest: fast.version == newest)
        assert world.oldest() == slow.version == Version(0, 0)
        go_on.set()
        await world.until(lambda: slow.version == Version(0, 5))
        assert len(slow.updates) < len(fast.updates)
    record = next(one for one in world.applied if one.replica == "slow" and one.version.step)
    assert (record.bytes, record.pause_seconds) == (10, 0.1)
    assert record.seconds >= 0.05


async def test_a_replica_does_not_go_back_when_the_trainer_does() -> None:
    engine = MemoryReplica()
    world = World(a=engine)
    world.publish(Version(0, 5))
    async with world.running():
        await world.until(lambda: engine.version == Version(0, 5))
        world.publish(Version(1, 3))
        await asyncio.sleep(LONG)
        assert engine.version == Version(0, 5)
        world.publish(Version(1, 5))
        await world.until(lambda: engine.version == Version(1, 5))


async def test_a_replica_that_comes_late_or_comes_back_is_brought_up_before_it_serves() -> None:
    refusals = ["the snapshot is not whole yet"] * 3
    late = MemoryReplica(up=False, refusal=lambda _: refusals.pop() if refusals else "")
    world = World(a=MemoryReplica())
    world.publish(Version(0, 1))
    async with world.running(1):
        world.pool.add("late", late)
        await asyncio.sleep(LONG)
        assert world.pool.replicas["late"].phase is Phase.ABSENT
        late.up = True
        await world.until(lambda: "late" in world.serving())
        assert (late.updates, world.pool.replicas["late"].joined) == ([Version(0, 1)], 1)
        late.die()
        await world.until(lambda: world.serving() == ["a"])
        world.publish(Version(0, 2))
        late.revive()
        await world.until(lambda: len(world.serving()) == 2)
        assert (late.version, world.pool.replicas["late"].joined) == (Version(0, 2), 2)


async def test_a_replica_that_restarted_unseen_is_noticed_by_its_version() -> None:
    engine = MemoryReplica()
    world = World(a=engine)
    world.publish(Version(0, 4))
    async with world.running(1):
        engine.version = None
        await world.until(lambda: engine.updates == [Version(0, 4), Version(0, 4)])


async def test_a_replica_may_leave_and_streams_of_one_that_left_or_is_lost_are_cancelled() -> None:
    left, stays = MemoryReplica(), MemoryReplica()
    world = World(a=left, b=stays)
    async with world.running(2):
        streams = [asyncio.create_task(asyncio.sleep(60)) for _ in world.serving()]
        for stream, replica in zip(streams, world.pool.serving(), strict=True):
            replica.streams.add(stream)
        await world.pool.remove("a")
        assert world.serving() == ["b"]
        assert (left.closed, stays.closed) == (True, False)
        world.pool.report_lost(world.pool.replicas["b"])
        await asyncio.wait(streams, timeout=30)
        assert all(stream.cancelled() for stream in streams)
    assert sorted(world.said[:2]) == ["a serves the model folder", "b serves the model folder"]
    assert world.said[2] == "a has left"


async def test_a_replica_that_left_is_sent_nothing_and_is_lost_to_the_broadcast_that_it_receives() -> None:
    """Also where it was catching up."""
    away, late = MemoryReplica(), Asked(up=False, first=endless)
    world = World(a=away, b=MemoryReplica(), late=late)
    async with world.running(2):
        await world.pool.remove("a")
        world.publish(Version(0, 1))
        await asyncio.sleep(1.0)
        world.broadcast(2)
        await world.until(lambda: world.oldest() == Version(0, 2))
        late.revive()
        await world.until(world.broadcasts.wanted)
        group = world.broadcast(2).group
        await world.until(lambda: late.asked)
        await world.pool.remove("late")
        await world.until(lambda: world.broadcasts.lost_members(group))
    assert world.said[2:] == ["a has left", "late has left"]
    assert not away.updates


async def test_the_least_busy_replica_is_asked_and_one_that_refused_rests() -> None:
    world = World(a=MemoryReplica(), b=MemoryReplica())
    async with world.running(2):
        a, b = world.pool.replicas["a"], world.pool.replicas["b"]
        a.in_flight, b.in_flight = 5, 3
        assert world.pool.able()[0] is b
        world.pool.refused(b, 0.02)
        assert world.pool.able()[0] is a
        await world.until(lambda: world.pool.able()[0] is b)


async def test_a_broadcast_has_every_worker_of_the_live_replicas_as_a_member() -> None:
    a, b = Asked(workers=2), Asked()
    world = World(a=a, b=b, gone=MemoryReplica(up=False))
    async with world.running(2):
        first = world.broadcast(1, attempt="one")
        assert first.world_size == 1 + 2 + 1
        assert world.broadcast(1, attempt="one") == first, "the answer was lost on its way"
        await world.until(lambda: world.oldest() == Version(0, 1))
        received = [request.broadcast for request in (*a.asked, *b.asked)]
        assert [(one.rank, one.group) for one in received] == [(1, first.group), (3, first.group)]
        second, again = (world.broadcast(2, attempt=attempt) for attempt in ("two", "three"))
        assert len({first.group, second.group, again.group}) == 3
        await world.until(lambda: world.oldest() == Version(0, 2))
        other = world.broadcast(2, lineage=1)
        assert other.group.startswith("1-")


async def test_a_replica_that_is_held_for_an_evaluation_is_left_out_of_broadcasts() -> None:
    world = World(a=MemoryReplica(), b=MemoryReplica())
    async with world.running(2):
        world.publish(Version(0, 1))
        await world.until(lambda: world.oldest() == Version(0, 1))
        announced = world.broadcast(2)  # and held before it begins to receive: it is a lost member at once
        async with world.pool.hold(Version(0, 1), 10.0) as held:
            await world.until(lambda: held.name in world.broadcasts.lost_members(announced.group))
            assert "held for an evaluation" in world.broadcasts.lost_members(announced.group)[held.name]
            assert world.broadcast(3).world_size == 2
            assert held.version == Version(0, 1)
        assert world.broadcast(4).world_size == 3
        await world.until(lambda: world.oldest() == Version(0, 4))


async def test_the_first_broadcast_waits_for_all_replicas_and_later_ones_for_any() -> None:
    late = MemoryReplica(up=False)
    world = World(a=MemoryReplica(), late=late)
    async with world.running(1):
        assert not world.broadcasts.listening()
        late.revive()
        await world.until(lambda: world.broadcasts.listening())
        assert world.broadcast(0).world_size == 3
        late.die()
        await world.until(lambda: world.serving() == ["a"])
        assert world.broadcasts.listening()


async def test_a_replica_that_dies_in_a_broadcast_is_a_member_again_once_it_is_back() -> None:
    """Alone in one of the version that the others have, and with them in the next one."""

    async def die(request: UpdateRequest) -> None:
        if request.version.step == 1:
            dying.die()
            raise Unreachable("died in the middle")

    dying = Asked(first=die)
    world = World(a=MemoryReplica(), b=dying)
    async with world.running(2):
        first = world.broadcast(1)
        await world.until(lambda: world.serving() == ["a"])
        second = world.broadcast(2)
        assert (second.world_size, second.group == first.group) == (2, False)
        await world.until(lambda: world.oldest() == Version(0, 2))
        assert not world.broadcasts.wanted()
        for again in (2, 3):
            dying.revive()
            await world.until(world.broadcasts.wanted)
            assert (world.pool.replicas["b"].phase, world.serving()) == (Phase.CATCHING_UP, ["a"])
            assert world.broadcast(again).world_size == again
            await world.until(lambda: len(world.serving()) == 2)
            assert not world.broadcasts.wanted()
            dying.die()
            await world.until(lambda: world.serving() == ["a"])


async def test_a_lost_member_is_known_at_once_with_its_reason() -> None:
    lying = Asked(replies=lambda reply: replace(reply, version=Version(0, 7)))
    ahead = Asked(replies=lambda reply: replace(reply, bytes_read=0))
    hanging = Asked(first=lambda _: hanging.pass_time(60.0))
    refusing = MemoryReplica(refusal=lambda _: "the sender gave up")
    world = World(hanging=hanging, refusing=refusing, ahead=ahead, well=MemoryReplica(), lying=lying)
    async with world.running(5):
        group = world.broadcast(1).group
        lost = lambda: world.broadcasts.lost_members(group)  # noqa: E731
        await world.until(lambda: len(lost()) == 3)
        assert "its answer to an update cannot be used" in lost()["lying"]
        assert {name: why for name, why in lost().items() if name != "lying"} == {
            "refusing": "the sender gave up",
            "ahead": "it serves L000-v00000001 already",
        }
        assert "lying" not in world.serving(), "nobody knows what it holds"
        await world.pool.remove("lying")
        hanging.up = False  # nothing breaks its connection: it only does not answer any more
        await world.until(lambda: "hanging" in lost())
        assert world.serving() == ["refusing", "ahead", "well"]
        hanging.revive()
        await world.until(world.broadcasts.wanted)
        with pytest.raises(RemoteError, match=r"broadcast nowhere is over, the newest is 0-1"):
            world.broadcasts.lost_members("nowhere")


async def test_a_replica_that_refuses_an_update_is_sent_nothing_until_it_takes_the_newest_version() -> None:
    full = MemoryReplica(refusal=lambda version: "the disk of its mirror is full" * (version.step > 1))
    world = World(a=MemoryReplica(), full=full)
    world.publish(Version(0, 1))
    async with world.running(2):
        for step in (2, 3, 4):
            world.publish(Version(0, step))
            await asyncio.sleep(LONG)
            assert [replica.name for replica in world.pool.able()] == ["a"]
        assert (full.version, world.serving()) == (Version(0, 1), ["a", "full"])
        rule = "gets no prompts until it takes the newest version: see its log"
        assert sum(f"full stays at L000-v00000001 and {rule}" in said for said in world.said) == 1
        full.refusal = lambda _: ""
        await world.until(lambda: len(world.pool.able()) == 2)
        assert world.oldest() == Version(0, 4)


async def test_a_version_in_the_store_is_caught_up_with_until_a_newer_one_is_broadcast() -> None:
    back = MemoryReplica()
    world = World(a=MemoryReplica(), back=back)
    async with world.running(2):
        world.broadcast(1)
        await world.until(lambda: world.oldest() == Version(0, 1))
        world.publish(Version(0, 1))
        for step, caught_up in ((1, True), (2, False)):
            back.die()
            await world.until(lambda: world.serving() == ["a"])
            if not caught_up:
                world.broadcast(step)
            back.revive()
            await world.until(lambda: world.pool.replicas["back"].phase is not Phase.ABSENT)
            await asyncio.sleep(0.1)
            assert (world.serving() == ["a", "back"]) is caught_up
        assert world.broadcasts.wanted()


def test_announcements_count_each_and_what_is_stored_beside_its_broadcast_once() -> None:
    world = World()
    world.record(Version(0, 1), "broadcast", "broadcast", "full")  # the second to those that were left
    world.record(Version(0, 2), "full")
    assert world.state.counters.published == 3


def test_what_is_stored_or_was_broadcast_is_told_by_versions_and_not_by_steps() -> None:
    """After a rollback to step 8 the stored version 10 is of weights that were left."""
    world = World()
    world.record(Version(0, 10), "broadcast", "full")
    assert world.pool.is_stored(Version(0, 10))
    world.record(Version(1, 8), "broadcast")
    assert world.state.target is None
    assert not world.pool.is_stored(Version(1, 8))
    world.record(Version(1, 8), "full", "broadcast")  # again, to a replica that came back
    assert world.pool.is_stored(Version(1, 8))
    assert world.pool.newest_broadcast == Version(1, 8)
    world.record(Version(2, 8), "full")  # the run has gone over to snapshots
    assert world.pool.newest_broadcast is None
    assert not world.broadcasts.wanted()


async def test_a_live_replica_that_missed_a_broadcast_wants_it_again() -> None:
    """Its connection broke; it still serves the version before, which no rollout may be started with."""

    async def breaks_once(request: UpdateRequest) -> None:
        if [asked.version.step for asked in missing.asked] == [1, 2]:
            raise Unreachable("the connection broke")

    missing = Asked(first=breaks_once)
    world = World(a=MemoryReplica(), missing=missing)
    async with world.running(2):
        world.broadcast(1)
        await world.until(lambda: world.oldest() == Version(0, 1))
        world.broadcast(2)
        await world.until(lambda: world.serving() == ["a"])
        await world.until(lambda: len(world.serving()) == 2)
        assert world.oldest() == Version(0, 1)
        await world.until(world.broadcasts.wanted)
        assert Broadcasts(world.pool).wanted(), "a controller that starts again knows it too"
        assert world.broadcast(2).world_size == 2
        await world.until(lambda: world.oldest() == Version(0, 2))
        assert not world.broadcasts.wanted()


async def test_a_member_that_refuses_every_broadcast_is_left_out_alone_and_asked_again_later() -> None:
    refusing = MemoryReplica(refusal=lambda _: "its disk is full")
    world = World(a=MemoryReplica(), b=MemoryReplica(), refusing=refusing)
    async with world.running(3):
        assert world.broadcast(1).world_size == 4
        await world.until(lambda: {member.name for member in world.pool.able()} == {"a", "b"})
        for step in (2, 3):
            assert world.broadcast(step).world_size == 3, "it rests"
            await world.until(lambda: world.oldest() == Version(0, step))  # noqa: B023
        refusing.refusal, world.pool.replicas["refusing"].rests_until = lambda _: "", 0.0
        await world.until(world.broadcasts.wanted)
        assert world.broadcast(3).world_size == 2
        await world.until(lambda: len(world.pool.able()) == 3)


def last(version: Version) -> FinalDigests:
    return FinalDigests(version=version, digests=weights_of(version))


async def test_weights_are_compared_by_digests_and_who_is_away_is_named() -> None:
    def dies(state: ReplicaState) -> ReplicaState:
        if state.digests:
            raise Unreachable("it died when it was asked")
        return state

    other = Asked(states=lambda state: replace(state, digests={"model.weight": "other"}))
    gone = MemoryReplica(up=False)
    world = World(here=MemoryReplica(), other=other, dying=Asked(states=dies), gone=gone)
    async with world.running(3):
        compared = await compare_weights(world.pool, last(Version(0, 9)))
    assert compared == {"here": True, "other": False, "dying": None, "gone": None}
    assert identity(compared)["weights_missing"] == ["dying", "gone"]
    verdicts = [identity(found)["weights_identical"] for found in (compared, {"a": True, "b": None}, {})]
    assert verdicts == [False, None, None]


async def test_the_proof_waits_for_a_replica_that_is_away_or_catching_up() -> None:
    restarted, gate, final = MemoryReplica(), asyncio.Event(), Version(0, 9)
    world = World(restarted=restarted, slow=Asked(first=lambda _: gate.wait()))
    async with world.running(2):
        world.publish(final)
        restarted.die()
        await world.until(lambda: world.serving() == ["slow"])
        proof = asyncio.create_task(compare_weights(world.pool, last(final), 60.0))
        await asyncio.wait({proof}, timeout=0.1)
        restarted.revive()
        gate.set()
        assert await proof == {"restarted": True, "slow": True}


async def test_the_proof_waits_for_nothing_that_cannot_come() -> None:
    """Its version was broadcast by a trainer that has left; or it was removed meanwhile."""
    lost, gone = MemoryReplica(), MemoryReplica()
    world = World(here=MemoryReplica(), lost=lost, gone=gone)
    async with world.running(3):
        world.broadcast(1)
        await world.until(lambda: world.oldest() == Version(0, 1))
        lost.die()
        gone.up = False
        world.pool.report_lost(world.pool.replicas["gone"])
        lost.revive()
        await world.until(lambda: world.pool.replicas["lost"].phase is Phase.CATCHING_UP)
        proof = asyncio.create_task(compare_weights(world.pool, last(Version(0, 1)), 60.0))
        await asyncio.wait({proof}, timeout=0.1)
        await world.pool.remove("gone")
        assert await asyncio.wait_for(proof, 10.0) == {"here": True, "lost": None}


# --- stalls -----------------------------------------------------------------------------------------------


async def test_a_replica_that_generates_nothing_of_its_work_is_lost_and_reported_stalled() -> None:
    """Not one that has no work, and not one that counts no tokens."""
    works, idle, uncounting = MemoryReplica(), MemoryReplica(), Asked(states=uncounted)
    world = World(1.0, hangs=MemoryReplica(), works=works, idle=idle, uncounted=uncounting)
    async with world.running(4):
        for name, in_flight in {"hangs": 3, "works": 3, "uncounted": 4}.items():
            world.pool.replicas[name].in_flight = in_flight
        began, stalls = now(), list[float]()
        world.events.on(Stalled, lambda _: stalls.append(now()))
        while now() < began + LONG:
            works.tokens += 1
            await asyncio.sleep(0.01)
        assert {*world.stalled} == {"hangs"}
        assert stalls[0] >= began + 1.0


@pytest.mark.parametrize(
    ("counts", "in_flight"),
    [(True, 1), (True, 0), (False, 0)],
    ids=["busy", "idle", "without a count"],
)
async def test_a_replica_that_hangs_in_an_update_is_lost_each_time(counts: bool, in_flight: int) -> None:
    world = World(0.2, a=Asked(first=endless) if counts else Asked(first=endless, states=uncounted))
    async with world.running(1):
        world.pool.replicas["a"].in_flight = in_flight
        world.publish(Version(0, 1))
        await world.until(lambda: world.stalled == ["a", "a"])
        await world.until(lambda: world.pool.replicas["a"].phase is Phase.CATCHING_UP)


@pytest.mark.parametrize("updating", [False, True])
async def test_a_replica_that_is_away_or_is_started_again_in_an_update_is_not_stalled(updating: bool) -> None:
    def ends(request: UpdateRequest) -> Awaitable[object]:
        away.up = False  # the request is sent again and again until it is back
        return endless(request)

    away = Asked(first=ends, up=updating)
    world = World(0.02, a=away)
    async with world.running(int(updating)):
        world.publish(Version(0, 1))
        await asyncio.sleep(LONG)
        assert not away.up
        assert world.stalled == []


# --- held for an evaluation -------------------------------------------------------------------------------


async def test_a_held_replica_gets_no_prompts_and_keeps_its_version_while_the_others_go_on() -> None:
    world = World(a=MemoryReplica(), b=MemoryReplica())
    async with world.running():
        world.publish(Version(0, 1))
        await world.until(lambda: len(world.applied) == 2)
        async with world.pool.hold(Version(0, 1), 60.0) as held:
            (other,) = [one for one in world.pool.serving() if one is not held]
            world.publish(Version(0, 2))
            await world.until(lambda: other.version == Version(0, 2))
            await asyncio.sleep(LONG)
            assert held.version == Version(0, 1)
            assert world.pool.able() == [other]
        assert held.version == Version(0, 2), "it generates nothing more with the old weights"
        assert not held.held


async def test_a_replica_that_must_go_back_is_drained_before_and_one_that_need_not_is_preferred() -> None:
    world = World(a=MemoryReplica(), b=MemoryReplica())
    async with world.running():
        world.publish(Version(0, 1))
        world.publish(Version(0, 2))
        await world.until(lambda: {one.version for one in world.pool.serving()} == {Version(0, 2)})
        a, b = world.pool.replicas.values()
        a.in_flight = b.in_flight = 3
        held = asyncio.create_task(_held(world, Version(0, 1)))
        await asyncio.sleep(LONG)
        assert [one.version for one in (a, b)] == [Version(0, 2)] * 2, "it has completions in flight"
        a.in_flight = b.in_flight = 0
        world.events.changed.wake()
        assert await held == Version(0, 1)
        async with world.pool.hold(Version(0, 2), 60.0) as one:
            assert one.version == Version(0, 2)


async def _held(world: World, version: Version) -> Version | None:
    """What the replica holds that is held at `version`."""
    async with world.pool.hold(version, 60.0) as replica:
        return replica.version


async def test_the_model_folder_stands_for_step_0_of_every_lineage() -> None:
    world = World(a=MemoryReplica())
    async with world.running(1), world.pool.hold(Version(3, 0), 60.0) as held:
        assert held.version is None
    assert world.applied == []


async def test_without_a_serving_replica_nothing_is_held_and_a_lost_one_is_reported() -> None:
    engine = MemoryReplica(up=False)
    world = World(a=engine)
    async with world.running():
        with pytest.raises(Unreachable, match="no replica serves that could generate with L000-v00000000"):
            async with world.pool.hold(Version(0, 0), 5.0):
                raise AssertionError
        engine.up = True
        world.publish(Version(0, 1))
        await world.until(lambda: world.serving() == ["a"])
        (replica,) = world.pool.serving()
        replica.in_flight = 1
        held = asyncio.create_task(_held(world, Version(0, 0)))
        await asyncio.sleep(LONG)
        world.pool.report_lost(replica)
        with pytest.raises(Unreachable, match="replica a was lost"):
            await held
        assert not replica.held
        await world.until(lambda: not replica.busy.locked())


@pytest.mark.parametrize("turns", range(1, 9))
async def test_an_evaluation_that_is_stopped_as_it_takes_a_replica_leaves_it_to_updates(turns: int) -> None:
    """After so many turns of the event loop."""
    world = World(a=MemoryReplica())

    async def hold() -> None:
        async with world.pool.hold(Version(0, 0), 60.0):
            await asyncio.sleep(LONG)

    async with world.running(1):
        holding = asyncio.create_task(hold())
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancel([holding])
        world.publish(Version(0, 1))
        await world.until(lambda: len(world.applied) == 1)


async def test_a_held_replica_is_stalled_when_it_has_something_to_generate_alone() -> None:
    world = World(stall_timeout_seconds=5.0, a=MemoryReplica())
    async with world.running(1):
        async with world.pool.hold(Version(0, 0), 60.0) as held:
            await asyncio.sleep(LONG)
            assert world.stalled == [], "an environment or a reward function may take that long"
            held.in_flight = held.evaluating = 1
            await asyncio.wait_for(held.lost.wait(), LONG)
        assert world.stalled == ["a"]


async def test_a_replica_for_evaluations_alone_is_brought_to_their_versions_and_sent_nothing_else() -> None:
    world = World(a=MemoryReplica())
    world.pool.add("own", own := MemoryReplica(version=Version(7, 3)), for_evaluations=True)
    async with world.running():
        world.publish(Version(0, 1))
        world.publish(Version(0, 2))
        await world.until(lambda: world.serving() == ["a"] and bool(world.pool.serving(True)))
        await world.until(lambda: world.pool.replicas["a"].version == Version(0, 2))
        assert [replica.name for replica in world.pool.able()] == ["a"]
        assert world.broadcasts.listening(), "a broadcast waits for no replica of evaluations"
        for step in (1, 2):
            async with world.pool.hold(Version(0, step), 60.0) as held:
                assert (held.name, held.version) == ("own", Version(0, step))
        world.publish(Version(0, 3))
        await asyncio.sleep(LONG)
        assert own.updates == [Version(0, 1), Version(0, 2)]
        assert await compare_weights(world.pool, last(Version(0, 3))) == {"a": True}
        own.up = False
        world.pool.report_lost(held)
        with pytest.raises(Unreachable, match=r"evaluation\.replica does not serve, which could generate"):
            async with world.pool.hold(Version(0, 2), 5.0):
                raise AssertionError
