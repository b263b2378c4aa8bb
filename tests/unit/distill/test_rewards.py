"""Reward functions of reference answers: what each accepts, and which are refused before a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.config import JsonlPrompts
from distill.loading import validate
from distill.prompts.rewards import load_reward_fn
from distill.prompts.sources import PromptSplit, open_prompts
from distill.prompts.stream import Prompt
from sync.errors import ConfigError, DataError

EOS = 0


class Letters:
    """A tokenizer of Unicode letters whose id 0 ends a text."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(i) for i in ids if i != EOS)


def open_rows(folder: Path, rows: list[dict[str, Any]], **prompts: Any) -> PromptSplit:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = validate(
        {
            "run": {"name": "r", "steps": 1},
            "student": {"path": "s/s"},
            "teachers": {"t": {"path": "t/t"}},
            "prompts": {"type": "jsonl", "path": str(path), "template": "plain", **prompts},
            "rollout": {"max_tokens": 8},
            "trainer": {"deepspeed": "d.json"},
            "evaluation": {"prompts": 2},
        },
        "here",
    )
    return open_prompts(config, Letters(), 64)


def rewarded(name: str, answer: str, completion: str) -> float:
    config = JsonlPrompts(type="jsonl", path=Path("p"), answer_field="gold", reward_fn=name)
    reward_fn = load_reward_fn(config, Letters())
    assert reward_fn is not None
    return reward_fn(Prompt("1", [1], "default", answer), [*Letters().encode(completion), EOS])


@pytest.mark.parametrize(
    ("name", "answer", "right", "wrong"),
    [
        ("exact", "Paris", " Paris\n", "Paris."),
        ("exact", "Paris", "Paris", "paris"),
        ("contains", "Paris", "It is Paris.", "It is Parisian."),
        ("contains", "4", "2 + 2 = 4", "the result is 42"),
        ("contains", "a+b", "so (a+b) it is", "so aab it is"),
        ("number", "10 + 62 #### 72", "first 62, then the answer is 72.", "72 is not it, 71 is"),
        ("number", "1234.50", "$1,234.5", "$1,234.6"),
        ("number", "1,234", "1234 items", "1 and 234"),
        ("number", "-3", "x = -3", "x = 6-3"),
        ("number", "5", "5.0", "none at all"),
        ("number", "9007199254740993", "9007199254740993", "9007199254740992"),
    ],
)
def test_an_answer_is_right_or_wrong(name: str, answer: str, right: str, wrong: str) -> None:
    assert rewarded(name, answer, right) == 1.0
    assert rewarded(name, answer, wrong) == 0.0


def test_rows_are_rewarded_if_a_reward_function_is_set(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "gold": i + 1} for i in range(30)]
    split = open_rows(tmp_path, rows, answer_field="gold", reward_fn="number")
    assert split.reward_fn is not None
    for prompt in (split.train[0], split.held_out[0]):
        right = int(prompt.text.split("+")[0]) + 1
        assert split.reward_fn(prompt, Letters().encode(f"{right}")) == 1.0
        assert split.reward_fn(prompt, Letters().encode(f"{right}0")) == 0.0
    assert open_rows(tmp_path, rows, answer_field="gold").reward_fn is None


def length_of_answer(prompt: Prompt, completion: str) -> float:
    return len(prompt.answer or "") - len(completion) / 4


def none(prompt: Prompt, completion: str) -> None:
    """Forgets to return."""


def not_a_number(prompt: Prompt, completion: str) -> float:
    return math.nan


def one_argument(prompt: Prompt) -> bool:
    return True


async def later(prompt: Prompt, completion: str) -> bool:
    return True


def only_short(prompt: Prompt, completion: str) -> bool:
    if len(completion) > 2:
        raise KeyError("long")
    return True


def test_a_function_of_the_users_reads_prompt_and_completion(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "gold": "abc"}]
    split = open_rows(tmp_path, rows, answer_field="gold", reward_fn=f"{__name__}:length_of_answer")
    assert split.reward_fn is not None
    assert split.reward_fn(split.train[0], Letters().encode("xy")) == 2.5


def half(prompt: Prompt, completion: str) -> np.float32:
    return np.float32(0.5)


def test_a_number_of_numpys_is_a_number() -> None:
    assert rewarded(f"{__name__}:half", "x", "y") == 0.5


@pytest.mark.parametrize(
    ("reward_fn", "message"),
    [
        ("number", r"compares with a reference answer: name its field in prompts\.answer_field"),
        ("closest", r"'closest' cannot be loaded .*say exact, contains, number, or"),
        ("no_such_module:reward_fn", r"cannot be loaded \(ModuleNotFoundError"),
        (f"{__name__}:missing", r"cannot be loaded \(AttributeError"),
        (f"{__name__}:EOS", r"EOS is a int and cannot be called"),
        (f"{__name__}:none", r"gave None for prompt 1.*a bool or a finite number"),
        (f"{__name__}:not_a_number", r"gave nan for prompt 1"),
        (f"{__name__}:one_argument", r"raised TypeError"),
        (f"{__name__}:later", r"gave <coroutine"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_a_reward_function_that_cannot_be_used_is_refused_with_the_prompts(
    tmp_path: Path, reward_fn: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_rows(tmp_path, [{"prompt": "a"}], reward_fn=reward_fn)


def test_a_reward_function_that_fails_later_is_named_with_its_input() -> None:
    with pytest.raises(DataError, match=r"only_short' raised KeyError \('long'\) for prompt 1, .*'abc'"):
        rewarded(f"{__name__}:only_short", "x", "abc")


@pytest.mark.parametrize(
    ("reward_fn", "gold", "message"),
    [
        ("number", "none", r"prompts\.jsonl:2: the reference answer 'none' has no number"),
        ("contains", " ", r"prompts\.jsonl:2: the reference answer is empty"),
    ],
)
def test_an_answer_that_nothing_can_equal_is_named_by_file_and_line(
    tmp_path: Path, reward_fn: str, gold: str, message: str
) -> None:
    rows = [{"prompt": "a", "gold": "1"}, {"prompt": "b", "gold": gold}]
    with pytest.raises(DataError, match=message):
        open_rows(tmp_path, rows, answer_field="gold", reward_fn=reward_fn)
