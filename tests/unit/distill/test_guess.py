"""The games of the quickstart, guesses and a calculator: their rules, their tokens, their lessons."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import episodes
import numpy as np
import pytest
from episodes import Played
from in_memory import MemoryReplica
from torch.nn.functional import one_hot

from distill import quickstart
from distill.config.loading import load
from distill.environments.config import EnvironmentConfig
from distill.environments.episode import Episode, Limits, play
from distill.environments.python_host import PythonEnvironment
from distill.environments.rendering import Renderer
from distill.tasks import Models, calculate, guess
from distill.tasks.calculate import BEGIN, END, PAD_ID
from distill.tasks.calculate import VOCABULARY as WORDS
from distill.tasks.guess import EOS_ID, FIRST_ID, HIGHER, LOWER, TOP, TURNS, VOCABULARY
from distill.tasks.teaching import masked_loss
from sync.wire import Generated, GeneratePrompt, GenerateRequest, Sampling


def task_of(secret: int) -> int:
    return next(task for task in range(10_000) if guess.random.Random(task).randint(1, TOP) == secret)


async def played(secret: int, *said: str) -> tuple[float, list[str]]:
    script: Any = episodes.Script(*said)
    return await guess.play(task_of(secret), script), script.heard


async def test_hints_lead_to_the_number_in_five_guesses_at_most() -> None:
    assert await played(7, "[10]", "[5]", "[7]") == (1.0, ["?", LOWER, HIGHER])
    assert await played(10, "[10]") == (1.0, ["?"])
    assert await played(20, "[1]", "[2]", "[3]", "[4]", "[20]") == (1.0, ["?", *[HIGHER] * 4])
    assert await played(7, "[1]", "[2]", "[3]", "[4]", "[5]", "[7]") == (0.0, ["?", *[HIGHER] * 4])


@pytest.mark.parametrize("last", ["[5]", "[0]", "[21]", "7", "[7", "[7][7]", "", "higher"])
async def test_a_guess_that_is_malformed_or_not_new_ends_the_game(last: str) -> None:
    assert await played(7, "[5]", last, "[7]") == (0.0, ["?", HIGHER])


async def test_bisection_wins_every_game_on_the_tokens_that_the_template_makes() -> None:
    config = EnvironmentConfig(environment="distill.tasks.guess:play")
    environment = Played(PythonEnvironment("guess", config, Renderer(guess.guess_tokenizer())))
    replica, same = MemoryReplica(player=episodes.bisects), episodes.GuessEnvironment()

    async def generate(episode: Episode) -> Generated:
        prompt = GeneratePrompt(episode.id, episode.context)
        request = GenerateRequest(sampling=Sampling(max_tokens=2), prompts=[prompt])
        async for answer in replica.generate(request):
            return answer
        raise AssertionError

    for task in range(60):
        real, memory = Episode(f"real {task}"), Episode(f"memory {task}")
        for one, other in ((real, environment), (memory, same)):
            await play(other, one, task, generate, Limits(TURNS, 62, None, len(VOCABULARY)))
        assert real.reward == memory.reward == 1.0
        assert real.context == memory.context
        assert len(real.sequences) == 1


def test_a_lesson_teaches_the_middle_of_what_is_left_and_the_end_token() -> None:
    rng, taught_guesses, lengths = np.random.default_rng(0), 0, set[int]()
    for _ in range(500):
        ids, taught = guess.game(rng)
        low, high, last = 1, TOP, 0
        lengths.add(len(ids))
        for turn in range(0, len(ids), 5):
            user, hint, answer, number, end = ids[turn : turn + 5]
            assert (VOCABULARY[user], VOCABULARY[answer], end) == ("u:", "a:", EOS_ID)
            if turn:
                low = max(low, last + 1) if VOCABULARY[hint] == HIGHER else low
                high = min(high, last - 1) if VOCABULARY[hint] == LOWER else high
            last = number - FIRST_ID + 1
            assert taught[turn : turn + 5] == [False] * 3 + [last == (low + high) // 2, True]
            taught_guesses += last == (low + high) // 2
    assert lengths == {5 * turns for turns in range(1, TURNS + 1)}
    assert taught_guesses > 800


def test_the_loss_is_the_mean_over_the_taught_tokens() -> None:
    """Of four, the model gives the successor of the token before one half, and each of the others a sixth."""
    lessons = itertools.cycle([([0, 1, 2, 0], [False, True, True, True]), ([3, 0], [True, True])])
    model = lambda tokens: SimpleNamespace(logits=math.log(3) * one_hot((tokens + 1) % 4, 4))  # noqa: E731
    loss = masked_loss(lambda _: next(lessons), model, guess.STUDENT, np.random.default_rng(0), 0)
    assert float(loss) == pytest.approx((3 * math.log(2) + math.log(6)) / 4)


def test_every_model_is_made_of_its_own_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[tuple[int, str]] = []

    def make(folder: Path, seed: int, task: str) -> Models:
        made.append((seed, task))
        return Models(tmp_path / "teacher", tmp_path / "student")

    monkeypatch.setattr(quickstart, "make_models", make)
    names = []
    for task in quickstart.SOURCES:
        config = load(*quickstart.source(3, task))
        names.append(config.run.name)
        assert config.student.path == str(tmp_path / "student")
        assert [one.path for one in config.teachers.values()] == [str(tmp_path / "teacher")]
        assert config.run.seed == 3
    assert made == [(3, "sort_letters"), (3, "guess"), (3, "calculate")]
    assert names == ["quickstart-3", "quickstart-guess-3", "quickstart-calculate-3"]


# --- the toy that calls a calculator: its tokens, its lessons


WRONG = "Error executing tool compute: '4783' is not one operation of two whole numbers"
NO_TOOL = "error: there is no tool 'compile'"


def text(ids: list[int]) -> str:
    return "".join(WORDS[one] for one in ids)


def test_a_lesson_calls_for_the_product_then_for_the_sum_and_answers() -> None:
    rng, errors, longest = np.random.default_rng(0), 0, 0
    for _ in range(500):
        ids, taught = calculate.lesson(rng)
        longest = max(longest, len(ids))
        found = re.match(r"u:(\d\d)\*(\d\d)\+(\d\d)=a:", text(ids))
        a, b, c = map(int, found.groups())
        calls = [f"{a}*{b}", f"{a * b}+{c}"]
        said = [id for id, teach in zip(ids, taught, strict=True) if teach]
        right = ["".join([*BEGIN, call, *END]) for call in calls]
        assert text(said) == "".join([*right, f"{a * b + c}<eos>"])
        assert [text(ids).count(f"t:{a * b}a:"), text(ids).count(f"t:{a * b + c}a:")] == [1, 1]
        errors += text(ids).count("t:<pad>a:")
    assert 100 < errors < 200
    assert longest == 64, "the models' context"


@pytest.mark.parametrize("said", [["3901"], ["-5"], [WRONG], [NO_TOOL], [WRONG, "3901", NO_TOOL]])
def test_a_tools_answer_is_its_digits_and_an_error_one_token(said: list[str]) -> None:
    call = [WORDS.index(word) for word in [*BEGIN, *"47*83", *END]]
    answers = [{"role": "tool", "content": content} for content in said]
    added = Renderer(calculate.calculate_tokenizer()).added(call, answers)
    words = {"3901": ["t:", *"3901"], "-5": ["t:", "<pad>", "5"]}
    expected = [word for content in said for word in words.get(content, ["t:", "<pad>"])]
    assert [WORDS[one] for one in added] == [*expected, "a:"], "the student said the end token"


def test_the_tokens_of_a_lesson_are_those_of_the_template() -> None:
    tokenizer = calculate.calculate_tokenizer()
    renderer, rng = Renderer(tokenizer), np.random.default_rng(1)
    for _ in range(50):
        ids, _ = calculate.lesson(rng)
        if PAD_ID in ids:
            continue
        question = re.split(r"[uat]:", text(ids))[1]
        prompt = renderer.prompt([{"role": "user", "content": question}])
        assert ids[: len(prompt)] == prompt
        assert tokenizer.encode(text(ids)) == ids
