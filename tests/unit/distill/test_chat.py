"""Conversations of `distill chat`, and how each model is served for it."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_config import make_config

from distill.cli.chat import _prompts
from distill.config.prompts import TaskPrompts
from distill.launch.chat import Conversations, _served_here, _student
from distill.tasks.sort_letters import STUDENT, letter_tokenizer, untaught
from sync.base.errors import ConfigError, DataError, Unreachable
from sync.wire import ScoreRefused, TeacherCompletion, TeacherPrompt, pack, unpack
from teacher_service.config import TeacherConfig

TEMPLATE = "{% for one in messages %}{{ one.content }}{{ '>' if one.role == 'user' else '' }}{% endfor %}"


class Model:
    """Completes every prompt with the same letters; an error is raised, a text of refusal returned."""

    def __init__(self, completion: str, fault: Exception | str | None = None) -> None:
        self._ids = letter_tokenizer()(completion, return_tensors="np")["input_ids"][0].astype("int32")
        self.fault = fault
        self.prompts: list[str] = []
        self.calls: list[tuple[Any, ...]] = []

    async def generate(self, prompts: list[TeacherPrompt], *how: Any) -> list[Any]:
        (prompt,) = prompts
        self.prompts.append(letter_tokenizer().decode(unpack(prompt.token_ids)))
        self.calls.append((prompt.seed, *how))
        if isinstance(self.fault, Exception):
            raise self.fault
        if self.fault is not None:
            return [ScoreRefused(prompt.id, self.fault)]
        return [TeacherCompletion(prompt.id, pack(self._ids), pack(self._ids.astype("float32")), "stop")]


def conversations(template: str | None, sampling: Mapping[str, Any] = {}, **models: Model) -> Conversations:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = template
    prompts = TaskPrompts(type="task", task="sort_letters")
    config = make_config()
    rollout = config.rollout.model_copy(update=sampling)
    config = config.model_copy(update={"prompts": prompts, "rollout": rollout})
    return Conversations(config, tokenizer, models)  # type: ignore[arg-type]


async def test_each_model_continues_a_conversation_of_its_own_until_the_reset() -> None:
    one, other = Model("xy"), Model("z")
    talk = conversations(TEMPLATE, one=one, other=other)
    assert await talk.answer("ab") == {"one": "xy", "other": "z"}
    other.fault = "8 prompt tokens are too many"
    assert await talk.answer("c") == {"one": "xy", "other": "(8 prompt tokens are too many)"}
    other.fault = Unreachable("no connection")
    assert await talk.answer("d") == {"one": "xy", "other": "(no connection)"}
    talk.reset()
    await talk.answer("e")
    assert one.prompts == ["ab>", "ab>xyc>", "ab>xyc>xyd>", "e>"]
    assert other.prompts == ["ab>", "ab>zc>", "ab>zd>", "e>"]


async def test_without_a_chat_template_every_prompt_is_continued_by_itself() -> None:
    one = Model("xy<eos>")
    talk = conversations(None, {"temperature": 0.5, "max_tokens": 3}, one=one)
    assert [await talk.answer(prompt) for prompt in ("ab>", "c>")] == [{"one": "xy"}] * 2
    assert one.prompts == ["ab>", "c>"]
    assert one.calls == [(1, 3, [], 3600.0, 0.5), (2, 3, [], 3600.0, 0.5)]


def test_a_teacher_is_served_by_one_process_that_generates_and_spares_the_kept_scores() -> None:
    teacher = TeacherConfig(
        path="m", engine="vllm", replicas=3, keep_folder=Path("scores"), engine_args={"x": 1}, host="0.0.0.0"
    )
    assert _served_here(teacher) == TeacherConfig(path="m")
    there = teacher.model_copy(update={"urls": ["http://teacher:1"]})
    assert _served_here(there) is there


def test_an_adapter_is_merged_into_the_student_and_a_missing_model_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base, run = tmp_path / "base", tmp_path / "run"
    untaught(STUDENT).save_pretrained(base)
    letter_tokenizer().save_pretrained(base)
    config = make_config(student={"path": str(base), "dtype": "float32"})
    with pytest.raises(ConfigError, match="final holds no model: finish the run"):
        _student(config, run, "final", tmp_path / "work")
    get_peft_model(untaught(STUDENT), LoraConfig(r=2, target_modules="all-linear")).save_pretrained(
        run / "final"
    )
    served = _student(config, run, "final", tmp_path / "work")
    assert (served.path, served.dtype) == (str(tmp_path / "work"), "float32")
    assert {one.name for one in Path(served.path).iterdir()} >= {"model.safetensors", "tokenizer.json"}


def test_prompts_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    with pytest.raises(DataError, match=r"stdin holds bytes that are not utf-8: convert its prompts"):
        list(_prompts())
