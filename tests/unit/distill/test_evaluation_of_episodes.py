"""Evaluations that play: files, reverse KL over own tokens, rewards, environments that fail or are gone."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from episodes import ANSWER, ASK, HIGHER, LOWER, USER, GuessEnvironment, Trouble, bisects
from evaluated_models import Replica, Teacher, by_hand, completed, configure, evaluated, evaluation, lines
from in_memory import MemoryReplica

from distill.config.loading import validate
from distill.controller import Controller
from distill.evaluation.generation import GONE_SECONDS
from distill.tasks.sort_letters import letter_tokenizer
from sync.base.errors import DataError, RemoteError
from sync.wire import Generated

TASKS = 12
pytestmark = pytest.mark.usefixtures("ends_workers")
ENVIRONMENT = {"type": "environment", "environment": "guess"}


def evaluator(
    models: Path,
    environment: GuessEnvironment,
    replica: MemoryReplica | None = None,
    prompts: dict[str, Any] = ENVIRONMENT,
    of_games: dict[str, Any] | None = None,
    **section: Any,
) -> Controller:
    """`replica`: None has a player that always wins. `of_games`: teachers of "games" by name, beside t."""
    raw = configure(models).model_dump(mode="json") | {
        "prompts": prompts,
        "environments": {"guess": {"environment": "a:b", **section}},
    }
    raw["teachers"] |= {name: {**raw["teachers"]["t"], "route": ["games"]} for name in of_games or {}}
    teachers: Any = {"t": Teacher(models / "teacher")} | (of_games or {})
    replica = replica or MemoryReplica(player=bisects)
    return evaluation(validate(raw, "x"), models, replica, teachers, {"guess": environment})


async def test_every_held_out_task_is_played_and_only_own_tokens_count(models: Path) -> None:
    environment, replica = GuessEnvironment(), Replica(models / "student")
    report = await evaluated(evaluator(models, environment, replica))
    rows = lines(models)
    assert [row["index"] for row in rows] == sorted(task for _, task in environment.begun) == [*range(TASKS)]
    assert not environment.games
    for row in rows:
        (part,) = row["sequences"]
        assert part["prompt_ids"] == [USER, ASK, ANSWER]
        tokens, own = part["token_ids"], part["own"]
        for (_, before), (start, _) in itertools.pairwise(own):
            assert tokens[before:start] in ([USER, HIGHER, ANSWER], [USER, LOWER, ANSWER])
        assert (own[0][0], own[-1][1]) == (0, len(tokens))
        said = "".join(turn["environment"] + turn["student"] for turn in row["turns"])
        assert said == letter_tokenizer().decode(part["prompt_ids"] + tokens)
        assert row["metrics"] == {"guesses": len(row["turns"])}
    exact, _, tokens = by_hand(models).sum(0)
    assert tokens < sum(len(row["sequences"][0]["token_ids"]) for row in rows)
    assert report.reverse_kl == pytest.approx(exact / tokens, rel=1e-4)
    assert (report.completions, report.tokens) == (TASKS, tokens)
    assert report.pass_rate == sum(row["reward"] == 1.0 for row in rows) / TASKS


async def test_each_turn_counts_once_where_the_context_is_rewritten(models: Path) -> None:
    environment = GuessEnvironment(trouble=lambda id, turn: "rewrite" if turn == 1 else None)
    report = await evaluated(evaluator(models, environment, Replica(models / "student")))
    rows = lines(models)
    for row in rows:
        first, second = row["sequences"]
        assert len(first["own"]) + len(second["own"]) == len(row["turns"])
        assert second["prompt_ids"][:-3] == (first["prompt_ids"] + first["token_ids"])[:-1]
    exact, _, tokens = by_hand(models).sum(0)
    assert (report.completions, report.tokens) == (TASKS, tokens)
    assert report.reverse_kl == pytest.approx(exact / tokens, rel=1e-4)


async def test_what_was_played_is_evaluated_by_another_process(models: Path) -> None:
    environment = GuessEnvironment()
    assert len((await completed(evaluator(models, environment)))["held_out"]) == TASKS
    report = await evaluated(evaluator(models, environment))
    assert len(environment.begun) == TASKS
    assert (report.pass_rate, report.truncated) == (1.0, 0.0)
    assert report.pass_rate_interval[0] < 1.0


async def test_a_game_that_a_limit_ends_is_not_won(models: Path) -> None:
    report = await evaluated(evaluator(models, GuessEnvironment(), max_turns=1))
    rows = lines(models)
    assert report.truncated == sum(row["finish_reason"] == "length" for row in rows) / TASKS > 0.5
    assert {row["reward"] for row in rows if row["finish_reason"] == "length"} == {0.0}
    assert all(len(row["turns"]) == 1 for row in rows)


async def test_a_mixture_completes_its_prompts_and_plays_its_episodes(models: Path) -> None:
    parts = {"letters": {"type": "task", "task": "sort_letters"}, "games": ENVIRONMENT}
    environment = GuessEnvironment()
    prompts, coach = {"type": "mixture", "parts": parts}, {"coach": Teacher(models / "student")}
    report = await evaluated(evaluator(models, environment, prompts=prompts, of_games=coach))
    rows = lines(models)
    played = [row for row in rows if "sequences" in row]
    assert len(rows) == TASKS
    assert len(played) == len(environment.begun) == TASKS // 2
    assert {row["reward"] for row in played} == {1.0}
    assert {row["reward"] for row in rows if "sequences" not in row} == {0.0}
    assert (report.pass_rate, report.reward) == (0.5, 0.5)
    letters, games = report.sources["letters"], report.sources["games"]
    assert (letters.reward, games.reward, games.completions) == (0.0, 1.0, TASKS // 2)
    assert abs(games.reverse_kl) < 1e-5 < 0.1 < letters.reverse_kl, "its coach is the student itself"
    assert report.teachers == {"t": letters, "coach": games}
    assert games.tokens + letters.tokens == report.tokens
    assert letters.reverse_kl * letters.tokens == pytest.approx(report.reverse_kl * report.tokens, rel=1e-4)


@pytest.mark.virtual_time
@pytest.mark.parametrize("trouble", ["raise", "lost", "gone", "lie"])
async def test_an_episode_that_fails_or_is_lost_begins_again(models: Path, trouble: Trouble) -> None:
    tried: set[str] = set()

    def once(id: str, turn: int) -> Trouble | None:
        """At each episode's first try of its second turn."""
        if turn != 1 or id in tried:
            return None
        tried.add(id)
        return trouble

    environment = GuessEnvironment(trouble=once)
    assert len((await completed(evaluator(models, environment)))["held_out"]) == TASKS
    assert {(row["reward"], row["error"]) for row in lines(models)} == {(1.0, None)}
    assert len(environment.begun) > TASKS
    assert not environment.games


@pytest.mark.virtual_time
async def test_a_task_whose_environment_always_fails_has_an_error_and_no_reward(models: Path) -> None:
    broken = GuessEnvironment(trouble=lambda id, turn: "raise" if id.endswith(":3:0") and turn == 1 else None)
    report = await evaluated(evaluator(models, broken))
    (row,) = [row for row in lines(models) if row["error"]]
    assert (row["index"], row["finish_reason"], row["reward"], len(row["turns"])) == (3, "failed", None, 1)
    assert "environment guess failed task 3: the environment has failed" in row["error"]
    assert report.pass_rate == pytest.approx(1 - 1 / TASKS)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("trouble", "error", "problem"),
    [
        ("raise", DataError, r"environment guess failed task \d+: .*; the last of 8 tasks in a row"),
        ("gone", RemoteError, f"environment guess was not up for {GONE_SECONDS:.0f} s"),
    ],
)
async def test_an_environment_that_fails_task_after_task_or_stays_away_ends_the_evaluation(
    models: Path, trouble: Trouble, error: type[Exception], problem: str
) -> None:
    broken = GuessEnvironment(trouble=lambda id, turn: trouble)
    with pytest.raises(error, match=problem):
        await completed(evaluator(models, broken))
    assert trouble == "gone" or not broken.games


@pytest.mark.virtual_time
async def test_a_replica_that_dies_between_turns_is_lost_and_another_plays_the_rest(models: Path) -> None:
    environment, dying = GuessEnvironment(), MemoryReplica(player=bisects)

    def die(answer: Generated) -> Generated:
        if dying.generated == 5:
            dying.die()
            asyncio.get_running_loop().call_later(10.0, dying.revive)
        return answer

    dying.spoil = die
    made = await completed(evaluator(models, environment, dying))
    assert {one.reward for one in made["held_out"]} == {1.0}
    assert environment.ended, "the environment is told of those under way"
    assert not environment.games
