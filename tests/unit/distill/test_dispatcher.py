"""The dispatcher: capacity, requests, and completions that fail in every way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from in_memory import MemoryPrompts, MemoryReplica, with_nan, without_tokens
from small_config import make_config
from started import begun, common_of
from virtual_time import LONG

from distill.aio import cancel
from distill.buffer import Bound, Rules
from distill.metrics.samples import Quarantine
from distill.prompts.stream import Prompt, PromptSource, PromptStream
from distill.record.rollout import Rollout
from distill.record.store import Store
from distill.rollout.dispatcher import Dispatcher, Pin
from distill.rollout.ends import Lost
from distill.rollout.life import Lives
from distill.rollout.replica_client import Answer
from distill.rollout.replica_pool import Phase, Replica, ReplicaPool
from distill.waits import Waits, use
from sync import wire
from sync.base.errors import Overloaded, RemoteError
from sync.wire import Generated, GenerateFailed, GenerateRequest, Sampling, Version

pytestmark = pytest.mark.virtual_time


class Unscored:
    """In place of the queue before the teachers: what was to be scored."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []

    async def answer(self, rollout: Rollout) -> Rollout:
        self.rollouts.append(rollout)
        await asyncio.Event().wait()
        return rollout

    async def run(self) -> None:
        await asyncio.Event().wait()


class Bench:
    """Lives of rollouts over a run log and replicas; nothing is scored."""

    def __init__(
        self,
        folder: Path,
        *replicas: MemoryReplica,
        steps: int = 100,
        group: int = 1,
        source: PromptSource | None = None,
        **config: Any,
    ) -> None:
        rules, prompts = Rules(8, Bound(1, 1), group=group), PromptStream(source or MemoryPrompts(), 0, group)
        self.record, self.quarantined = begun(Store(folder, "never"), prompts, rules), list[Quarantine]()
        self.record._events.on(Quarantine, self.quarantined.append)
        settings = make_config(
            rollout={"max_in_flight": 64, "stall_timeout_seconds": 0.0, **config}, run={"steps": steps}
        )
        limit = settings.rollout.completion_timeout_seconds
        sampling = Sampling(max_tokens=settings.rollout.max_tokens, student_topk=2, max_seconds=limit)
        common = common_of(settings, self.record, sampling, prompts=prompts)
        self.events, self.timeline = common.events, common.timeline
        self.pool = ReplicaPool(common)
        self.pool.poll_seconds = self.pool.retry_seconds = 0.02
        for number, engine in enumerate(replicas):
            self.pool.add(f"r{number}", engine)
        self.dispatcher = Dispatcher(common, self.pool)
        self.lives = Lives(common, self.dispatcher)
        unscored = Unscored()
        self.lives.scoring = unscored  # type: ignore[assignment]
        self.finished = unscored.rollouts

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        use(Waits(self.timeline.blocked))
        tasks = [asyncio.create_task(part) for part in (self.pool.run(), self.lives.run())]
        yield
        await cancel(tasks)
        self.record.store.close()

    async def finishes(self) -> Bench:
        """Run until all that the bound allows is completed."""
        async with self.running():
            await self.until(lambda: len(self.finished) == 16)
        return self

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(600):
            while not condition():
                await self.events.changed.wait(0.01)


@pytest.mark.parametrize(("steps", "most"), [(100, 16), (1, 8)], ids=["the bound", "what the run needs"])
async def test_no_more_prompts_are_out_than_may_be(tmp_path: Path, steps: int, most: int) -> None:
    bench = Bench(tmp_path, MemoryReplica(), steps=steps)
    async with bench.running():
        await bench.until(lambda: len(bench.finished) == most)
        await asyncio.sleep(LONG)
    state = bench.record.state
    assert state.outstanding == state.counters.issued == len(bench.finished) == most
    assert bench.finished[0].topk_ids.shape[1] == 2


class StreamedPrompts(MemoryPrompts):
    """Prompts that can be given out once `read` is done."""

    def __init__(self) -> None:
        self.read: Future[None] = Future()
        self.asked: list[tuple[int, int]] = []

    def loading(self, first: int, last: int) -> Future[None] | None:
        self.asked.append((first, last))
        return None if self.read.done() else self.read

    def __getitem__(self, index: int) -> Prompt:
        assert self.read.done(), "the event loop would wait for it"
        return super().__getitem__(index)


async def test_prompts_that_are_still_read_are_waited_for_without_blocking(tmp_path: Path) -> None:
    source = StreamedPrompts()
    bench = Bench(tmp_path, MemoryReplica(), source=source)
    async with bench.running():
        await bench.until(lambda: bool(source.asked))
        await asyncio.sleep(LONG)
        assert not bench.record.state.counters.issued
        source.read.set_result(None)
        await bench.until(lambda: len(bench.finished) == 16)
    assert (0, 15) in source.asked, "all that the bound allows"


async def test_a_replica_that_was_removed_waits_for_nobody(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryReplica(), MemoryReplica(seed=1))
    async with bench.running():
        await bench.until(lambda: set(bench.timeline.figures()["waited_seconds"]) == {"r0", "r1"})
        await bench.pool.remove("r0")
        await asyncio.sleep(LONG)
        before = bench.timeline.figures()["waited_seconds"]
        await asyncio.sleep(LONG)
        after = bench.timeline.figures()["waited_seconds"]
    assert after["r0"] == before["r0"]
    assert after["r1"]["trainer"] > before["r1"]["trainer"]


async def test_requests_are_spread_over_replicas_within_their_bounds(tmp_path: Path) -> None:
    replicas = [MemoryReplica(seed=seed, token_seconds=0.002) for seed in range(2)]
    bench = Bench(tmp_path, *replicas, max_in_flight=4)
    bench.dispatcher.paused.add("disk")
    async with bench.running():
        await bench.until(lambda: len(bench.pool.serving()) == 2)
        bench.dispatcher.paused.clear()
        bench.events.changed.wake()
        await bench.until(lambda: all(replica.served for replica in replicas))
        assert [len(replica.served[0].prompts) for replica in replicas] == [4, 4]
        assert all(replica.in_flight <= 4 for replica in bench.pool.replicas.values())
        await bench.until(lambda: len(bench.finished) == 16)


async def test_the_prompts_of_a_dead_replica_are_answered_by_another(tmp_path: Path) -> None:
    dying, other = MemoryReplica(token_seconds=0.01), MemoryReplica(seed=1)
    bench = Bench(tmp_path, dying, other)
    async with bench.running():
        await bench.until(lambda: bench.pool.replicas["r0"].in_flight > 0)
        dying.die()
        await bench.until(lambda: len(bench.finished) == 16)
    assert len({one.id for one in bench.finished}) == 16
    assert bench.record.state.counters.requeued["replica_lost"] > 0
    assert bench.pool.replicas["r0"].in_flight == 0


async def test_a_straggler_is_asked_again_later(tmp_path: Path) -> None:
    class Stalled(MemoryReplica):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Answer, None]:
            async for answer in super().generate(request):
                yield answer
                if request is self.served[0]:
                    await asyncio.sleep(60)

    bench = await Bench(tmp_path, Stalled(), completion_timeout_seconds=0.05).finishes()
    assert bench.record.state.counters.requeued == {"straggler": 3}


class Slow(MemoryReplica):
    """Has no time for the first completion of every third prompt."""

    met: ClassVar[set[str]]

    async def _complete(self, prompt: wire.GeneratePrompt, request: GenerateRequest) -> Generated:
        slow = int(prompt.id.split(":")[1]) % 3 == 0 and prompt.id not in self.met
        self.token_seconds = 0.01 * slow
        self.met.add(prompt.id)
        return await super()._complete(prompt, request)


@pytest.mark.parametrize("policy", ["keep", "drop", "requeue"])
async def test_what_the_time_limit_ends_is_kept_in_part_dropped_or_asked_again(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.rollout.dispatcher.PATIENCE", 100.0)  # this replica keeps its time
    replica = Slow(seed=3, longest=8)
    Slow.met = set()
    bench = await Bench(tmp_path, replica, completion_timeout_seconds=0.035, on_timeout=policy).finishes()
    parts = [one for one in bench.finished if one.truncated and one.length < 8]
    counters = bench.record.state.counters
    if policy == "keep":
        assert {int(part.id.split(":")[1]) % 3 for part in parts} == {0}
        assert {part.length for part in parts} == {3}  # 0.035 s at 0.01 s a token
        assert all(part.spans[-1].end == 3 for part in parts)
        assert not counters.dropped
    else:
        assert not parts
        counted = counters.dropped if policy == "drop" else counters.requeued
        assert counted["straggler"] > 0
        assert counters.generated_tokens == counters.dropped_tokens["straggler"] == 3 * counted["straggler"]
    assert counters.issued == 16 + (counters.dropped["straggler"] if policy == "drop" else 0)


async def test_what_the_token_limit_ends_is_dropped_where_that_is_its_policy(tmp_path: Path) -> None:
    replica = MemoryReplica(seed=1, longest=4)
    bench = await Bench(tmp_path, replica, max_tokens=4, on_max_tokens="drop").finishes()
    assert not any(one.truncated for one in bench.finished)
    counters = bench.record.state.counters
    assert len(bench.quarantined) == counters.dropped["over_long"] > 0
    assert counters.generated_tokens == 4 * counters.dropped["over_long"]


async def test_a_completion_of_a_broken_group_is_not_scored(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spoiled("0:3:0", fail), group=2)
    async with bench.running():
        await bench.until(lambda: len(bench.finished) == 16)
        await asyncio.sleep(LONG)
    assert "0:3:1" not in {one.id for one in bench.finished}
    assert bench.record.state.counters.dropped == {"engine_failed": 1, "group_broken": 1}
    assert not bench.record.state.broken


@pytest.mark.parametrize(
    ("error", "requeued"),
    [
        (Overloaded("full", 0.01), {"replica_busy": 4}),
        (RemoteError("no"), {"replica_lost": 4}),
        (None, {"unusable": 4, "replica_lost": 12}),  # its other requests, too
    ],
)
async def test_a_request_that_is_refused_or_left_unanswered_is_sent_again(
    tmp_path: Path, error: RemoteError | None, requeued: dict[str, int]
) -> None:
    all_sent, never = asyncio.Event(), asyncio.Event()

    class Refusing(MemoryReplica):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Answer, None]:
            if len(self.served) < (4 if error is None else 1):
                self.served.append(request)
                if error is not None:
                    raise error
                if len(self.served) == 4:
                    all_sent.set()
                await (all_sent if self.served[0] is request else never).wait()
                return
            async for answer in super().generate(request):
                yield answer

    bench = await Bench(tmp_path, Refusing()).finishes()
    assert bench.record.state.counters.requeued == requeued


def spoiled(name: str, change: Callable[[Generated], Answer], times: int = 99) -> MemoryReplica:
    """A replica whose first answers to one prompt are changed."""
    left = [change] * times
    return MemoryReplica(spoil=lambda answer: left.pop()(answer) if left and answer.id == name else answer)


def fail(answer: Generated) -> Answer:
    return GenerateFailed(id=answer.id, error="prompt is too long")


def abort(answer: Generated) -> Answer:
    return msgspec.structs.replace(answer, finish_reason="abort")


def cut_off(answer: Generated) -> Answer:
    return msgspec.structs.replace(answer, finish_reason="length")


@pytest.mark.parametrize(
    ("change", "times", "requeued", "dropped"),
    [
        (fail, 1, {}, {"engine_failed": 1}),
        (with_nan, 1, {"unusable": 1}, {}),
        (with_nan, 99, {"unusable": 5}, {"unusable": 1}),
        (without_tokens, 1, {}, {"empty": 1}),
        (abort, 1, {"aborted": 1}, {}),
        (cut_off, 99, {"over_long": 5}, {"over_long": 1}),
    ],
)
async def test_a_completion_that_cannot_be_used_is_asked_again_or_dropped_with_a_reason(
    tmp_path, change: Any, times: int, requeued: dict[str, int], dropped: dict[str, int]
) -> None:
    replica = spoiled("0:3:0", change, times)
    bench = await Bench(tmp_path, replica, on_max_tokens="requeue", max_tokens=9).finishes()
    counters = bench.record.state.counters
    assert (counters.requeued, counters.dropped) == (requeued, dropped)
    assert counters.issued == 16 + len(dropped)


# --- completions of an evaluation -------------------------------------------------------------------------


def pinned(bench: Bench, version: Version = Version(0, 0)) -> Pin:
    """To the first replica, with sampling of its own."""
    return Pin(bench.pool.replicas["r0"], version, Sampling(max_tokens=5))


def asked(bench: Bench, pin: Pin, count: int) -> list[asyncio.Task[tuple[Generated, Replica]]]:
    rollouts = [Rollout(f"eval:{i}", i, issued=Prompt(f"{i}", [i, 1])) for i in range(count)]
    return [asyncio.create_task(bench.dispatcher.complete(rollout, pin=pin)) for rollout in rollouts]


async def test_completions_of_an_evaluation_go_to_its_replica_alone_and_count_for_no_room(tmp_path) -> None:
    """In whole requests, with the sampling of their set, also while no rollout is started."""
    first, other = MemoryReplica(token_seconds=1.0), MemoryReplica(token_seconds=1.0)
    bench = Bench(tmp_path, first, other, request_size=4, max_in_flight=8)
    bench.dispatcher.paused.add("end")
    async with bench.running():
        await bench.until(lambda: len(bench.pool.serving()) == 2)
        pin, outstanding = pinned(bench), bench.record.state.outstanding
        completions = asked(bench, pin, 10)
        await bench.until(lambda: pin.replica.in_flight == 8)
        assert (pin.replica.evaluating, bench.dispatcher._hopeless()) == (8, 0)
        answers = [answer for answer, _ in await asyncio.gather(*completions)]
    assert bench.record.state.outstanding == outstanding == bench.record.state.counters.issued == 0
    assert not other.served
    assert [len(request.prompts) for request in first.served] == [4, 4, 2]
    assert {request.sampling.max_tokens for request in first.served} == {5}
    assert [answer.id for answer in answers] == [f"eval:{i}" for i in range(10)]
    assert (pin.replica.in_flight, pin.replica.evaluating) == (0, 0)


async def test_an_evaluation_that_ends_aborts_what_it_asked_for(tmp_path: Path) -> None:
    endless = MemoryReplica(token_seconds=1e6)
    bench = Bench(tmp_path, endless, request_size=4, max_in_flight=8)
    bench.dispatcher.paused.add("end")
    async with bench.running():
        await bench.until(lambda: len(bench.pool.serving()) == 1)
        pin = pinned(bench)
        completions = asked(bench, pin, 10)
        await bench.until(lambda: pin.replica.in_flight == 8)
        for completion in completions:
            completion.cancel()
        await bench.until(lambda: pin.replica.in_flight == 0)
        endless.token_seconds = 0.0
        assert (await asked(bench, pin, 1)[0])[0].id == "eval:0"
        assert pin.replica.phase is Phase.SERVING
    assert len(endless.served) == 3, "what was cancelled before it was sent is not sent"


async def test_a_completion_of_another_version_is_no_completion_of_an_evaluation(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryReplica())
    bench.dispatcher.paused.add("end")
    quarantined: list[Quarantine] = []
    bench.events.on(Quarantine, quarantined.append)
    async with bench.running():
        await bench.until(lambda: len(bench.pool.serving()) == 1)
        (completion,) = asked(bench, pinned(bench, Version(0, 3)), 1)
        with pytest.raises(Lost, match="unusable"):
            await completion
    assert not quarantined
