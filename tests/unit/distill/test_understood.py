"""What a run says of its prompts, and what it refuses before it reads any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import CHATML, HEADER, byte_tokenizer
from small_config import make_config

from distill.config import RunConfig
from distill.preflight_checks.tokens import check_rendering, first_prompts
from distill.prompts.sources import open_prompts
from sync.base.errors import DataError
from sync.base.settings import ModelSource
from sync.base.tokenizers import end_ids, load_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the config of a Qwen3 and a byte-level tokenizer whose end token is <|endoftext|>."""
    from transformers import Qwen3Config

    byte_tokenizer(end="<|endoftext|>").save_pretrained(tmp_path / "model")
    Qwen3Config(vocab_size=260, max_position_embeddings=256, eos_token_id=0).save_pretrained(
        tmp_path / "model"
    )
    return tmp_path / "model"


def config_of(model: Path, **prompts: Any) -> RunConfig:
    path = model.parent / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": f"0{n}"}) + "\n" for n in range(20)))
    return make_config(
        student={"path": str(model)},
        teachers={"t": {"path": str(model), "max_length": 128}},
        prompts={"path": path, "answer_field": "answer", **prompts},
    )


def test_the_end_of_a_turn_ends_completions_and_the_first_prompt_is_shown(model: Path) -> None:
    config, tokenizer = config_of(model), load_tokenizer(ModelSource(path=str(model)))
    assert end_ids(config.student, tokenizer) == [0]
    config, lines = check_rendering(config, tokenizer)
    assert config.rollout.stop_token_ids == [2]
    assert lines == [
        "prompts: the chat template ends a turn with '<|im_end|>' (2), at which the model does not stop: "
        "rollout.stop_token_ids = [2]"
    ]
    shown = first_prompts(config, open_prompts(config, tokenizer), tokenizer)
    assert shown[0].startswith("prompts: the first is '<|im_start|>user\\nq")
    assert shown[0].endswith("<|im_end|>\\n<|im_start|>assistant\\n' (21 tokens)")
    assert shown[1].startswith("prompts: first answers: '0")
    assert shown[2] == "prompts: completions end at '<|endoftext|>' (0), '<|im_end|>' (2)"


def test_a_template_that_does_not_open_the_answer_is_refused(model: Path) -> None:
    tokenizer = load_tokenizer(ModelSource(path=str(model)))
    tokenizer.chat_template = CHATML.removesuffix(HEADER)
    with pytest.raises(
        DataError, match=r"does not open the assistant's turn: .* begins with '<\|im_start\|>assist"
    ):
        check_rendering(config_of(model), tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else "
        "' ' + m.content + eos_token }}{% endfor %}"
    )
    config, lines = check_rendering(config_of(model), tokenizer)
    assert (config.rollout.stop_token_ids, lines) == ([], []), "[/INST] opens the answer"


def test_the_clock_of_a_template_is_the_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}\n" + CHATML)
    config, lines = check_rendering(config_of(model), load_tokenizer(ModelSource(path=str(model))))
    moment = config.student.template_time
    assert moment is not None
    assert f"stays at {moment} (student.template_time)" in lines[0]
    config.run_dir.mkdir(parents=True)
    record = config.model_dump(mode="json")
    record["student"]["template_time"] = "2024-07-26T10:00:00"
    (config.run_dir / "config.json").write_text(json.dumps(record))
    resumed, _ = check_rendering(config_of(model), load_tokenizer(ModelSource(path=str(model))))
    text = load_tokenizer(resumed.student).apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False
    )
    assert text.startswith("2024-07-26\n")


def test_a_tokenizer_class_that_loses_spaces_is_refused(model: Path) -> None:
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "tokenizer_class": "LlamaTokenizerFast"}))
    tokenizer = load_tokenizer(ModelSource(path=str(model)))
    with pytest.raises(DataError, match=r"makes .* of .*two  spaces.* correct tokenizer_class"):
        check_rendering(config_of(model), tokenizer)
