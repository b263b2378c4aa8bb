"""A run of models with unlike tokenizers of one family: what differs is left out, stopped at, and said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_config import make_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill.config import RunConfig
from distill.config.prompts import JsonlPrompts
from distill.preflight_checks.tokens import resolve
from sync.base.errors import ConfigError, DataError

VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "A", "B"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
BASE = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "chat_template": None}
INSTRUCT = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHATML}

Make = Callable[..., None]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a folder with config and tokenizer, without weights."""

    def write(name: str, special: dict[str, Any], rows: int = 16, more: tuple = (), **kept: Any) -> None:
        core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="A"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        core.add_special_tokens(VOCABULARY[:3])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
        tokenizer.add_special_tokens({"extra_special_tokens": [*more]} if more else {})
        tokenizer.save_pretrained(tmp_path / name)
        settings = {"model_type": "llama", "vocab_size": rows, "eos_token_id": tokenizer.eos_token_id}
        (tmp_path / name / "config.json").write_text(json.dumps(settings | kept))

    return write


def configured(tmp_path: Path, **teachers: str) -> RunConfig:
    config = make_config(student={"path": str(tmp_path / "student")}, run={"folder": tmp_path})
    taught = {name: {"path": str(tmp_path / path)} for name, path in teachers.items()}
    return RunConfig.model_validate(config.model_dump() | {"teachers": taught})


def test_a_base_student_ends_where_its_instruct_teacher_does_and_takes_its_template(
    make: Make, tmp_path: Path
) -> None:
    make("student", BASE)
    make("teacher", INSTRUCT)
    config, tokenizer, (names, template, ends) = resolve(configured(tmp_path, t="teacher"))
    assert config.rollout.stop_token_ids == [2]
    assert config.student.known_ids is None
    assert config.student.chat_template == str(tmp_path / "teacher")
    assert tokenizer.chat_template == CHATML
    assert "bos is '<|endoftext|>' and '<|im_start|>'" in names
    assert "the student has no chat template: prompts are rendered by the teacher's" in template
    assert "the teacher ends at '<|im_end|>' (2), the student at '<|endoftext|>' (0)" in ends


SAME = {"special": INSTRUCT}
LONGER = {"special": INSTRUCT, "more": ("<|extra|>",)}
STOPPING = {"special": INSTRUCT | {"eos_token": "<|stop|>"}, "more": ("<|stop|>",)}


@pytest.mark.parametrize(
    ("student", "teachers", "stops", "known", "says"),
    [
        (SAME, [SAME], [], None, ""),
        (LONGER, [SAME], [], 8, "1 ids from 8 on are the student's alone, such as '<|extra|>' (8)"),
        (SAME, [LONGER], [], 8, "1 ids from 8 on are the teacher's alone, such as '<|extra|>' (8)"),
        (SAME, [STOPPING], [], 8, "ends at '<|stop|>' (8), which the student does not have: it is left out"),
        ({"special": BASE}, [SAME, SAME | {"eos_token_id": [2, 7]}], [2, 7], None, "ends at"),
        (SAME, [SAME | {"rows": 7}], [], 7, "model has 7 rows: ids beyond them are left out of both sides"),
    ],
    ids=["equal", "an id of the student", "an id of the teacher", "its end", "ends of two", "few rows"],
)
def test_ids_of_one_side_alone_are_left_out_everywhere_and_ends_of_all_teachers_are_learnt(
    make: Make, tmp_path: Path, student: Any, teachers: Any, stops: list[int], known: int | None, says: str
) -> None:
    make("student", **student)
    for number, teacher in enumerate(teachers):
        make(f"t{number}", **teacher)
    given = configured(tmp_path, **{name: name for name in ("t0", "t1")[: len(teachers)]})
    config, _, lines = resolve(given)
    assert config.rollout.stop_token_ids == stops
    assert {model.known_ids for model in (config.student, *config.teachers.values())} == {known}
    assert config.subscriber("student-0").known_ids == known
    assert says in lines[-1] if says else (config, lines) == (given, [])
    assert "ends at" in says or len(lines) == bool(says)


def test_templates_are_compared_with_the_variables_of_the_prompts(make: Make, tmp_path: Path) -> None:
    make("student", INSTRUCT)
    make("teacher", {**INSTRUCT, "chat_template": CHATML + "{% if brief %}A{% endif %}"})
    config = configured(tmp_path, teacher="teacher")
    config = config.with_(prompts=JsonlPrompts(path=tmp_path / "rows.jsonl", type="jsonl"))
    assert any("render conversations alike" in line for line in resolve(config)[2])
    with pytest.raises(DataError, match="different chat templates"):
        resolve(config.with_(prompts={"chat_template_kwargs": {"brief": True}}))


@pytest.mark.parametrize(
    ("special", "rows", "error", "problem"),
    [
        ({"eos_token": "<|extra|>"}, 16, DataError, "id 8 .* means nothing to a teacher, and a completion"),
        ({}, 8, ConfigError, r"9 ids and its model 8 rows, so there is none for '<\|extra\|>' \(8\)"),
    ],
)
def test_an_id_of_the_student_alone_that_it_needs_or_that_has_no_row_is_refused(
    make: Make, tmp_path: Path, special: dict[str, str], rows: int, error: type[Exception], problem: str
) -> None:
    make("student", INSTRUCT | special, rows=rows, more=("<|extra|>",))
    make("teacher", INSTRUCT)
    with pytest.raises(error, match=problem):
        resolve(configured(tmp_path, t="teacher"))
