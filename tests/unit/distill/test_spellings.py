"""The task of many spellings: its reward_fn, its prompts, and how much a top-k leaves outside."""

import math

import numpy as np
import pytest

from distill.tasks import TaskPrompt, load, spellings
from distill.tasks.sort_letters import is_held_out, spelled
from distill.tasks.spellings import (
    EOS_ID,
    FIRST_LETTER_ID,
    LETTERS,
    SHARES,
    SPELLINGS,
    TOKEN_PATTERN,
    VOCABULARY,
)
from distill.tasks.teaching import make_tokenizer

TASK = spellings.make()


def ids(text: str) -> list[int]:
    return [VOCABULARY.index(word) for word in text.split()]


def passes(prompt: str, completion: str) -> bool:
    return TASK.passes(TaskPrompt("".join(prompt.split())), ids(completion))


def test_the_vocabulary_is_as_large_as_promised() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 3 + 26 * 80 >= 2000


@pytest.mark.parametrize(
    "completion",
    ["b0 d3 k79 z1 <eos>", "z1 b0 k5 d3 <eos>", "b40 z0 d0 k0 <eos>", "z79 k79 d79 b79 <eos>"],
)
def test_any_spelling_of_any_right_order_passes(completion: str) -> None:
    assert passes("k4 d0 z1 b2 >", completion)


@pytest.mark.parametrize(
    ("completion", "why"),
    [
        ("d0 b0 k0 z0 <eos>", "d is neither first nor last"),
        ("b0 d0 k0 <eos>", "z is missing"),
        ("b0 d0 k0 z0", "no end"),
        ("b0 d0 k0 z0 a0 <eos>", "a was not asked for"),
        ("b0 b1 d0 k0 z0 <eos>", "b twice, in two spellings"),
        ("b0 <eos>", "too early"),
        ("b0 d0 > k0 z0 <eos>", "no letter"),
        ("b0 d0 k0 z0 <eos> <eos>", "something after the end"),
        ("", "nothing"),
    ],
)
def test_anything_but_the_answer_fails(completion: str, why: str) -> None:
    assert not passes("k4 d0 z1 b2 >", completion), why


def test_prompts_are_pure_functions_of_seed_and_index_and_never_held_out() -> None:
    made = [TASK.prompt(3, index) for index in range(200)]
    assert made == [TASK.prompt(3, index) for index in range(200)]
    assert made != [TASK.prompt(4, index) for index in range(200)]
    for prompt in made:
        assert prompt.text == "".join(VOCABULARY[token] for token in prompt.token_ids or ())
        letters = "".join(character for character in prompt.text if character in LETTERS)
        assert 4 <= len(set(letters)) == len(letters) <= 6
        assert not is_held_out(letters + ">")
    held_out = TASK.held_out(3, 0)
    assert is_held_out("".join(character for character in held_out.text if character in LETTERS) + ">")


def test_the_tokenizer_encodes_the_prompts_of_the_task() -> None:
    tokenizer = make_tokenizer(VOCABULARY, TOKEN_PATTERN, "<eos>", "<pad>")
    prompt = TASK.prompt(0, 0)
    assert tokenizer(prompt.text)["input_ids"] == list(prompt.token_ids or ())
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_spelling_shares_are_zipfs() -> None:
    assert SHARES.sum() == pytest.approx(1.0)
    assert SHARES[0] / SHARES[7] == pytest.approx(8**spellings.ZIPF)


def test_the_top_64_leave_one_to_five_percent_outside() -> None:
    """With two choices the 64 likeliest of 160 tokens are the first 32 spellings of each letter."""
    two, one = spellings.outside(2, 64), spellings.outside(1, 64)
    assert two == pytest.approx(1.0 - SHARES[:32].sum())
    assert one == pytest.approx(1.0 - SHARES[:64].sum())
    assert 0.01 < two < 0.05
    for letters in range(spellings.SHORTEST, spellings.LONGEST + 1):
        mean = ((letters - 1) * two + one) / (letters + 1)  # the end token is certain
        assert 0.01 < mean < 0.05
    assert spellings.outside(2, 160) == 0.0


def test_lessons_are_spelled_like_the_task_or_evenly() -> None:
    rng, places = np.random.default_rng(0), np.full((4000, 2), 25)
    expected = (np.arange(SPELLINGS) * SHARES).sum()
    for even, mean in ((0.0, expected), (1.0, (SPELLINGS - 1) / 2)):
        spelling = spelled(rng, places, SHARES, even) - FIRST_LETTER_ID - 25 * SPELLINGS
        assert set(spelling.ravel().tolist()) <= set(range(SPELLINGS))
        assert spelling.mean() == pytest.approx(mean, abs=4 * SPELLINGS / math.sqrt(places.size))


def test_the_task_is_found_by_its_name() -> None:
    assert load("spellings").prompt(1, 2) == spellings.make().prompt(1, 2)
    assert VOCABULARY[EOS_ID] == "<eos>"
