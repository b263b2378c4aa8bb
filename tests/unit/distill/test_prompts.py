"""The cursor over prompts, and the sources behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from jinja2 import TemplateError

from distill.config import DatasetPrompts, JsonlPrompts
from distill.prompts.sources import TableSource, TaskSource, read_dataset, read_jsonl, text_encoder
from distill.prompts.stream import Cursor, Prompt, PromptStream
from sync.errors import DataError


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def table(count: int) -> TableSource:
    return TableSource(Prompt(str(i), [i, i + 1], "s", None) for i in range(count))


def test_every_epoch_gives_each_row_once_in_an_order_of_its_own() -> None:
    stream = PromptStream(table(7), seed=3)
    epochs = [[prompt.id for prompt in stream.take(7)] for _ in range(3)]
    for number, ids in enumerate(epochs):
        assert sorted(ids) == [f"{number}:{row}:0" for row in range(7)]
    assert len({tuple(i.split(":")[1] for i in ids) for ids in epochs}) == 3


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


def test_another_seed_gives_another_order() -> None:
    assert PromptStream(table(20), seed=1).take(20) != PromptStream(table(20), seed=2).take(20)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(DataError, match="0 prompts were found"):
        PromptStream(table(0), seed=0)


@dataclass
class Made:
    text: str
    token_ids: list[int] | None
    answer: str | None


class Doubling:
    """A task: say twice the number."""

    def prompt(self, seed: int, index: int) -> Made:
        return Made(f"{seed + index}", None, f"{2 * (seed + index)}")

    def passes(self, prompt: Prompt, completion: object) -> bool:
        return False


def test_a_task_has_no_end_and_keeps_its_answers() -> None:
    stream = PromptStream(TaskSource("doubling", Doubling(), seed=40, encode=letters), seed=9)
    first, second = stream.take(2)
    assert (first.text, first.token_ids, first.answer) == ("40", letters("40"), "80")
    assert second.id == "0:1:0"
    assert stream.cursor == Cursor(0, 2)


def write(path: Path, *rows: object) -> JsonlPrompts:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return JsonlPrompts(type="jsonl", path=path, source_field="from", answer_field="gold", template="plain")


def test_rows_of_a_file_keep_text_source_and_answer(tmp_path: Path) -> None:
    config = write(
        tmp_path / "p.jsonl",
        {"prompt": "ab", "from": "math", "gold": 7},
        "",
        {"prompt": "c", "from": "x", "gold": 1},
    )
    source = read_jsonl(config, letters, max_prompt=5)
    assert len(source) == 2
    assert source[0] == Prompt("1", letters("ab"), "math", "7", "ab")
    assert source[1].id == "3"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"p\.jsonl:2: not JSON"),
        ("[1]", r"p\.jsonl:2: a JSON list, not an object"),
        ({"text": "a"}, r"p\.jsonl:2: no field 'prompt'; the row has text"),
        ({"prompt": 3, "from": "x", "gold": ""}, r"p\.jsonl:2: field 'prompt' is 3"),
        ({"prompt": "", "from": "x", "gold": ""}, r"p\.jsonl:2: field 'prompt' is ''"),
        ({"prompt": [{"role": "user"}], "from": "x", "gold": ""}, r'p\.jsonl:2: .*template = "chat"'),
        (
            {"prompt": "abcdef", "from": "x", "gold": ""},
            r"p\.jsonl:2: the prompt has 6 tokens, allowed are 1 to 5",
        ),
        ({"prompt": "abc", "gold": ""}, r"p\.jsonl:2: no field 'from'"),
        ({"prompt": "abc", "from": "x"}, r"p\.jsonl:2: no field 'gold'"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    config = write(tmp_path / "p.jsonl", {"prompt": "ok", "from": "x", "gold": ""}, row)
    with pytest.raises(DataError, match=message):
        read_jsonl(config, letters, max_prompt=5)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "a"}], r"p\.jsonl:1: every chat message needs a role"),
        (["a"], r"p\.jsonl:1: every chat message needs a role"),
        ([{"role": "system", "content": "a"}], r"p\.jsonl:1: .* refuses the messages \(no system role\)"),
    ],
)
def test_messages_that_no_template_takes_are_named_by_file_and_line(
    tmp_path: Path, messages: object, message: str
) -> None:
    def refuse(_: object) -> list[int]:
        raise TemplateError("no system role")

    write(tmp_path / "p.jsonl", {"prompt": messages})
    with pytest.raises(DataError, match=message):
        read_jsonl(JsonlPrompts(type="jsonl", path=tmp_path / "p.jsonl"), refuse, 5)


def test_bytes_that_are_no_text_are_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:1: not JSON"):
        read_jsonl(JsonlPrompts(type="jsonl", path=path, template="plain"), letters, 5)


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


class Tokenizer:
    """Encodes letters; a chat is its roles and contents, and an opened answer."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return letters(text)

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        assert add_generation_prompt
        assert not return_dict
        return letters("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


def test_a_text_becomes_one_turn_of_a_chat() -> None:
    encode = text_encoder(Tokenizer("template"), "chat")
    assert encode("hi") == letters("<user>hi<assistant>")
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert encode(turns) == letters("<system>s<user>u<assistant>")
    assert text_encoder(Tokenizer(None), "plain")("hi") == letters("hi")


def test_a_tokenizer_without_a_chat_template_is_refused_for_chats() -> None:
    with pytest.raises(DataError, match=r'prompts\.template = "plain"'):
        text_encoder(Tokenizer(None), "chat")
