"""Puzzles of reasoning-gym as a task: prompts, the held-out split, scores."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from distill import tasks
from distill.prompts.sources import TaskSource
from distill.tasks import TaskPrompt
from distill.tasks.teaching import make_tokenizer
from sync.base.errors import ConfigError, DataError

with warnings.catch_warnings():  # of the packages that its generators import
    warnings.simplefilter("ignore")
    pytest.importorskip("reasoning_gym", reason="extra reasoning-gym")

CHATML = Path(__file__).parents[3] / "configs/templates/chatml.jinja"
CHARACTERS = [chr(i) for i in range(32, 127)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["<pad>", "<|im_end|>", "<|im_start|>", "\n", *CHARACTERS]
    made = make_tokenizer(words, r"<\|im_end\|>|<\|im_start\|>|[\s\S]", "<|im_end|>", "<pad>")
    made.chat_template = CHATML.read_text()
    made.save_pretrained(folder)
    made.name_or_path = str(folder)
    return made


def task(tokenizer: Any, name: str = "number_sequence", **options: Any) -> Any:
    return tasks.load("reasoning_gym", {"name": name, "tokenizer": tokenizer.name_or_path, **options})


def reference(prompt: TaskPrompt) -> str:
    return (prompt.answer or "").partition(" ")[2]


def test_prompts_repeat_and_stand_in_the_chat_template(tokenizer: Any) -> None:
    one, other = task(tokenizer), task(tokenizer)
    assert [one.prompt(3, i) for i in range(20)] == [other.prompt(3, i) for i in range(20)]
    assert len({one.prompt(3, i).text for i in range(20)}) > 10
    made = task(tokenizer, system_prompt="Be brief.").prompt(3, 0)
    assert tokenizer.decode(made.token_ids) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{made.text}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    plain = task(tokenizer, template="plain").prompt(3, 0)
    assert tokenizer.decode(plain.token_ids) == plain.text == made.text


def test_no_held_out_puzzle_is_ever_trained_on(tokenizer: Any) -> None:
    few = task(tokenizer, size=100)
    trained = {few.prompt(seed, i).text for seed in range(2) for i in range(100)}
    held_out = {few.held_out(0, i).text for i in range(20)}
    assert held_out
    assert not held_out & trained
    with pytest.raises(DataError, match="no puzzle of 1 is"):
        [task(tokenizer, size=1).prompt(0, 0), task(tokenizer, size=1).held_out(0, 0)]


def test_partial_credit_does_not_pass_unless_the_threshold_says_so(tokenizer: Any) -> None:
    strict, lenient = task(tokenizer), task(tokenizer, pass_threshold=0.1)
    prompt = strict.prompt(0, 0)
    right = tokenizer.encode(reference(prompt) + "<|im_end|>")
    around = tokenizer.encode(f"It is {reference(prompt)}, I think<|im_end|>")
    assert strict.score(prompt, right) == 1.0
    assert 0.0 < strict.score(prompt, around) < 1.0
    assert strict.passes(prompt, right)
    assert not strict.passes(prompt, around)
    assert lenient.passes(prompt, around)
    assert not lenient.passes(prompt, tokenizer.encode("<|im_end|>"))


def test_an_answer_may_stand_in_a_tag(tokenizer: Any) -> None:
    tagged = task(tokenizer, answer_tag="answer")
    prompt = tagged.prompt(0, 0)
    text = f"<answer>no</answer> or rather <answer> {reference(prompt)} </answer>."
    assert tagged.passes(prompt, tokenizer.encode(text))
    assert not tagged.passes(prompt, tokenizer.encode(reference(prompt)))
    whole = task(tokenizer, answer_tag=reference(prompt)[0])  # a word of the answer itself is no tag
    assert not whole.passes(prompt, tokenizer.encode(reference(prompt)))


def test_a_generator_that_does_not_repeat_itself_is_found(tokenizer: Any) -> None:
    made = task(tokenizer).prompt(0, 0)
    with pytest.raises(DataError, match="another puzzle"):
        task(tokenizer).score(made._replace(text="1, 2, ?"), [1])


def test_it_is_a_source_of_prompts(tokenizer: Any) -> None:
    prompt = TaskSource("reasoning_gym", task(tokenizer), 1, tokenizer.encode)[4]
    assert tokenizer.decode(prompt.token_ids).endswith("<|im_start|>assistant\n")
    assert task(tokenizer).passes(prompt, tokenizer.encode(reference(task(tokenizer).prompt(1, 4))))


def test_options_that_cannot_be_used_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="no_such_puzzle"):
        task(tokenizer, "no_such_puzzle")
    with pytest.raises(ConfigError, match="colour"):
        task(tokenizer, colour="red")
    with pytest.raises(ConfigError, match="does not exist"):
        tasks.load("reasoning_gym", {"name": "number_sequence", "tokenizer": "./nowhere"})
