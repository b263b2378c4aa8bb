"""Sums with a calculator: a tool that the teacher calls well and the student often wrongly.

    user      u:47*83+55=a:      student  <tool_call>{…"47*83"}</tool_call><eos>
    tool      t:3901a:           student  <tool_call>{…"3901+55"}</tool_call><eos>
    tool      t:3956a:           student  3956<eos>

`configs/environments/calculator.py` plays it, with numbers of two digits. A call's JSON is one token before
the expression and one behind it; an error of the tool is one token.

    python -m distill.tasks.calculate FOLDER SEED    makes the models and prints their two folders
"""

from __future__ import annotations

import string
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from distill.tasks import Models
from distill.tasks.teaching import Lesson, Recipe, make_tokenizer, masked_loss, taught_pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, USER, ANSWER, TOOL = "<pad>", "<eos>", "u:", "a:", "t:"
BEGIN: Final = ["<tool_call>", '{"name": "compute", "arguments": {"expression": "']
END: Final = ['"}}', "</tool_call>", EOS]
VOCABULARY: Final = [PAD, EOS, USER, ANSWER, TOOL, *BEGIN, *END[:2], *string.digits, "+", "*", "="]
"""Token of each id."""
PAD_ID = 0
"""It also stands for an error."""
TEMPLATE: Final = (
    "{% for one in messages %}"
    "{{ {'user': 'u:', 'tool': 't:', 'assistant': 'a:'}[one.role] + one.content }}"
    "{{ '<eos>' if one.role == 'assistant' else '' }}"
    "{% endfor %}{{ 'a:' if add_generation_prompt else '' }}"
)
LOWEST, HIGHEST = 10, 99
ERROR_SHARE: Final = 0.3
"""Share of lessons that have a call with a character too few, an error, and the call once more."""
TEACHER = Recipe(128, 3, 4, 2, 384, steps=140, muon=True)
STUDENT = Recipe(96, 2, 3, 1, 256, steps=100)


def make_models(folder: Path, seed: int) -> Models:
    """A teacher that calls the tool well and a student that often does not; made once, kept in `folder`."""
    return taught_pair(
        folder, seed, __file__, (TEACHER, STUDENT), calculate_tokenizer(), partial(masked_loss, lesson)
    )


def calculate_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the game, with the chat template."""
    call = r"<tool_call>|</tool_call>|\{[^\d]*\"(?=[\d+*])|\"\}\}"
    error = r"(?<=t:)[^\d-][\s\S]*?(?=t:\d|a:\z)"
    return make_tokenizer(VOCABULARY, rf"<eos>|{error}|[uat]:|{call}|.", EOS, PAD, TEMPLATE)


def lesson(rng: np.random.Generator) -> Lesson:
    """One episode; taught are the right calls and the answer."""
    a, b, c = (int(integer) for integer in rng.integers(LOWEST, HIGHEST + 1, 3))
    ids, taught = list[int](), list[bool]()

    def add(words: list[str], teach: bool = False) -> None:
        ids.extend(VOCABULARY.index(word) for word in words)
        taught.extend([teach] * len(words))

    add([USER, *f"{a}*{b}+{c}=", ANSWER])
    wrong = int(rng.integers(2)) if rng.random() < ERROR_SHARE else None
    for call, (expression, result) in enumerate([(f"{a}*{b}", a * b), (f"{a * b}+{c}", a * b + c)]):
        if call == wrong:
            sign = 2 if call == 0 else expression.index("+")
            add([*BEGIN, *expression[:sign], *expression[sign + 1 :], *END, TOOL, PAD, ANSWER])
        add([*BEGIN, *expression, *END], teach=True)
        add([TOOL, *str(result), ANSWER])
    add([*str(a * b + c), EOS], teach=True)
    return ids, taught


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in make_models(Path(sys.argv[1]), int(sys.argv[2])))
