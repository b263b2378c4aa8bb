"""Environments of the verifiers library, played in its own virtual environment by scripted students."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ports import free_port, healthy
from verifiers_player import bisecting, guess_tokenizer, played
from waiting import until

from distill.environments.client import EnvironmentClient
from distill.environments.config import EnvironmentConfig, EnvironmentService
from distill.tasks import calculate
from sync.base.errors import Unreachable
from sync.base.own_code import CODE_VARIABLE
from sync.base.settings import ModelSource

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-environments/bin/python"
ENV = {**os.environ, "PYTHONPATH": str(ROOT), CODE_VARIABLE: str(ROOT / "configs/environments")}
Facts = dict[str, Any]

MISSING = f"no {PYTHON.relative_to(ROOT)}: `make environments`"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)


@pytest.fixture(scope="module")
def facts() -> Facts:
    script = [PYTHON, ROOT / "tests/support/verifiers_player.py"]
    done = subprocess.run(script, env=ENV, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Task was destroyed" not in done.stderr
    assert "never retrieved" not in done.stderr
    found: Facts = json.loads(done.stdout)
    return found


def own(episode: Facts) -> list[list[int]]:
    return [episode["token_ids"][start:end] for start, end in episode["own"]]


def environments_tokens(episode: Facts) -> list[list[int]]:
    """Between the student's turns."""
    ends, starts = [end for _, end in episode["own"]], [start for start, _ in episode["own"][1:]]
    return [episode["token_ids"][end:start] for end, start in zip(ends, starts, strict=False)]


def test_the_tokens_of_fifty_episodes_at_once_are_those_that_the_student_sampled(
    facts: Facts,
) -> None:
    many = facts["guesses"]["many"]
    assert [one["error"] for one in many] == [None] * 50
    assert [one["ended"] for one in many] == ["over"] * 50
    assert all(own(one) == one["said"] for one in many)
    assert {len(one["own"]) for one in many} >= {1, 2, 3, 4, 5}
    assert max(len(one["own"]) for one in many) == 5, "five guesses"
    higher, lower = [2, 5, 3], [2, 6, 3]
    assert all(one["prompt"] == [2, 7, 3] for one in many)
    assert all(tokens in (higher, lower) for one in many for tokens in environments_tokens(one))


def test_an_answer_in_other_tokens_than_the_tokenizer_makes_stays_as_it_was_sampled(facts: Facts) -> None:
    plain, spelled = facts["guesses"]["clean"][:5], facts["guesses"]["clean"][5:]
    for one, other in zip(plain, spelled, strict=True):
        assert one["text"] == other["text"]
        assert one["again"] == one["prompt"] + one["token_ids"]
        assert other["again"] != other["prompt"] + other["token_ids"], "tokenizing loses the answer's ids"
        assert own(other) == other["said"]
        assert environments_tokens(other) == environments_tokens(one)


def test_a_task_is_the_same_game_every_time_and_torch_is_not_needed(facts: Facts) -> None:
    assert not facts["torch"]
    guesses = facts["guesses"]
    assert guesses["tasks"] is None
    assert [one["reward"] for one in guesses["clean"]] == [1.0] * 10, "five guesses find any of 20 numbers"
    assert guesses["randomness untouched"]
    assert guesses["same again"]


@pytest.mark.parametrize(
    ("wrong", "turns", "message"),
    [
        ("raises first", 0, "KeyError: 'broken on purpose'"),
        ("raises later", 1, "KeyError: 'broken on purpose'"),
        ("hangs first", 0, "TimeoutError"),
        ("hangs later", 1, "TimeoutError"),
        ("never asks", 0, "without a turn of the student"),
        ("no task", 0, "task 7 is none of the environment's 7"),
    ],
)
def test_an_environment_that_goes_wrong_costs_its_episode_and_leaves_nothing_behind(
    facts: Facts, wrong: str, turns: int, message: str
) -> None:
    episode = facts["wrongs"][wrong]
    assert message in episode["error"]
    assert len(episode["own"]) == turns
    assert episode["ended"] is None
    assert facts["wrongs"]["left"] == 0


def test_a_context_that_is_rewritten_keeps_what_is_the_same(facts: Facts) -> None:
    episode = facts["wrongs"]["rewrites"]
    assert episode["error"] is None
    ((prompt, token_ids),) = episode["more"]
    assert prompt == episode["prompt"]
    assert token_ids == episode["said"][2]


def test_rewards_add_up_and_metrics_keep_their_names(facts: Facts) -> None:
    episode = facts["wrongs"]["behaves"]
    assert episode["error"] is None
    assert episode["text"].startswith("s:higheru:?a:"), "the system prompt comes first"
    assert episode["reward"] == 0.75
    assert episode["metrics"] == {"half": 0.5, "weighted": 0.25, "length": 7.0}
    assert facts["wrongs"]["tasks"] == 7


def test_a_taskset_without_an_environment_and_a_harness_is_played_by_ours(facts: Facts) -> None:
    episode = facts["one turn"]
    assert (episode["text"], episode["own"]) == ("u:??a:[10]</s>", [[0, 2]])
    assert (episode["reward"], episode["metrics"]) == (2.0, {"short": 2.0})


def test_a_tool_over_mcp_answers_in_turns_and_tells_its_errors_to_the_student(facts: Facts) -> None:
    episode = facts["sums"]["errors"]
    told = [part.removeprefix("tool\n") for part in episode["text"].split("<|im_end|>\n<|im_start|>")[2::2]]
    assert told[0] == "Error executing tool compute: division by zero"
    assert told[1] == "Error executing tool compute: 'two' is not one operation of two whole numbers"
    assert told[2] == "error: there is no tool 'compile'"
    assert "expression\n  Field required" in told[3]
    assert told[4].startswith("error: arguments are no JSON")
    assert (len(told), episode["error"], episode["ended"]) == (5, None, "over"), "a torn call is an answer"
    assert (episode["reward"], episode["metrics"]) == (0.0, {"right": 0.0, "calls": 5.0})


def test_the_toys_calls_are_parsed_and_its_errors_are_one_token(facts: Facts) -> None:
    episode = facts["toy"]
    assert (episode["error"], episode["reward"], episode["metrics"]["calls"]) == (None, 1.0, 3.0)
    assert own(episode) == episode["said"]
    first, *_ = environments_tokens(episode)
    assert [calculate.VOCABULARY[one] for one in first] == ["t:", calculate.PAD, "a:"]


def test_two_calls_of_one_answer_are_both_answered(facts: Facts) -> None:
    episode = facts["sums"]["right"]
    assert episode["text"].count("<|im_start|>tool\n") == 3
    assert len(episode["own"]) == 3
    assert (episode["reward"], episode["metrics"]) == (1.0, {"right": 1.0, "calls": 3.0})
    assert facts["sums"]["tasks"] == 30


def test_chatml_is_written_as_the_template_writes_it(facts: Facts) -> None:
    for episode in (facts["sums"]["errors"], facts["sums"]["right"]):
        assert own(episode) == episode["said"]
        assert episode["again"] == episode["prompt"] + episode["token_ids"]


def serve(folder: Path, environment: str, **options: Any) -> tuple[subprocess.Popen[str], str]:
    """A service in the virtual environment, and its URL."""
    guess_tokenizer().save_pretrained(folder / "student")
    section = EnvironmentConfig(type="verifiers", environment=environment, options=options)
    student = ModelSource(path=str(folder / "student"))
    settings = EnvironmentService(name="e", run="r", environment=section, student=student)
    (folder / "e.json").write_text(settings.model_dump_json())
    port = free_port()
    argv = [PYTHON, "-m", "distill.environments.service", "--config", folder / "e.json", "--port", str(port)]
    return subprocess.Popen(argv, env=ENV, stderr=subprocess.PIPE, text=True), f"http://127.0.0.1:{port}"


async def test_an_environment_service_plays_it_for_a_run(tmp_path: Path) -> None:
    child, url = serve(tmp_path, "textarena_guess")
    try:
        until(lambda: healthy(url), process=child)
        async with EnvironmentClient("e", [url]) as client:
            episode = await played(client, guess_tokenizer(), "0:0:0", 3, bisecting(random.Random(0)))
            assert (await client.info()).tasks is None
        assert (episode["error"], episode["reward"], episode["ended"]) == (None, 1.0, "over")
        assert own(episode) == episode["said"]
    finally:
        child.terminate()
        _, log = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "Traceback" not in log


async def test_a_service_whose_tools_die_ends_to_be_started_again(tmp_path: Path) -> None:
    child, url = serve(tmp_path, "calculator", agent={"runtime": {"type": "subprocess"}})
    servers: list[psutil.Process] = []
    try:
        until(lambda: healthy(url), process=child)
        servers = psutil.Process(child.pid).children()
        (calculator,) = (one for one in servers if "calculator" in " ".join(one.cmdline()))
        calculator.kill()
        async with EnvironmentClient("e", [url], timeout=2.0) as client:
            with pytest.raises(Unreachable):  # no episode fails for it
                await client.begin("0:0:0", 0)
        _, log = await asyncio.to_thread(child.communicate, timeout=60)
        assert child.returncode == 1
        assert "a server of tools has ended" in log
    finally:
        for one in (child, *servers):
            with suppress(psutil.NoSuchProcess):
                one.kill()


def test_a_service_of_what_cannot_be_loaded_ends_with_the_reason(tmp_path: Path) -> None:
    child, _ = serve(tmp_path, "no_such_taskset")
    _, log = child.communicate(timeout=600)
    assert child.returncode == 2
    assert "environments.e: verifiers cannot load 'no_such_taskset' (ModuleNotFoundError" in log
