"""Episodes in whole runs in one process: turns, replicas and environments that come and go, limits."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episodes import ANSWER, ASK, TURNS, USER, GuessEnvironment, bisects
from in_memory import ROUTING, MemoryReplica, MemoryTeacher, MemoryTrainer, some_masks, some_routes
from msgspec.structs import replace
from small_config import make_config
from started import killed_after, to_the_end

from distill.aio import cancel
from distill.config import RunConfig
from distill.controller import Controller
from distill.interfaces import Hooks
from distill.metrics.samples import Quarantine
from distill.prompts.sources import EnvironmentSource
from distill.prompts.stream import PromptStream
from distill.record.changes import Admitted, Change
from distill.record.rollout import Rollout
from distill.record.store import Store
from distill.rollout.replica_client import Answer
from sync.wire import EpisodeOver, GenerateFailed, GenerateRequest, SamplingMask, Version, unpack

pytestmark = pytest.mark.virtual_time
PROMPT = [USER, ASK, ANSWER]


@dataclass
class Recorder(MemoryReplica):
    """Remembers the context and the answer of every turn, and the version of every token."""

    turns: dict[str, list[tuple[list[int], list[int]]]] = field(default_factory=lambda: defaultdict(list))
    routes: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """First position of every turn's routes, and the one behind the last."""
    versions: dict[str, list[Version]] = field(default_factory=lambda: defaultdict(list))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Answer, None]:
        contexts = {prompt.id: prompt.token_ids for prompt in request.prompts}
        first = {prompt.id: prompt.routes_from for prompt in request.prompts}
        async for answer in super().generate(request):
            routed = (answer.routes and answer.routes.shape[0]) or 0
            self.routes[answer.id].append((first[answer.id], first[answer.id] + routed))
            self.turns[answer.id].append((contexts[answer.id], unpack(answer.token_ids).tolist()))
            for span in answer.spans:
                self.versions[answer.id] += [span.version] * (span.end - span.start)
            yield answer


def row(id: str) -> int:
    return int(id.split(":")[1])


def settings(**sections: Any) -> RunConfig:
    given: dict[str, Any] = {
        "environments": {"guess": {"environment": "tests:guess"}},
        "rollout": {"max_tokens": 2, "top_k": 4, "routing_replay": True},
        "evaluation": {"every": 0},
    }
    return make_config(**given | sections)


@pytest.fixture
def play(controller: Callable[..., Controller]) -> Callable[..., tuple[Controller, list[Rollout]]]:
    """Builds a controller of episodes; what was trained on is appended to the list."""

    def build(
        environment: GuessEnvironment, config: RunConfig | None = None, **parts: Any
    ) -> tuple[Controller, list[Rollout]]:
        trained: list[Rollout] = []
        hooks = Hooks(batch=lambda batch: trained.extend(batch.rollouts))
        given: dict[str, Any] = {
            "environments": {"guess": environment},
            "prompts": PromptStream(EnvironmentSource("guess", 0), seed=0),
            "vocab_size": 50,
            "routing": ROUTING,
            **parts,
        }
        return controller(config or settings(), hooks, **given), trained

    return build


async def test_an_episode_is_one_rollout_whose_own_tokens_are_what_the_replicas_returned(play) -> None:
    """With the version that sampled each."""
    replicas = {f"r{n}": Recorder(seed=n, longest=2, token_seconds=0.1) for n in range(2)}
    environment = GuessEnvironment(seconds=0.2)
    run, trained = play(environment, settings(buffer={"max_staleness": 6}), replicas=replicas)
    await to_the_end(run, MemoryTrainer(run.session, ranks=2))
    assert len(trained) == 6 * 8
    assert max(len(one.own) for one in trained) == TURNS
    assert max(len({span.version for span in one.spans}) for one in trained) >= 3
    for one in trained:
        (replica,) = (each for each in replicas.values() if one.id in each.turns)
        turns, routes = replica.turns[one.id], replica.routes[one.id]
        tokens = unpack(one.tokens).tolist()
        assert unpack(one.prompt).tolist() == PROMPT
        assert [tokens[start:end] for start, end in one.own] == [said for _, said in turns]
        assert [PROMPT + tokens[:start] for start, _ in one.own] == [context for context, _ in turns]
        assert one.own[0][0] == 0
        assert one.own[-1][1] == len(tokens)
        assert [span.start for span in one.spans] == [0, *(span.end for span in one.spans[:-1])]
        assert one.spans[-1].end == len(tokens)
        logprob = unpack(one.logprob)
        own = [i for start, end in one.own for i in range(start, end)]
        of_token = [span.version for span in one.spans for _ in range(span.start, span.end)]
        assert [of_token[i] for i in own] == replica.versions[one.id]
        assert np.flatnonzero(logprob).tolist() == own
        assert one.mask.ids == SamplingMask.joined([some_masks(said, 4) for _, said in turns]).ids
        assert np.flatnonzero(unpack(one.mask.sizes)).tolist() == own
        assert one.routes == some_routes(PROMPT + tokens)
        assert [start for start, _ in routes] == [0, *(end for _, end in routes[:-1])], "each is sent once"
        assert one.reward in (0.0, 1.0)
    assert {task for _, task in environment.begun} == set(range(len(environment.begun)))


async def test_a_replica_that_dies_costs_turns_and_no_episode(play) -> None:
    replicas = {f"r{n}": Recorder(seed=n, longest=2, token_seconds=0.05) for n in range(2)}
    environment = GuessEnvironment(seconds=0.01)
    run, trained = play(environment, replicas=replicas)

    async def kill() -> None:
        for _ in range(3):
            await asyncio.sleep(0.4)
            replicas["r0"].die()
            await asyncio.sleep(0.2)
            replicas["r0"].revive()

    await asyncio.gather(to_the_end(run), kill())
    assert run.record.state.counters.requeued["replica_lost"] > 0
    ids = [id for id, _ in environment.begun]
    assert len(ids) == len(set(ids)), "no episode began twice"
    assert len(trained) == 48


async def test_a_replica_that_is_held_for_an_evaluation_gets_no_turns_either(play) -> None:
    replicas = {f"r{n}": MemoryReplica(seed=n, longest=2, token_seconds=0.5) for n in range(2)}
    run, _ = play(GuessEnvironment(seconds=0.01), replicas=replicas)
    task = asyncio.create_task(run.run())
    await asyncio.sleep(2.0)
    one, before = run.pool.replicas["r0"], [len(replica.served) for replica in replicas.values()]
    assert before[0]
    one.held = True
    await asyncio.sleep(5.0)
    after = [len(replica.served) for replica in replicas.values()]
    assert after[0] == before[0]
    assert after[1] > before[1]
    await cancel([task])


@pytest.mark.parametrize("trouble", ["gone", "lost"])
async def test_an_environment_that_is_gone_costs_what_is_under_way(play, trouble: Any) -> None:
    troubles = {f"0:{n}:0": [trouble] for n in range(3, 9)}
    environment = GuessEnvironment(
        trouble=lambda id, turn: troubles[id].pop() if turn == 1 and troubles.get(id) else None
    )
    run, trained = play(environment)
    await to_the_end(run)
    assert len(trained) == 48
    begun = [id for id, _ in environment.begun]
    again = {id for id in begun if begun.count(id) == 2}
    assert again
    assert again <= troubles.keys()
    assert run.record.state.counters.requeued == {"environment_lost": len(again)}
    assert not run.record.state.counters.dropped


async def test_a_failing_environment_costs_the_episode(play) -> None:
    environment = GuessEnvironment(trouble=lambda id, turn: "raise" if id == "0:5:0" and turn == 1 else None)
    run, trained = play(environment)
    await to_the_end(run)
    assert len(trained) == 48
    assert run.record.state.counters.dropped["environment_failed"] <= 1
    assert "0:5:0" not in {one.id for one in trained}


@pytest.mark.parametrize("task", [{}, None])
async def test_an_episode_without_a_reward_is_trained_only_where_no_task_needs_it(play, task: Any) -> None:
    class Silent(GuessEnvironment):
        async def proceed(self, id: str, *given: Any) -> Any:
            said = await super().proceed(id, *given)
            return replace(said, reward=None) if id == "0:5:0" and isinstance(said, EpisodeOver) else said

    quarantined: list[Quarantine] = []
    run, trained = play(Silent(), settings(objective={"type": "sampled", "task": task}))
    run.events.on(Quarantine, quarantined.append)
    await to_the_end(run)
    assert [one.reward is None for one in trained if one.id == "0:5:0"] == ([] if task == {} else [True])
    assert all(one.reward is not None for one in trained if one.id != "0:5:0")
    found = [one.detail for one in quarantined if one.reason == "environment_failed"]
    assert len(found) == (task == {})
    assert all("0:5:0 is over without a reward" in one and "return a number" in one for one in found)


@pytest.mark.parametrize(("seconds", "delay"), [(0.0, 0.2), (0.01, 0.1), (0.02, 0.3), (0.05, 0.8)])
async def test_a_first_turn_without_room_holds_up_no_turn_of_an_episode_that_has_begun(
    play, seconds: float, delay: float
) -> None:
    """Rewritten contexts make more rows than were issued, so that room is used up while episodes begin."""
    asyncio.get_running_loop().threads = False  # type: ignore[attr-defined]

    replica = Recorder(longest=2, token_seconds=0.01)
    environment = GuessEnvironment(
        seconds=seconds,
        delay=lambda id, turn: delay * (turn == 0 and row(id) % 2),
        trouble=lambda id, turn: "rewrite" if turn else None,
    )
    run, trained = play(environment, settings(buffer={"depth": "full"}), replicas={"r0": replica})
    await to_the_end(run)
    assert len(trained) == 6 * 8


async def test_a_context_that_is_rewritten_makes_another_row_and_own_tokens_are_trained_once(play) -> None:
    """The row is on record after the first alone, however long that is scored."""

    class Slow(MemoryTeacher):
        async def score(self, sequences: Any, *given: Any) -> Any:
            await asyncio.sleep(0.1 * any("+" not in sequence.id for sequence in sequences))
            return await super().score(sequences, *given)

    replica = Recorder(longest=2, token_seconds=0.01)
    environment = GuessEnvironment(trouble=lambda id, turn: "rewrite" if turn in (1, 3) else None)
    run, trained = play(environment, replicas={"r0": replica}, teachers={"t": Slow()})
    admitted, write = list[str](), run.record.write

    def watched(change: Change) -> None:
        write(change)
        if isinstance(change, Admitted):
            admitted.append(change.rollout.id)

    run.record.write = watched
    await to_the_end(run)
    rows: dict[str, list[Rollout]] = defaultdict(list)
    for one in trained:
        rows[one.id.partition("+")[0]].append(one)
    assert max(map(len, rows.values())) == 3
    for name, parts in rows.items():
        found = []
        for one in parts:
            sequence = unpack(one.prompt).tolist() + unpack(one.tokens).tolist()
            assert one.routes == some_routes(sequence)
            own = [(one.prompt.shape[0] + start, one.prompt.shape[0] + end) for start, end in one.own]
            found += [(sequence[:start], sequence[start:end]) for start, end in own]
        if len(parts) == 1 + sum(turn in (1, 3) for turn in range(len(replica.turns[name]))):
            assert sorted(found) == sorted(replica.turns[name])
        else:
            assert all(turn in replica.turns[name] for turn in found), "the others wait in the buffer"
    state, counters = run.record.state, run.record.state.counters
    following = [id for id in admitted if "+" in id]
    assert all(id.partition("+")[0] in admitted[: admitted.index(id)] for id in following)
    continued = counters.scored - counters.episodes
    assert len(following) == continued > 0
    assert counters.issued + continued == counters.batched + counters.dropped.total() + state.outstanding


async def test_an_environment_that_fails_every_time_ends_the_run(play) -> None:
    run, _ = play(GuessEnvironment(trouble=lambda id, turn: "raise"))
    await to_the_end(run)
    assert "environment guess gave 8 unusable answers" in run.summary()["error"]


async def test_limits_end_an_episode_between_two_turns(play) -> None:
    environment, limited = GuessEnvironment(), {"guess": {"environment": "tests:guess", "max_turns": 2}}
    run, trained = play(environment, settings(environments=limited))
    await to_the_end(run)
    assert max(len(one.own) for one in trained) == 2
    cut = [one for one in trained if one.truncated]
    assert cut
    assert all(one.reward == 0 for one in cut)
    assert {one.id for one in cut} <= {*environment.ended}, "the environment is told"


async def timed(
    play, store: Path, environment: GuessEnvironment, steps: int, step_seconds: float, **buffer: Any
):
    """The run, what it trained on, and its seconds without the first steps and the last, whose rollouts were
    issued before."""
    config = settings(run={"steps": steps}, buffer=buffer)
    replicas = {"r0": Recorder(longest=2, token_seconds=0.01)}
    run, trained = play(environment, config, replicas=replicas, store=Store(store, "never"))
    trainer, ended = MemoryTrainer(run.session, step_seconds=step_seconds), list[float]()
    trainer.record = lambda version, shares: ended.append(time.monotonic())
    await to_the_end(run, trainer)
    return run, trained, ended[-8] - ended[10]


async def test_a_hundredfold_straggler_changes_no_step_time(play, tmp_path: Path) -> None:
    seconds = []
    late = {"max_staleness": 4, "depth": "full", "late": {"type": "freshness", "hard_limit": 60}}
    for slow in (0.0, 100 * 0.1):
        delay = lambda id, turn, slow=slow: slow * (turn == 0 and row(id) % 48 == 5)  # noqa: E731
        environment = GuessEnvironment(seconds=0.02, delay=delay)
        seconds.append((await timed(play, tmp_path / str(slow), environment, 40, 0.2, **late))[-1])
    assert seconds[1] <= 1.01 * seconds[0]


async def test_an_episode_that_grows_too_old_in_its_environment_makes_room_at_once(play, tmp_path) -> None:
    """One in 25 sleeps for a hundred steps between two of its turns."""

    seconds = []
    for asleep in (0.0, 10.0):
        delay = lambda id, turn, asleep=asleep: asleep * (turn == 1 and row(id) % 25 == 5)  # noqa: E731
        found = GuessEnvironment(seconds=0.02, delay=delay)
        run, trained, took = await timed(play, tmp_path / str(asleep), found, 60, 0.1)
        seconds.append(took)
        assert len(trained) == 60 * 8
    assert seconds[1] <= 1.15 * seconds[0], "1.00 to 1.03 in eleven runs; 1.9 where they keep their room"
    state = run.record.state
    assert state.counters.dropped["too_old"] >= 12
    assert state.counters.dropped_tokens["too_old"] >= 12, "each had answered a turn"
    slept = {id for id, _ in found.begun if row(id) % 25 == 5}
    assert len(slept) - 4 <= len(slept & {*found.ended}), "the environment is told, but of the last ones"
    assert not {one.id for one in trained} & {*found.ended}


async def test_an_old_episode_whose_turn_is_refused_is_dropped_once(play) -> None:
    """It takes a while to end, and batches are formed meanwhile."""

    class Slow(GuessEnvironment):
        async def end(self, id: str) -> None:
            await asyncio.sleep(1.0)
            await super().end(id)

    answers: defaultdict[str, int] = defaultdict(int)

    def refused(answer: Answer) -> Answer:
        answers[answer.id] += 1
        bad = answers[answer.id] == 2 and row(answer.id) % 4 == 1
        return GenerateFailed(id=answer.id, error="no") if bad else answer

    config = settings(run={"steps": 20})
    replica = MemoryReplica(player=bisects, token_seconds=0.25, spoil=refused)
    run, _ = play(Slow(seconds=0.02), config, replicas={"r0": replica})
    await to_the_end(run, MemoryTrainer(run.session, step_seconds=0.05))
    assert run.record.state.counters.dropped["engine_failed"] > 10
    assert run.record.state.reached == Version(0, 20)


async def test_a_controller_that_starts_again_begins_open_episodes_from_their_tasks(play, tmp_path) -> None:
    first = GuessEnvironment(seconds=0.05)
    run, _ = play(first)
    trainer = MemoryTrainer(run.session, checkpoint_every=1)
    await killed_after(3, run, trainer)
    open_ids = {*run.record.state.pending}
    assert open_ids

    second = GuessEnvironment()
    run, _ = play(second)
    await to_the_end(run, MemoryTrainer(run.session, checkpoint=trainer.checkpoint))
    tasks_of = dict(first.begun)
    again = {id: task for id, task in second.begun if id in tasks_of}
    assert again.keys() >= open_ids & tasks_of.keys()
    assert all(tasks_of[id] == task for id, task in again.items())


async def test_an_episode_that_loses_its_environment_every_time_is_given_up(play) -> None:
    environment = GuessEnvironment(trouble=lambda id, turn: "gone" if id == "0:5:0" and turn == 1 else None)
    run, _ = play(environment, replicas={"r0": Recorder(player=bisects)})  # it never finds task 5 at once
    await to_the_end(run)
    assert [id for id, _ in environment.begun].count("0:5:0") == run.config.rollout.max_attempts
    assert run.record.state.counters.dropped == {"environment_failed": 1}


async def test_a_turn_that_is_sent_again_keeps_the_version_of_the_first(play) -> None:
    replica = Recorder(longest=2, token_seconds=0.5)
    run, _ = play(GuessEnvironment(), replicas={"r0": replica})
    task = asyncio.create_task(run.run())
    await asyncio.sleep(8.0)
    ids = [id for id, turns in replica.turns.items() if len(turns) > 1]
    pending = run.record.state.pending
    before = {id: pending[id].since for id in ids if id in pending}
    replica.die()
    await asyncio.sleep(0.1)
    assert before
    assert all(pending[id].since == since for id, since in before.items())
    await cancel([task])
