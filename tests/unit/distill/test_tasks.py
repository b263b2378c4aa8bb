"""Tasks: that which sorts from both ends, and puzzles of reasoning-gym."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_config import make_config

from distill import tasks
from distill.prompts.rewards import load_rewards, reward_source
from distill.prompts.sources import TaskSource, open_prompts
from distill.prompts.stream import Prompt
from distill.tasks import TaskPrompt, is_held_out, sort_letters
from distill.tasks.sort_letters import EOS_ID, LETTERS, VOCABULARY, examples, letter_tokenizer
from distill.tasks.teaching import make_tokenizer, muon_step
from sync.base.errors import ConfigError, DataError


def ids(text: str, end: bool = True) -> list[int]:
    return [VOCABULARY.index(letter) for letter in text] + [EOS_ID] * end


def prompt_of(text: str) -> TaskPrompt:
    return TaskPrompt(text, None, None)


TASK = sort_letters.make()


def test_a_step_of_muon_is_that_of_torch_but_for_its_rounding() -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(64, 64), (32, 64), (96, 64)]
    ours = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
    theirs = [matrix.detach().clone().requires_grad_() for matrix in ours]
    momenta = [torch.zeros(shape) for shape in shapes]
    muon = torch.optim.Muon(theirs, 0.05, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        before = [matrix.detach().clone() for matrix in ours]
        for matrix, other in zip(ours, theirs, strict=True):
            matrix.grad = torch.randn(matrix.shape, generator=random)
            other.grad = matrix.grad.clone()
        with torch.no_grad():
            muon_step(ours, momenta, 0.05)
        muon.step()
        for matrix, other, old in zip(ours, theirs, before, strict=True):
            assert (matrix - other).norm() < 0.04 * (matrix - old).norm()


def test_exactly_the_answers_that_take_an_end_each_time_pass() -> None:
    passing = {
        "".join(order)
        for order in itertools.permutations("bdkmz")
        if TASK.reward(prompt_of("kdzmb>"), ids("".join(order)))
    }
    assert len(passing) == 2**4
    assert {"bdkmz", "zmkdb", "bzdmk", "bdzkm"} <= passing
    assert "dbkmz" not in passing


@pytest.mark.parametrize("answer", [ids("bdkm"), ids("bdkmzz"), [*ids("bdkmz", end=False), 0], []])
def test_what_leaves_out_repeats_adds_or_does_not_end_once_fails(answer: list[int]) -> None:
    assert not TASK.reward(prompt_of("kdzmb>"), answer)


def test_prompts_are_five_to_nine_distinct_letters_and_the_same_each_time() -> None:
    made = [TASK.prompt(3, index) for index in range(300)]
    assert made == [TASK.prompt(3, index) for index in range(300)]
    assert made != [TASK.prompt(4, index) for index in range(300)]
    lengths = {len(one.text) - 1 for one in made}
    assert lengths == {5, 6, 7, 8, 9}
    for one in made:
        letters = one.text[:-1]
        assert one.text[-1] == ">"
        assert len(set(letters)) == len(letters)
        assert [VOCABULARY[i] for i in one.token_ids or []] == list(one.text)


def test_held_out_prompts_are_never_trained_on() -> None:
    assert not any(is_held_out(TASK.prompt(seed, index).text) for seed in range(3) for index in range(200))
    assert all(is_held_out(TASK.held_out(seed, index).text) for seed in range(3) for index in range(200))


def test_examples_are_right_answers_with_even_odds_and_name_the_other_choice() -> None:
    asked_BN, answer_BN, other_BN = examples(np.random.default_rng(0), 2000, 6)
    for asked, answer, other in zip(asked_BN[:200], answer_BN, other_BN, strict=False):
        text = "".join(LETTERS[i] for i in asked) + ">"
        assert not is_held_out(text)
        assert TASK.reward(prompt_of(text), ids("".join(LETTERS[i] for i in answer)))
        left = set(asked.tolist())
        for taken, spurned in zip(answer.tolist(), other.tolist(), strict=True):
            assert {taken, spurned} == {min(left), max(left)}
            left.remove(taken)
    first_is_smallest = (answer_BN[:, 0] == asked_BN.min(1)).mean()
    assert abs(first_is_smallest - 0.5) < 5 * math.sqrt(0.25 / len(asked_BN))


def test_the_tokenizer_gives_one_token_a_character_and_adds_none() -> None:
    tokenizer = letter_tokenizer()
    assert tokenizer.encode("kdz>") == ids("kdz>", end=False)
    assert tokenizer.decode(ids("kdz")) == "kdz<eos>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (1, 0, None)
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(VOCABULARY)}


def test_a_task_is_found_by_name_and_a_missing_one_is_named() -> None:
    assert tasks.load("sort_letters").prompt(0, 0) == TASK.prompt(0, 0)
    assert tasks.load("distill.tasks.sort_letters").prompt(0, 0) == TASK.prompt(0, 0)
    with pytest.raises(ConfigError, match=r"'distill\.config' cannot be loaded"):
        tasks.load("distill.config")
    with pytest.raises(ConfigError, match=r"prompts\.options do not fit"):
        tasks.load("sort_letters", {"digits": 3})
    with pytest.raises(ConfigError, match=r"made a dict without prompt, held_out, reward: a task has"):
        tasks.load("builtins:dict")


class Broken:
    """A task of the user's that raises wherever it is called."""

    def prompt(self, seed: int, index: int) -> tasks.TaskPrompt:
        raise KeyError("prompt")

    def held_out(self, seed: int, index: int) -> tasks.TaskPrompt:
        raise KeyError("held out")

    def reward(self, prompt: tasks.RewardedPrompt, completion: list[int]) -> bool:
        raise KeyError("reward")


def make(unlucky: bool = False) -> Broken:
    """What this module would be asked for as a task."""
    return Broken() if not unlucky else 1 / 0


def test_whatever_a_task_raises_names_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks_of_mine").mkdir()
    (tmp_path / "tasks_of_mine" / "raises.py").write_text("raise RuntimeError('at import')")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = r"'tasks_of_mine\.raises' cannot be loaded \(RuntimeError: at import\)"
    with pytest.raises(ConfigError, match=loaded):
        tasks.load("tasks_of_mine.raises")
    (tmp_path / "tasks_of_mine" / "broken.py").write_text(f"from {__name__} import make")
    made = r"do not fit task .*broken' \(ZeroDivisionError: division by zero\)"
    with pytest.raises(ConfigError, match=made):
        tasks.load("tasks_of_mine.broken", {"unlucky": True})
    task = TaskSource("tasks_of_mine.broken", tasks.load("tasks_of_mine.broken"), 3, letter_tokenizer())
    asked = r"broken', prompt\(\) raised KeyError \('prompt'\) for index 7, seed 3"
    with pytest.raises(DataError, match=asked):
        task[7]
    with pytest.raises(DataError, match=r"broken', held_out\(\) raised KeyError .* for index 8, seed 3"):
        task.held_out(8)
    config = make_config(prompts={"type": "task", "task": "tasks_of_mine.broken"}, evaluation=None)
    with pytest.raises(DataError, match=r"broken', prompt\(\) raised KeyError .* for index 0, seed 0"):
        open_prompts(config, letter_tokenizer(), 64)
    source = reward_source(config.prompts, letter_tokenizer())
    reward_fn = load_rewards(source.prompts)
    named = r"prompts\.task 'tasks_of_mine\.broken', reward\(\)"
    raised = named + r" raised KeyError \('reward'\) for prompt 0:4:1, completion \[5"
    with pytest.raises(DataError, match=raised):
        reward_fn(Prompt("0:4:1", [1]), [5])
    monkeypatch.setattr(Broken, "reward", lambda *_: None)
    reward_fn = load_rewards(source.prompts)
    with pytest.raises(DataError, match=named + r" gave None for prompt 0:4:1.* a bool or a number"):
        reward_fn(Prompt("0:4:1", [1]), [5])


@pytest.mark.parametrize(
    ("text", "token_ids", "problem"),
    [
        ("kd", [4, len(VOCABULARY)], r"holds id \d+, for which the tokenizer has no token"),
        ("kd", [], r"it has 0 tokens, allowed are 1 to 3"),
        ("kdzk", None, r"it has 4 tokens, allowed are 1 to 3"),
    ],
)
def test_prompts_of_a_task_are_checked_as_rows_are_with_or_without_an_evaluation(
    text: str, token_ids: list[int] | None, problem: str
) -> None:
    same = lambda *_: tasks.TaskPrompt(text, token_ids, None)  # noqa: E731
    fixed: Any = SimpleNamespace(prompt=same, held_out=same)
    source = TaskSource("mine", fixed, 0, letter_tokenizer())
    for held_out in (0, 4):
        with pytest.raises(DataError, match=rf"prompt '{text}' of task mine: .*{problem}"):
            source.checked(held_out, 3)


def test_a_task_reads_the_end_token_where_a_completion_ends_at_another_id_of_the_run() -> None:
    config = make_config(prompts={"type": "task", "task": "tasks_of_mine.broken"})
    source = reward_source(config.prompts, letter_tokenizer(), [0])
    prompt = Prompt("0", [5])
    assert source.read(prompt, [5, 6, 0]) == source.read(prompt, [5, 6, EOS_ID]) == [5, 6, EOS_ID]
    assert source.read(prompt, [5, 0, 6]) == [5, 0, 6]


# --- puzzles of reasoning-gym as a task: prompts, the held-out split, scores


with warnings.catch_warnings():  # of the packages that its generators import
    warnings.simplefilter("ignore")
    pytest.importorskip("reasoning_gym", reason="extra reasoning-gym")

CHATML = Path(__file__).parents[3] / "configs/templates/chatml.jinja"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["<pad>", "<|im_end|>", "<|im_start|>", "\n", *map(chr, range(32, 127))]
    made = make_tokenizer(words, r"<\|im_end\|>|<\|im_start\|>|[\s\S]", "<|im_end|>", "<pad>")
    made.chat_template = CHATML.read_text()
    made.save_pretrained(folder)
    made.name_or_path = str(folder)
    return made


def task(tokenizer: Any, name: str = "number_sequence", **options: Any) -> Any:
    return tasks.load("reasoning_gym", {"name": name, "tokenizer": tokenizer.name_or_path, **options})


def reference(prompt: TaskPrompt | Prompt) -> str:
    return (prompt.answer or "").partition(" ")[2]


def test_prompts_repeat_and_stand_in_the_chat_template(tokenizer: Any) -> None:
    one, other = task(tokenizer), task(tokenizer)
    assert [one.prompt(3, i) for i in range(20)] == [other.prompt(3, i) for i in range(20)]
    assert len({one.prompt(3, i).text for i in range(20)}) > 10
    made = task(tokenizer, system_prompt="Be brief.").prompt(3, 0)
    turns = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{made.text}<|im_end|>\n"
    assert tokenizer.decode(made.token_ids) == f"{turns}<|im_start|>assistant\n"
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


def test_partial_credit_is_the_reward_of_a_prompt_of_its_source(tokenizer: Any) -> None:
    prompt = TaskSource("reasoning_gym", task(tokenizer), 1, tokenizer)[4]
    assert (prompt.id, reference(prompt)) == ("4", reference(task(tokenizer).prompt(1, 4)))
    assert tokenizer.decode(prompt.token_ids).endswith("<|im_start|>assistant\n")
    around = f"It is {reference(prompt)}, I think"
    texts = [reference(prompt), around, ""]
    rewards = [task(tokenizer).reward(prompt, tokenizer.encode(text + "<|im_end|>")) for text in texts]
    assert rewards == [1.0, len(reference(prompt)) / len(around), 0.0]


def test_an_answer_is_the_last_match_of_a_pattern(tokenizer: Any) -> None:
    tagged = task(tokenizer, answer_pattern="<answer>(.*?)</answer>")
    prompt = tagged.prompt(0, 0)
    text = f"<answer>no</answer> or rather <answer> {reference(prompt)} </answer>."
    assert tagged.reward(prompt, tokenizer.encode(text)) == 1.0
    assert tagged.reward(prompt, tokenizer.encode(reference(prompt))) == 0.0
    number = task(tokenizer, answer_pattern="-?[0-9]+")
    assert number.reward(prompt, tokenizer.encode(f"7 or {reference(prompt)}, I think")) == 1.0
    assert number.reward(prompt, tokenizer.encode(f"{reference(prompt)}, not 7")) == 0.0
    perhaps = task(tokenizer, answer_pattern="-?[0-9]*")  # matches nothing, too
    assert perhaps.reward(prompt, tokenizer.encode(f"It is {reference(prompt)}.")) == 1.0
    with pytest.raises(ConfigError, match=r"prompts\.options do not fit .* unterminated subpattern"):
        task(tokenizer, answer_pattern="(")


def test_a_generator_that_does_not_repeat_itself_is_found(tokenizer: Any) -> None:
    made = task(tokenizer).prompt(0, 0)
    with pytest.raises(DataError, match="another puzzle"):
        task(tokenizer).reward(made._replace(text="1, 2, ?"), [1])


def test_options_that_cannot_be_used_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="no_such_puzzle"):
        task(tokenizer, "no_such_puzzle")
    with pytest.raises(ConfigError, match="colour"):
        task(tokenizer, colour="red")
    with pytest.raises(ConfigError, match="does not exist"):
        tasks.load("reasoning_gym", {"name": "number_sequence", "tokenizer": "./nowhere"})
