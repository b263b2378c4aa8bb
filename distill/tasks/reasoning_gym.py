"""Tasks of reasoning-gym: puzzles by the million, each with a scorer of its own (extra `reasoning-gym`).

    [prompts]
    type = "task"
    task = "reasoning_gym"
    options = { name = "number_sequence", tokenizer = "Qwen/Qwen3-0.6B", max_complexity = 2 }

The reward is the scorer's, with partial credit: 0.17 for a sentence around the right answer. Whether a puzzle
is held out depends on its question alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

from distill.tasks import RewardedPrompt, TaskPrompt, is_held_out
from sync.base.errors import ConfigError, DataError
from sync.base.settings import ModelSource
from sync.base.tokenizers import load_tokenizer, text_reader

_TRIES: Final = 1000


def make(
    name: str,
    tokenizer: str,
    *,
    size: int = 1_000_000,
    seed: int = 0,
    answer_pattern: str | None = None,
    template: Literal["chat", "plain"] = "chat",
    system_prompt: str | None = None,
    **options: Any,
) -> ReasoningGym:
    """The generator `name` of reasoning-gym, with its own further `options`.

    tokenizer: the student's path. size: puzzles that prompts are drawn from; seed: of these. answer_pattern:
    a regular expression, whose last match that is not empty, or the first group of that, is the answer; None:
    the whole completion is. template: as prompts.template. Raises ConfigError.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"prompts.task is 'reasoning_gym', and {error.name} is not installed: pip install "
            "'onpolicy-distill[reasoning-gym]'"
        ) from error
    loaded = load_tokenizer(ModelSource(path=tokenizer))
    if template == "chat" and not loaded.chat_template:
        raise ConfigError(
            f"prompts.options has template = 'chat', and {tokenizer!r} has no chat template: set 'plain'"
        )
    pattern = None if answer_pattern is None else re.compile(answer_pattern)
    puzzles = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return ReasoningGym(puzzles, loaded, system if template == "chat" else None, pattern)


class ReasoningGym:
    """The task; `puzzles`: a dataset of reasoning-gym. `system`: messages before a question; None: plain."""

    def __init__(
        self, puzzles: Any, tokenizer: Any, system: list[Any] | None, pattern: re.Pattern[str] | None
    ) -> None:
        self._puzzles, self._tokenizer, self._system = puzzles, tokenizer, system
        self._pattern, self._text = pattern, text_reader(tokenizer)

    def prompt(self, seed: int, index: int) -> TaskPrompt:
        return self._prompt(random.Random(f"{seed}/{index}"), held_out=False)

    def held_out(self, seed: int, index: int) -> TaskPrompt:
        return self._prompt(random.Random(f"{seed}/held out/{index}"), held_out=True)

    def reward(self, prompt: RewardedPrompt, completion: Sequence[int]) -> float:
        """reasoning-gym's score, 0 to 1. Raises DataError for a generator that does not repeat itself."""
        entry = self._puzzles[int((prompt.answer or "").partition(" ")[0])]
        if entry["question"] != prompt.text:
            raise DataError(
                f"the generator makes another puzzle than {prompt.text!r:.60} in another process, so that it "
                "cannot be scored: choose another name in prompts.options"
            )
        text = self._text(completion)
        if self._pattern is not None:
            # "[0-9]*" also matches the nothing behind the last digit
            matches = [match for match in self._pattern.finditer(text) if match[0]]
            text = matches[-1][min(1, self._pattern.groups)] or "" if matches else ""
        return float(self._puzzles.score_answer(text.strip(), entry))

    def _prompt(self, rng: random.Random, held_out: bool) -> TaskPrompt:
        """`answer` is the puzzle's number, then the reference answer."""
        for _ in range(_TRIES):
            number = rng.randrange(len(self._puzzles))
            entry = self._puzzles[number]
            if is_held_out(entry["question"]) == held_out:
                text = entry["question"]
                if self._system is None:
                    ids = self._tokenizer.encode(text)
                else:
                    messages = [*self._system, {"role": "user", "content": text}]
                    ids = self._tokenizer.apply_chat_template(
                        messages, add_generation_prompt=True, return_dict=False
                    )
                return TaskPrompt(text, list(ids), f"{number} {entry['answer']}")
        side = "held out" if held_out else "left to train on"
        raise DataError(f"no puzzle of {len(self._puzzles)} is {side}: raise size in prompts.options")
