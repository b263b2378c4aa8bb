"""The cursor over prompts, and the sources behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import CHATML, byte_tokenizer, letters
from jinja2 import TemplateError

from distill.config.prompts import DatasetPrompts, JsonlPrompts
from distill.prompts.rows import Encode, RowReader, dataset_rows, jsonl_rows, row_encoder
from distill.prompts.sources import TableSource, TaskSource
from distill.prompts.stream import Cursor, Prompt, PromptStream
from sync.base.errors import ConfigError, DataError


def read_jsonl(config: JsonlPrompts, encode: Encode, max_prompt: int) -> TableSource:
    return TableSource(RowReader(config, encode, max_prompt).prompts(jsonl_rows(config.path)))


def read_dataset(config: DatasetPrompts, encode: Encode, max_prompt: int) -> TableSource:
    return TableSource(RowReader(config, encode, max_prompt).prompts(dataset_rows(config)))


def rows_of(**fields: Any) -> JsonlPrompts:
    return JsonlPrompts(type="jsonl", path=Path("p.jsonl"), **fields)


def table(count: int) -> TableSource:
    return TableSource(Prompt(str(i), [i, i + 1], "s", None) for i in range(count))


def test_every_epoch_gives_each_row_once_in_an_order_of_its_own() -> None:
    stream = PromptStream(table(7), seed=3)
    epochs = [[prompt.id for prompt in stream.take(7)] for _ in range(3)]
    for number, ids in enumerate(epochs):
        assert sorted(ids) == [f"{number}:{row}:0" for row in range(7)]
    assert len({tuple(i.split(":")[1] for i in ids) for ids in epochs}) == 3
    assert epochs[0] != [prompt.id for prompt in PromptStream(table(7), seed=4).take(7)]


def test_copies_of_a_prompt_follow_each_other_under_their_own_ids() -> None:
    prompts = PromptStream(table(3), seed=0, per_prompt=2).take(6)
    rows = [prompt.id.split(":") for prompt in prompts]
    assert [copy for _, _, copy in rows] == ["0", "1"] * 3
    assert [row for _, row, _ in rows[::2]] == [row for _, row, _ in rows[1::2]]
    assert prompts[0].token_ids == prompts[1].token_ids


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 9])
def test_a_cursor_goes_on_where_another_stream_stopped(taken: int) -> None:
    whole = PromptStream(table(5), seed=1).take(12)
    first = PromptStream(table(5), seed=1)
    assert first.take(taken) == whole[:taken]
    second = PromptStream(table(5), seed=1)
    second.cursor = Cursor(*first.cursor)
    assert second.take(12 - taken) == whole[taken:]


@dataclass
class Made:
    text: str
    token_ids: list[int] | None
    answer: str | None


class Doubling:
    """A task: say twice the number."""

    def prompt(self, seed: int, index: int) -> Made:
        return Made(f"{seed + index}", None, f"{2 * (seed + index)}")

    def reward(self, prompt: Prompt, completion: object) -> bool:
        return False


def test_a_task_has_no_end_and_keeps_its_answers() -> None:
    stream = PromptStream(TaskSource("doubling", Doubling(), seed=40, encode=letters), seed=9)
    first, second = stream.take(2)
    assert (first.text, first.token_ids, first.answer) == ("40", letters("40"), "80")
    assert second.id == "0:1:0"
    assert stream.cursor == Cursor(0, 2)


def write(path: Path, *rows: object) -> JsonlPrompts:
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return JsonlPrompts(type="jsonl", path=path, source_field="from", answer_field="gold", template="plain")


def test_rows_of_a_file_keep_text_source_and_answer(tmp_path: Path) -> None:
    rows = {"prompt": "ab", "from": "math", "gold": 7}, "", {"prompt": "c", "from": "x", "gold": 1}
    config = write(tmp_path / "p.jsonl", *rows)
    source = read_jsonl(config, letters, max_prompt=5)
    assert len(source) == 2
    assert source[0] == Prompt("1", letters("ab"), "math", "7", "ab")
    assert source[1].id == "3"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON list, not an object"),
        (b'{"prompt": "\xff"}', "not JSON"),
        ({"text": "a"}, "no field 'prompt'; the row has text"),
        ({"prompt": 3, "from": "x", "gold": ""}, "field 'prompt' is 3"),
        ({"prompt": "", "from": "x", "gold": ""}, "field 'prompt' is ''"),
        ({"prompt": [{"role": "user"}], "from": "x", "gold": ""}, '.*template = "chat"'),
        ({"prompt": "abcdef", "from": "x", "gold": ""}, "the prompt has 6 tokens, allowed are 1 to 5"),
        ({"prompt": "abc", "gold": ""}, "no field 'from'"),
        ({"prompt": "abc", "from": "x"}, "no field 'gold'"),
        ({"prompt": "abc", "from": "x", "gold": None}, "field 'gold' is None: give a text or a"),
        ({"prompt": "abc", "from": "x", "gold": [1]}, r"field 'gold' is \[1\]: give a text or a"),
        ({"prompt": "abc", "from": None, "gold": 1}, "field 'from' is None: give a text or a"),
        ({"prompt": "abc", "from": "x", "gold": "\ud83d"}, "field 'gold' holds half a char"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    config = write(tmp_path / "p.jsonl", {"prompt": "ok", "from": "x", "gold": ""}, row)
    with pytest.raises(DataError, match=rf"p\.jsonl:2: {message}"):
        read_jsonl(config, letters, max_prompt=5)


def test_a_row_that_the_template_refuses_is_named_by_file_and_line(tmp_path: Path) -> None:
    def refuse(messages: Any) -> list[int]:
        raise TemplateError("no system role")

    write(tmp_path / "p.jsonl", {"prompt": [{"role": "system", "content": "a"}]})
    with pytest.raises(DataError, match=r"p\.jsonl:1: .* refuse .*\(TemplateError: no system role\)"):
        read_jsonl(JsonlPrompts(type="jsonl", path=tmp_path / "p.jsonl"), refuse, 5)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    config = JsonlPrompts(type="jsonl", path=tmp_path / "no.jsonl", template="plain")
    with pytest.raises(DataError, match=r"no\.jsonl cannot be read"):
        read_jsonl(config, letters, 5)


def test_a_dataset_that_cannot_be_loaded_says_what_to_correct(tmp_path: Path) -> None:
    config = DatasetPrompts(type="dataset", path=str(tmp_path), split="test", template="plain")
    wanted = f"dataset '{tmp_path}' .* split 'test'.* cannot be loaded .*correct prompts.path, name, split"
    with pytest.raises(DataError, match=wanted):  # no files
        read_dataset(config, letters, 5)
    (tmp_path / "rows.json").write_text('{"prompt": ')
    with pytest.raises(DataError, match=wanted):  # a broken file
        read_dataset(config, letters, 5)
    (tmp_path / "rows.json").write_text('{"prompt": "ab"}')
    with pytest.raises(DataError, match=wanted):  # no such split
        read_dataset(config, letters, 5)
    assert read_dataset(config.model_copy(update={"split": "train"}), letters, 5)[0].token_ids == [97, 98]


def test_a_tokenizer_without_a_chat_template_is_refused_for_chats() -> None:
    with pytest.raises(DataError, match=r'prompts\.template = "plain"'):
        row_encoder(byte_tokenizer(None), rows_of())


def test_a_system_prompt_a_suffix_and_variables_of_the_template() -> None:
    template = CHATML + "{% if enable_thinking is false %}no thoughts{% endif %}"
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    tokenizer = byte_tokenizer(template)
    encode = row_encoder(tokenizer, rows_of(system_prompt="s", prompt_suffix=" Think.", **variables))
    rows = {"s": "hi", "own": [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]}
    for system, row in rows.items():
        chat = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi Think.<|im_end|>\n"
        assert tokenizer.decode(encode(row)) == f"{chat}<|im_start|>assistant\nno thoughts"
    assert rows["own"][-1] == {"role": "user", "content": "hi"}, "the row itself is left as it is"
    plain = row_encoder(byte_tokenizer(None), rows_of(template="plain", prompt_suffix=" Think."))
    assert tokenizer.decode(plain("hi")) == "hi Think."


@pytest.mark.parametrize("name", ["enable_thinkin", "thinking", "messages", "add_generation_prompt"])
def test_a_variable_that_the_template_does_not_read_is_refused(name: str) -> None:
    template = "{{ messages }}{% if enable_thinking and add_generation_prompt %}"
    with pytest.raises(ConfigError, match=f"chat_template_kwargs sets '{name}'"):
        row_encoder(byte_tokenizer(template), rows_of(chat_template_kwargs={name: True}))


@pytest.mark.parametrize("setting", [{"system_prompt": "s"}, {"chat_template_kwargs": {"a": 1}}])
def test_what_goes_through_a_template_is_refused_without_one(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='set template = "chat", or leave them out'):
        row_encoder(byte_tokenizer(None), rows_of(template="plain", **setting))


def test_a_suffix_needs_a_last_message_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    path.write_text(json.dumps({"prompt": turns}))
    config = JsonlPrompts(type="jsonl", path=path, prompt_suffix="!")
    with pytest.raises(DataError, match=r"p\.jsonl:1: prompts\.prompt_suffix .* must be the user's"):
        read_jsonl(config, row_encoder(byte_tokenizer("'tool'"), config), 50)


def test_rows_outside_the_filters_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{"x" * length}"}}\n' for length in (1, 2, 3, 4, 5, 6, 7)))
    config = JsonlPrompts(type="jsonl", path=path, template="plain", min_prompt_tokens=2, max_prompt_tokens=5)
    reader = RowReader(config, letters, longest=6)
    kept = [prompt.text for prompt in reader.prompts(jsonl_rows(path))]
    assert kept == ["xx", "xxx", "xxxx", "xxxxx"]
    wanted = f"prompts: 3 of 7 rows of {path} dropped: 2 longer than 5 tokens, 1 shorter than 2 tokens"
    assert reader.note == wanted
    for most in (1, 7):  # shorter than the shortest, longer than what fits
        problem = f"prompts.max_prompt_tokens is {most}, and it must lie between"
        with pytest.raises(ConfigError, match=problem):
            RowReader(config.model_copy(update={"max_prompt_tokens": most}), letters, longest=6)
