"""Reward functions: whether a completion answers its prompt (`prompts.reward_fn` names them).

They run in `reward_worker` processes alone, and read the completion's text without its end token.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np

from distill import tasks
from distill.config.prompts import (
    EnvironmentPrompts,
    MixturePrompts,
    PromptsConfig,
    SinglePrompts,
    TaskPrompts,
)
from distill.prompts.stream import Prompt
from sync.base.errors import ConfigError, DataError
from sync.base.own_code import load_function, own_code
from sync.base.tokenizers import text_reader
from sync.wire.checks import LARGEST_REWARD


class Reward(NamedTuple):
    """Result of a reward function."""

    value: float
    """The completion passes from `pass_threshold` of its prompts on."""
    answer: str | None = None
    """What the completion answers, equal texts for equal answers; None: the function names none."""


Completion = str | list[int]
"""Text, or token ids with the end token, as the source's check reads it."""


class RewardSource(NamedTuple):
    """Where the rewards of some prompts come from."""

    prompts: PromptsConfig
    """They have a task or a `reward_fn`; what a worker is started with."""
    seconds: float
    """Time limit of one completion."""
    read: Callable[[Prompt, list[int]], Completion]
    """A completion as the check reads it."""


RewardFn = Callable[[Prompt, Completion], Reward]
"""Raises DataError where the user's code fails."""
_NUMBER: Final = re.compile(
    r"(?:(?<!\w)[-+]\$?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_JOINED: Final = re.compile(r"(?:[0-9](?:[^\s0-9=>]{1,3}|[\u00a0\u202f])|\\(?:[dt]?frac|sqrt|log|ln)\{?)$")
"""What stands before the last number of a fraction, a power, a time, a date, a version, a root."""
_TIMES: Final = re.compile(r"\s*(?:\\pi|π)")


def last_number(text: str) -> Decimal | None:
    """The decimal number that a text ends on, with or without thousands separators and exponent; None: it has
    none, or its last number is part of something else, such as 1/2 or 3:45."""
    text = text.replace("\u2212", "-")
    *_, last = None, *_NUMBER.finditer(text)
    if last is None or _JOINED.search(text, 0, last.start()) or _TIMES.match(text, last.end()):
        return None
    return Decimal(last.group().replace(",", "").replace("$", ""))


def exact(prompt: Prompt, completion: str) -> Reward:
    """Whether the completion is the answer, white space around both aside."""
    return Reward(completion.strip() == (prompt.answer or "").strip(), completion.strip())


def contains(prompt: Prompt, completion: str) -> bool:
    """Whether the completion contains the answer with no letter or digit right before or after it, and a
    number as a whole: 4 is not in 4.5."""
    answer = (prompt.answer or "").strip()
    before = r"(?<![0-9][.,])" if answer[:1].isdecimal() else ""
    behind = r"(?![.,][0-9])" if answer[-1:].isdecimal() else ""
    return re.search(rf"(?<!\w){before}{re.escape(answer)}{behind}(?!\w)", completion) is not None


def number(prompt: Prompt, completion: str) -> Reward:
    """Whether both end on the same number."""
    said = last_number(completion)
    equal = said is not None and said == last_number(prompt.answer or "")
    return Reward(equal, None if said is None else str(said.normalize()))


def maths(prompt: Prompt, completion: str) -> Reward:
    """Whether math-verify finds the completion's final answer equal to the reference.

    The pool's time limit alone ends a check: math-verify's own turns what it has no time for into a wrong
    answer. Raises DataError for a reference that it reads no answer in, and where it fails without a verdict.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    gold = prompt.answer or ""
    reference = parse(
        gold if "\\boxed" in gold else f"\\boxed{{{gold}}}", parsing_timeout=None, raise_on_error=True
    )
    if not reference:
        raise DataError(f"math-verify reads no answer in the reference {gold!r:.80}: correct it")
    answer = parse(completion, parsing_timeout=None, raise_on_error=True)
    failure: Exception | None = None
    # two texts are compared first, and at once; what sympy compares comes later
    pairs = sorted(
        product(reference, answer), key=lambda pair: not all(isinstance(side, str) for side in pair)
    )
    for pair in pairs:
        try:
            if verify(*pair, timeout_seconds=None, raise_on_error=True):
                return Reward(True, _named(answer))
        except Exception as error:  # noqa: BLE001 - of sympy's; another pair may be equal
            failure = error
    if failure is not None:
        raise DataError(
            f"math-verify has no verdict on {completion[-80:]!r} for the reference {gold!r:.80} "
            f"({type(failure).__name__}: {failure!s:.80}): the completion is left out"
        )
    return Reward(False, _named(answer))


def _named(answer: Sequence[Any]) -> str | None:
    """What math-verify read, as text; the completion's own words where Python refuses to write the number."""
    with suppress(ValueError, RecursionError):
        return str(answer[0]) if answer else None
    return next((reading for reading in answer if isinstance(reading, str)), None)


BUILT_IN: Final[dict[str, Callable[[Prompt, str], Any]]] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "math": maths,
}

VOTING: Final = BUILT_IN.keys() - {"contains"}
"""Functions that name what a completion answers."""


def answer_problem(reward_fn: str | None, answer: str) -> str | None:
    """Why a built-in `reward_fn` cannot use a reference answer; None: it can."""
    if reward_fn in BUILT_IN and not answer.strip():
        return f"the reference answer is empty, and prompts.reward_fn = {reward_fn!r} compares with it"
    if reward_fn == "number" and last_number(answer) is None:
        return (
            f"the reference answer {answer!r:.80} ends on no decimal number for prompts.reward_fn = 'number'"
        )
    return None


_WORDS: Final = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}[^A-Za-z\\{}]+[A-Za-z]{2,}")
"""Two words one after the other, neither a LaTeX command nor a function of one letter."""


def is_prose(reward_fn: str | None, answer: str) -> bool:
    """Whether a reference answer holds words, which math-verify compares letter by letter: "The answer is 42"
    is no number to it, so that 42 is wrong."""
    return (
        reward_fn == "math" and "\\boxed" not in answer and _WORDS.search(_TEXT.sub("", answer)) is not None
    )


_TEXT: Final = re.compile(r"\\text(?:bf|it|rm)?\{[^{}]*\}")


def reward_source(
    prompts: SinglePrompts, tokenizer: Any, stop_token_ids: Sequence[int] = ()
) -> RewardSource | None:
    """What rewards completions of `prompts`; None: nothing does. `stop_token_ids`: of the run.

    Raises ConfigError for a built-in function that lacks answers or its package.
    """
    seconds = prompts.reward_timeout_seconds
    if isinstance(prompts, TaskPrompts):
        return RewardSource(prompts, seconds, lambda prompt, ids: _with_end(ids, tokenizer, stop_token_ids))
    name = prompts.reward_fn
    if name is None:
        return None
    if name in BUILT_IN and prompts.answer_field is None:
        raise ConfigError(
            f"prompts.reward_fn is {name!r} and compares with a reference answer: name its field in "
            "prompts.answer_field"
        )
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "prompts.reward_fn is 'math' and math-verify is not installed: pip install "
            "'onpolicy-distill[math]', or choose another function"
        )
    text = text_reader(tokenizer, stop_token_ids)
    return RewardSource(prompts, seconds, lambda prompt, ids: text(ids))


def _with_end(ids: list[int], tokenizer: Any, stop_token_ids: Sequence[int]) -> list[int]:
    """A completion as a task's check reads it: what ended at another id of the run's has the end token."""
    end = tokenizer.eos_token_id
    return [*ids[:-1], end] if end is not None and ids and ids[-1] in stop_token_ids else ids


# --- in a worker


def load_rewards(prompts: PromptsConfig) -> RewardFn:
    """The configured function. Raises ConfigError when it cannot be loaded."""
    if isinstance(prompts, MixturePrompts):
        rewarded = {n: part for n, part in prompts.parts.items() if not isinstance(part, EnvironmentPrompts)}
        parts = {name: load_rewards(part) for name, part in rewarded.items()}
        return lambda prompt, completion: parts[prompt.source](prompt, completion)
    assert not isinstance(prompts, EnvironmentPrompts), "an environment gives its rewards itself"
    if isinstance(prompts, TaskPrompts):
        task = tasks.load(prompts.task, prompts.options)
        return partial(_reward, f"prompts.task {prompts.task!r}, reward()", task.reward)
    name = prompts.reward_fn or ""
    of_text = BUILT_IN.get(name) or load_function(
        name, "prompts.reward_fn", tuple(BUILT_IN), "distill.rewards"
    )
    if name not in BUILT_IN:
        _check_order(name, of_text)
    return partial(_reward, f"prompts.reward_fn {name!r}", of_text)


_ANSWERS: Final = re.compile("completion|response|solution|output|generat|ground_truth|answer")
"""What functions for other trainers name their first argument; here it is the prompt."""


def _check_order(name: str, function: Callable[..., Any]) -> None:
    """Raise ConfigError for a function whose first argument is named as if it were the completion."""
    arguments = list[str]()
    with suppress(ValueError, TypeError):  # of one that is compiled, without a signature
        arguments += inspect.signature(function).parameters
    if arguments and _ANSWERS.search(arguments[0]) and "prompt" not in arguments[0]:
        raise ConfigError(
            f"prompts.reward_fn {name!r} takes ({', '.join(arguments)}), and it is called as "
            "function(prompt, completion), one completion at a time: write it so; prompt.answer is the "
            "reference"
        )


def _reward(
    name: str, function: Callable[[Prompt, Any], Any], prompt: Prompt, completion: Completion
) -> Reward:
    """Call a function on a completion.

    Raises DataError with `name`, prompt and completion when it raises or returns no number within ±1e30,
    or an answer that is no text.
    """
    about = f"prompt {prompt.id}, completion {completion[:80]!r:.80}"
    ours = function in BUILT_IN.values()
    called = "it is called as function(prompt, completion): return 0 for completions that it cannot handle"
    remedy = "the completion is left out" if ours else called
    with own_code(name, about, remedy):
        returned = function(prompt, completion)
    value, answer = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    fits = isinstance(value, bool | int | float | np.bool | np.integer | np.floating)
    # as a float, for half precision holds no bound; an int may be larger than any float
    fits = fits and abs(value if isinstance(value, int) else float(value)) <= LARGEST_REWARD
    if answer is not None:  # half of a surrogate pair is a str, and no text
        fits = fits and isinstance(answer, str) and answer.encode(errors="replace").decode() == answer
    if not fits:
        raise DataError(
            f"{name} gave {returned!r:.80} for {about}: it must return a bool or a number within "
            f"±{LARGEST_REWARD:g}, or a pair of that and the answer as text that UTF-8 holds"
        )
    # msgspec encodes no subclass of str, such as numpy's
    return Reward(float(value), None if answer is None else "".join(answer))
