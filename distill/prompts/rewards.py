"""Reward functions: whether a completion answers its prompt.

    "exact"      the completion is the answer, white space around both aside
    "contains"   the answer stands in the completion, as a word or words of its own
    "number"     the last number of the completion equals the last number of the answer
    "package.module:function"   function(prompt: Prompt, completion: str) -> bool or finite number

All read the completion's text without special tokens. Above 0 a completion passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final, TypeVar

import numpy as np

from distill.config import DatasetPrompts, JsonlPrompts
from distill.prompts.stream import Prompt
from sync.errors import ConfigError, DataError
from teacher_service.router import load_function, own_code

Completion = TypeVar("Completion", str, Sequence[int])

RewardFn = Callable[[Prompt, Sequence[int]], float]
"""Reward of a completion (token ids, end token included); above 0: it answers its prompt."""
TextReward = Callable[[Prompt, str], Any]
"""The same, of the completion's text; its result is not validated yet."""
_NUMBER: Final = re.compile(r"(?:(?<!\w)[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text, with or without thousands separators; None: it has none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def exact(prompt: Prompt, completion: str) -> bool:
    """Whether the completion is the answer."""
    return completion.strip() == (prompt.answer or "").strip()


def contains(prompt: Prompt, completion: str) -> bool:
    """Whether the completion contains the answer with no letter or digit right before or after it."""
    return re.search(rf"(?<!\w){re.escape((prompt.answer or '').strip())}(?!\w)", completion) is not None


def number(prompt: Prompt, completion: str) -> bool:
    """Whether both end on the same number."""
    said = last_number(completion)
    return said is not None and said == last_number(prompt.answer or "")


BUILT_IN: Final[dict[str, TextReward]] = {"exact": exact, "contains": contains, "number": number}


def answer_problem(reward_fn: str | None, answer: str) -> str | None:
    """Why a built-in `reward_fn` cannot use a reference answer; None: it can."""
    if reward_fn in BUILT_IN and not answer.strip():
        return f"the reference answer is empty, and prompts.reward_fn = {reward_fn!r} compares with it"
    if reward_fn == "number" and last_number(answer) is None:
        return f"the reference answer {answer!r:.80} has no number for prompts.reward_fn = 'number'"
    return None


def load_reward_fn(config: JsonlPrompts | DatasetPrompts, tokenizer: Any) -> RewardFn | None:
    """The configured reward function; None: there is none. Raises ConfigError when it cannot be used.

    The returned function raises DataError when the user's function raises or returns no finite number.
    """
    name = config.reward_fn
    if name is None:
        return None
    if name in BUILT_IN and config.answer_field is None:
        raise ConfigError(
            f"prompts.reward_fn is {name!r} and compares with a reference answer: name its field in "
            "prompts.answer_field"
        )
    read = BUILT_IN.get(name) or load_function(name, "prompts.reward_fn", tuple(BUILT_IN))

    def reward_fn(prompt: Prompt, completion: Sequence[int]) -> float:
        text = tokenizer.decode(list(completion), skip_special_tokens=True)
        return reward(f"prompts.reward_fn {name!r}", read, prompt, text)

    return reward_fn


def reward(
    name: str, function: Callable[[Prompt, Completion], Any], prompt: Prompt, completion: Completion
) -> float:
    """Call the user's function on a completion.

    Raises DataError with `name`, prompt and completion when it raises or returns no finite number.
    """
    about = f"prompt {prompt.id}, completion {completion[:80]!r:.80}"
    with own_code(name, about, "return 0 for completions that it cannot handle"):
        found = function(prompt, completion)
    is_number = isinstance(found, bool | int | float | np.bool | np.integer | np.floating)
    if not is_number or not math.isfinite(found):
        raise DataError(f"{name} gave {found!r:.80} for {about}: it must return a bool or a finite number")
    return float(found)


def check_reward_fn(reward_fn: RewardFn, prompt: Prompt) -> None:
    """Try it on an empty completion. Raises ConfigError when it fails."""
    try:
        reward_fn(prompt, [])
    except DataError as error:
        raise ConfigError(f"{error} (tried with a completion of no tokens)") from error
