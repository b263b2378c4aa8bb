"""The toy that calls a calculator: its tokens, its lessons."""

from __future__ import annotations

import re

import numpy as np
import pytest

from distill.environments.rendering import Renderer
from distill.tasks import calculate
from distill.tasks.calculate import BEGIN, END, PAD_ID, VOCABULARY

ERRORS = [
    "Error executing tool compute: '4783' is not one operation of two whole numbers",
    "error: there is no tool 'compile'",
]


def text(ids: list[int]) -> str:
    return "".join(VOCABULARY[one] for one in ids)


def test_a_lesson_calls_for_the_product_then_for_the_sum_and_answers() -> None:
    rng, errors, longest = np.random.default_rng(0), 0, 0
    for _ in range(500):
        ids, taught = calculate.lesson(rng)
        longest = max(longest, len(ids))
        found = re.match(r"u:(\d\d)\*(\d\d)\+(\d\d)=a:", text(ids))
        assert found is not None
        a, b, c = map(int, found.groups())
        calls = [f"{a}*{b}", f"{a * b}+{c}"]
        said = [id for id, teach in zip(ids, taught, strict=True) if teach]
        right = ["".join([*BEGIN, call, *END]) for call in calls]
        assert text(said) == "".join([*right, f"{a * b + c}<eos>"])
        assert [text(ids).count(f"t:{a * b}a:"), text(ids).count(f"t:{a * b + c}a:")] == [1, 1]
        errors += text(ids).count("t:<pad>a:")
    assert 100 < errors < 200
    assert longest == 64, "the models' context"


@pytest.mark.parametrize("said", ["3901", "-5", *ERRORS])
def test_a_tools_answer_is_its_digits_and_an_error_one_token(said: str) -> None:
    call = [VOCABULARY.index(word) for word in [*BEGIN, *"47*83", *END]]
    added = Renderer(calculate.calculate_tokenizer()).added(call, [{"role": "tool", "content": said}])
    expected = {"3901": [*"3901"], "-5": ["<pad>", "5"]}.get(said, ["<pad>"])
    assert [VOCABULARY[one] for one in added] == ["t:", *expected, "a:"], "the student said the end token"


def test_an_error_is_followed_by_the_answer_to_another_call() -> None:
    call = [VOCABULARY.index(word) for word in [*BEGIN, *"47*83", *END]]
    said = [{"role": "tool", "content": content} for content in (ERRORS[0], "3901", ERRORS[1])]
    added = Renderer(calculate.calculate_tokenizer()).added(call, said)
    assert [VOCABULARY[one] for one in added] == ["t:", "<pad>", "t:", *"3901", "t:", "<pad>", "a:"]


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
