"""Shapes of rows, with a real tokenizer and ChatML: made right, or refused with the rule and the remedy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import CHATML, HEADER, Letters, byte_tokenizer, letters
from small_config import make_config

from distill.config import RunConfig
from distill.config.prompts import DatasetPrompts, JsonlPrompts
from distill.preflight_checks.tokens import check_rendering, first_prompts
from distill.prompts.rows import RowReader, jsonl_rows, row_encoder, rows_of
from distill.prompts.sources import open_prompts
from distill.prompts.stream import Prompt
from sync.base.errors import ConfigError, DataError
from sync.base.settings import ModelSource
from sync.base.tokenizers import end_ids, load_tokenizer

WITH_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER, ANSWER, SYSTEM = (
    {"role": role, "content": content}
    for role, content in (("user", "What is 2+2?"), ("assistant", "4."), ("system", "Be brief."))
)
ASKED = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
TEXT = {"type": "text", "text": "What is 2+2?"}
CALLS = {"role": "assistant", "tool_calls": [{}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def read(path: Path, value: Any, written: str | None = CHATML, **settings: Any) -> str:
    """The prompt of a row with that value, decoded."""
    path.write_text(json.dumps({"prompt": value}) + "\n")
    tok = byte_tokenizer(written)
    reader = RowReader(JsonlPrompts(type="jsonl", path=path, **settings), tok, 500)
    (prompt,) = reader.prompts(jsonl_rows(path))
    return str(tok.decode(prompt.token_ids))


@pytest.mark.parametrize(
    "value",
    [
        "What is 2+2?",
        [USER],
        [{**USER, "tool_calls": None, "name": None}],
        [{"role": "user", "content": [{**TEXT, "image_url": None}]}],
        [{"role": "user", "content": ["What is 2+2?"]}],
        [{"from": "human", "value": "What is 2+2?"}],
        json.dumps([{"id": 1, **USER}]),
        json.dumps(json.dumps([USER])),
    ],
)
def test_shapes_that_mean_one_question_are_one_prompt(tmp_path: Path, value: Any) -> None:
    assert read(tmp_path / "p.jsonl", value) == ASKED


def test_text_parts_are_joined_by_a_line_break_and_the_suffix_follows_them(tmp_path: Path) -> None:
    value = [{"role": "user", "content": [TEXT, {"type": "text", "text": "Now."}]}]
    prompt = read(tmp_path / "p.jsonl", value, prompt_suffix=" Think.")
    assert "user\nWhat is 2+2?\nNow. Think.<|im_end|>" in prompt


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([USER, {"from": "gpt", "value": "4."}], "is the assistant's, '4.', .*set drop_answer = true"),
        ([SYSTEM], r"no message is the user's, roles are \['system'\]"),
        ([USER, SYSTEM], "the last message has role 'system', which no assistant answers: put it first"),
        ("  ", "a user's message is empty"),
        ([{"role": "user", "content": [TEXT, IMAGE]}], "only parts of type 'text' can be used"),
        ([{"role": "user", "content": None}], r"role 'user' has no content \(missing or null\)"),
        ([{"role": "user", "content": {"text": "hi"}}], "content is {'text': 'hi'}: give a text, or a list"),
        ([{"role": "User", "content": "hi"}], "'User' is neither system, user, assistant nor named in the"),
        ([{"role": 1, "content": "hi"}], "role 1 is neither"),
        ([{"content": "hi"}], "a chat message has no role"),
        (["hi"], "a chat message is 'hi': give an object with role and content"),
        (USER, "give a text or a list of chat messages"),
        (str([USER]), "is not JSON: write it as JSON"),
        ([USER, CALLS, USER], "tool_calls, which the chat template does not"),
        (json.dumps(USER), "is JSON of chat messages, and not a list of them: give the list alone"),
        (json.dumps({"messages": [USER]}), "is JSON of chat messages, and not a list of them"),
        ("<s>[INST] 2+2? [/INST]", r"begins with '<s>\[INST\] 2\+2\?.*', as a chat of another family"),
        ("<|begin_of_text|>hi", "begins with '<|begin_of_text|>hi', as a chat of another family"),
        ("<start_of_turn>user\nhi", "as a chat of another family does .*: give its messages"),
        (ASKED, "begins with the control token '<|im_start|>', .* set template = \"plain\""),
    ],
)
def test_a_row_that_no_student_could_answer_is_refused_by_line(tmp_path, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=r"p\.jsonl:1: .*" + message.replace("|", r"\|")):
        read(tmp_path / "p.jsonl", value)


def test_the_answer_at_the_end_is_left_out_where_the_configuration_says_so(tmp_path: Path) -> None:
    turns = [SYSTEM, USER, ANSWER, USER]
    shown = read(tmp_path / "p.jsonl", [*turns, ANSWER], drop_answer=True)
    assert shown == read(tmp_path / "p.jsonl", turns)
    assert shown.count("4.") == 1


def test_calls_of_tools_are_written_once_as_json_and_null_arguments_are_dropped(tmp_path: Path) -> None:
    for arguments in ({"a": 2, "b": None}, '{"a": 2}'):
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": arguments}}]}
        turns = [USER, call, {"role": "tool", "content": "4"}]
        assert '{"a": 2}<|im_end|>' in read(tmp_path / "p.jsonl", turns, WITH_TOOLS)


@pytest.mark.parametrize("arguments", ['{"a": ', "[" * 100_000], ids=["cut", "nested"])
def test_arguments_of_a_tools_call_that_cannot_be_read_are_refused(tmp_path: Path, arguments: str) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}
    with pytest.raises(DataError, match=r"arguments of a tool's call are .*: write JSON"):
        read(tmp_path / "p.jsonl", [USER, call, USER], WITH_TOOLS)


def test_what_a_tool_says_may_be_written_as_json(tmp_path: Path) -> None:
    said = '{"degrees": 3}'
    content = "{{ m.content | tojson if m.role == 'tool' else m.content }}"
    template = CHATML.replace("{{ m['content'] }}", content)
    prompt = read(tmp_path / "p.jsonl", [USER, ANSWER, {"role": "tool", "content": said}], template)
    assert json.dumps(said) in prompt


def chatml_of(messages: str) -> str:
    return CHATML.replace("messages %}", f"{messages} %}}")


TURNS = [{"role": "user", "content": "s"}, {"role": "assistant", "content": "a"}, USER]
WRITES = "roles user, assistant, user the chat template writes .*"


@pytest.mark.parametrize(
    ("template", "value", "says"),
    [
        (chatml_of("messages if m.role != 'system'"), [SYSTEM, USER], "out what .* 'system' says, 'Be brief"),
        (chatml_of("messages if 'q' not in m.content"), "a q", "leaves out what .* role 'user' says, 'a q'"),
        (chatml_of("messages if m.role != 'assistant'"), TURNS, WRITES + "'assistant' says 0 times"),
        (chatml_of("messages[-1:]"), TURNS, WRITES + "'user' says 0 times"),
        ("{{ messages[0].content }}" + CHATML, TURNS, WRITES + "'user' says 2 times: change the row, or"),
        (None, "hi", r'prompts\.template = "plain"'),
    ],
)
def test_a_template_that_is_missing_or_leaves_out_or_repeats_a_message_is_refused(
    tmp_path: Path, template: str | None, value: Any, says: str
) -> None:
    """Also where what a message says is found within another's."""
    with pytest.raises(DataError, match=says):
        read(tmp_path / "p.jsonl", value, template)


def test_a_suffix_needs_a_last_message_of_the_user(tmp_path: Path) -> None:
    turns = [USER, {"role": "tool", "content": "b"}]
    with pytest.raises(DataError, match=r"p\.jsonl:1: prompts\.prompt_suffix .* must be the user's"):
        read(tmp_path / "p.jsonl", turns, "'tool'", prompt_suffix="!")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b'{"prompt": "a"}'), "not JSON .* in UTF-8; a folder of .* or compress"),
        (b'{"prompt": "a", "prompt": "b"}', r"has a key twice, its keys are \['prompt', 'prompt'\]"),
        (b'{"prompt": ' + b"[" * 100_000, "not JSON .*recursion"),
    ],
    ids=["gzip", "twice", "deep"],
)
def test_a_file_of_another_kind_is_refused_by_line(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"p\.jsonl:1: .*" + says):
        [*jsonl_rows(tmp_path / "p.jsonl")]
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    assert [row.fields for row in jsonl_rows(tmp_path / "p.jsonl")] == [{"prompt": "a"}]


def test_a_prompt_begins_once_and_does_not_end_before_the_answer(tmp_path: Path) -> None:
    begun = byte_tokenizer("{{ bos_token + bos_token + messages[0].content }}", bos_token="<|endoftext|>")
    config = JsonlPrompts(type="jsonl", path=tmp_path)
    with pytest.raises(DataError, match=r"begins with '<\|endoftext\|>' twice"):
        row_encoder(begun, config)("hi")
    problem = r"ends with the end token '<\|im_end\|>', behind which nothing follows"
    with pytest.raises(DataError, match=problem):
        row_encoder(byte_tokenizer("{{ messages[0].content }}<|im_end|>"), config)("hi")


# --- rows of files and datasets


def written(path: Path, *rows: object) -> JsonlPrompts:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return JsonlPrompts(type="jsonl", path=path, source_field="from", answer_field="gold", template="plain")


def prompts_of(config: JsonlPrompts | DatasetPrompts) -> list[Prompt]:
    """Of at most five tokens."""
    return [*RowReader(config, Letters(), 5).prompts(rows_of(config))]


def test_rows_of_a_file_keep_text_source_and_answer(tmp_path: Path) -> None:
    rows = {"prompt": "ab", "from": "math", "gold": 7}, "", {"prompt": "c", "from": "x", "gold": 1}
    first, second = prompts_of(written(tmp_path / "p.jsonl", *rows))
    assert first == Prompt("1", letters("ab"), "math", "7", "ab")
    assert second.id == "3"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON list, not an object"),
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
    config = written(tmp_path / "p.jsonl", {"prompt": "ok", "from": "x", "gold": ""}, row)
    with pytest.raises(DataError, match=rf"p\.jsonl:2: {message}"):
        prompts_of(config)


def test_a_row_that_the_template_refuses_is_named_by_file_and_line(tmp_path: Path) -> None:
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(DataError, match=r"p\.jsonl:1: .* refuse .*\(TemplateError: no system role\)"):
        read(tmp_path / "p.jsonl", [SYSTEM, USER], refusal + CHATML)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    config = JsonlPrompts(type="jsonl", path=tmp_path / "no.jsonl", template="plain")
    with pytest.raises(DataError, match=r"no\.jsonl cannot be read"):
        prompts_of(config)


def test_a_dataset_that_cannot_be_loaded_says_what_to_correct(tmp_path: Path) -> None:
    config = DatasetPrompts(type="dataset", path=str(tmp_path), split="test", template="plain")
    wanted = f"dataset '{tmp_path}' .* split 'test'.* cannot be loaded .*correct prompts.path, name, split"
    for content in (None, '{"prompt": ', '{"prompt": "ab"}'):  # no file, a broken one, no such split
        if content is not None:
            (tmp_path / "rows.json").write_text(content)
        with pytest.raises(DataError, match=wanted):
            prompts_of(config)
    assert prompts_of(config.model_copy(update={"split": "train"}))[0].token_ids == [97, 98]


def test_a_system_prompt_a_suffix_and_variables_of_the_template(tmp_path: Path) -> None:
    template = CHATML + "{% if enable_thinking is false %}no thoughts{% endif %}"
    settings: dict[str, Any] = {"system_prompt": "s", "prompt_suffix": " Think."}
    settings["chat_template_kwargs"] = {"enable_thinking": False}
    config = JsonlPrompts(type="jsonl", path=Path("p"), **settings)
    tokenizer = byte_tokenizer(template)
    encode = row_encoder(tokenizer, config)
    rows = {"s": "hi", "own": [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]}
    for system, row in rows.items():
        chat = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi Think.<|im_end|>\n"
        assert tokenizer.decode(encode(row)) == f"{chat}<|im_start|>assistant\nno thoughts"
    assert rows["own"][-1] == {"role": "user", "content": "hi"}, "the row itself is left as it is"


def test_the_plain_template_takes_a_text_as_it_is(tmp_path: Path) -> None:
    assert read(tmp_path / "p.jsonl", ASKED, template="plain") == ASKED
    assert read(tmp_path / "p.jsonl", "hi", None, template="plain", prompt_suffix=" Think.") == "hi Think."


@pytest.mark.parametrize(
    ("template", "settings", "says"),
    [
        *(
            (
                "{{ messages }}{% if enable_thinking and add_generation_prompt %}",
                {"chat_template_kwargs": {name: True}},
                f"chat_template_kwargs sets '{name}'",
            )
            for name in ("enable_thinkin", "thinking", "messages", "add_generation_prompt")
        ),
        (None, {"template": "plain", "system_prompt": "s"}, 'set template = "chat", or leave them out'),
        (None, {"template": "plain", "chat_template_kwargs": {"a": 1}}, "or leave them out"),
    ],
)
def test_a_setting_that_no_template_reads_is_refused(
    tmp_path: Path, template: str | None, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        read(tmp_path / "p.jsonl", "hi", template, **settings)


def test_rows_outside_the_filters_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{"x" * length}"}}\n' for length in (1, 2, 3, 4, 5, 6, 7)))
    config = JsonlPrompts(type="jsonl", path=path, template="plain", min_prompt_tokens=2, max_prompt_tokens=5)
    reader = RowReader(config, Letters(), longest=6)
    kept = [prompt.text for prompt in reader.prompts(jsonl_rows(path))]
    assert kept == ["xx", "xxx", "xxxx", "xxxxx"]
    wanted = f"prompts: 3 of 7 rows of {path} dropped: 2 longer than 5 tokens, 1 shorter than 2 tokens"
    assert reader.note == wanted
    for most in (1, 7):  # shorter than the shortest, longer than what fits
        problem = f"prompts.max_prompt_tokens is {most}, and it must lie between"
        with pytest.raises(ConfigError, match=problem):
            RowReader(config.model_copy(update={"max_prompt_tokens": most}), Letters(), longest=6)


# --- answers


def answers(path: Path, reward: str | None = "exact") -> list[str | None]:
    """Of the rows of a JSONL file or of a dataset in a folder, in order."""
    settings = {"path": str(path), "answer_field": "answer", "reward_fn": reward}
    of_file = path.suffix == ".jsonl"
    config = JsonlPrompts(type="jsonl", **settings) if of_file else DatasetPrompts(type="dataset", **settings)
    return [prompt.answer for prompt in RowReader(config, byte_tokenizer(), 500).prompts(rows_of(config))]


def test_answers_keep_the_text_that_a_csv_file_has_for_them(tmp_path: Path) -> None:
    texts = ["NA", "007", "0.50", "true", "2026-11-01", str(10**20), "1e5", "None"]
    lines = [f"What is {text}?,{text},{n}" for n, text in enumerate(texts)]
    (tmp_path / "train.csv").write_text("\n".join(["prompt,answer,n", *lines]) + "\n")
    assert answers(tmp_path) == texts
    (tmp_path / "train.csv").write_text("prompt,answer\nWhat?,\n")
    with pytest.raises(DataError, match=r"row 0: field 'answer' is None: give a text"):
        answers(tmp_path)


def test_answers_keep_the_text_that_a_jsonl_file_has_for_them(tmp_path: Path) -> None:
    texts = ["0.50", "42.0", "1e5", "true", str(10**20), '"007"']
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "?", "answer": {text}}}\n' for text in texts))
    assert answers(path) == [text.strip('"') for text in texts]
    path.write_text('{"prompt": "?", "answer": NaN}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:1: field 'answer' is not a number"):
        answers(path)


@pytest.mark.parametrize(
    ("values", "texts"), [([1.0, 2.0], ["1.0", "2.0"]), ([True, False], ["true", "false"])]
)
def test_an_answer_whose_text_a_table_has_lost_is_refused_where_texts_are_compared(
    tmp_path: Path, values: list[Any], texts: list[str]
) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"prompt": ["a", "b"], "answer": values})
    parquet.write_table(table, tmp_path / "train.parquet")
    problem = r"row 0: field 'answer' is .*, whose text is not known .* \"number\""
    with pytest.raises(DataError, match=problem):
        answers(tmp_path)
    assert answers(tmp_path, None) == texts


def test_an_answer_that_a_table_has_other_than_its_file_is_refused(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "2026-11-01"}\n')
    with pytest.raises(DataError, match=r"of type datetime, .* one of dates .*\.type = \"jsonl\""):
        answers(tmp_path, None)
    (tmp_path / "train.jsonl").unlink()
    label = datasets.ClassLabel(names=["neg", "pos"])
    features = datasets.Features({"prompt": datasets.Value("string"), "answer": label})
    rows = datasets.Dataset.from_dict({"prompt": ["a"], "answer": [1]}, features)
    rows.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"'answer' holds numbers, which stand for neg, pos: write"):
        answers(tmp_path)
    with pytest.raises(DataError, match=r"train\.parquet is a file: name the folder that holds it"):
        answers(tmp_path / "train.parquet")


def test_what_no_prompt_shows_and_what_is_odd_about_a_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    pictured = [{**USER, "images": ["a.png"], "name": "bob", "weight": None}]
    rows = [
        {"prompt": pictured, "system": "Be brief."},
        {"prompt": "Human: hi<|im_end|>\n\nAssistant:", "input": "", "system": "Be kind."},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer(CHATML + "{# name #}")
    tokenizer.unk_token = "?"
    reader = RowReader(JsonlPrompts(type="jsonl", path=path), tokenizer, 500)
    assert len([*reader.prompts(jsonl_rows(path))]) == 2
    of, unread = f"prompts: 1 rows of {path}", "'system' (2 of 2 rows), 'images' of messages (1 of 2 rows)"
    assert reader.notes == (
        f"{of} hold characters that the tokenizer has no token for",
        f"{of} end as a chat does that was rendered already, and are a user's turn here",
        f"{of} hold a control token in their text, such as '<|im_end|>'",
        f"prompts: nothing reads these of {path}: {unread}",
    )


# --- what a run says of its prompts, and what it refuses before it reads any


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the config of a Qwen3 and a byte-level tokenizer whose end token is <|endoftext|>."""
    from transformers import Qwen3Config

    folder = tmp_path / "model"
    byte_tokenizer(end="<|endoftext|>").save_pretrained(folder)
    Qwen3Config(vocab_size=260, max_position_embeddings=256, eos_token_id=0).save_pretrained(folder)
    return folder


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
    problem = r"does not open the assistant's turn: .* begins with '<\|im_start\|>assist"
    with pytest.raises(DataError, match=problem):
        check_rendering(config_of(model), tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else "
        "' ' + m.content + eos_token }}{% endfor %}"
    )
    config, lines = check_rendering(config_of(model), tokenizer)
    assert (config.rollout.stop_token_ids, lines) == ([], []), "[/INST] opens the answer"
    tokenizer.chat_template = CHATML.removesuffix(HEADER) + HEADER.replace("assistant", "model")
    with pytest.raises(DataError, match=r"opens the answer with .*model.*, and in a .*assistant"):
        check_rendering(config_of(model), tokenizer)
    tokenizer.chat_template = CHATML.removesuffix(HEADER) + HEADER.replace("assistant\n", "assistant")
    assert "the student writes the difference" in check_rendering(config_of(model), tokenizer)[1][0]
    tokenizer.chat_template = CHATML.removesuffix(HEADER) + HEADER.replace("nt\n", "nt\n<think>\n")
    assert len(check_rendering(config_of(model), tokenizer)[1]) == 1, "a thought that is opened is no other"


def test_the_clock_of_a_template_is_the_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}\n" + CHATML)
    config, lines = check_rendering(config_of(model), load_tokenizer(ModelSource(path=str(model))))
    moment = config.student.template_time
    assert f"stays at {moment} (student.template_time)" in lines[0]
    config.run_dir.mkdir(parents=True)
    record = config.model_dump(mode="json")
    record["student"]["template_time"] = "2024-07-26T10:00:00"
    (config.run_dir / "config.json").write_text(json.dumps(record))
    resumed, _ = check_rendering(config_of(model), load_tokenizer(ModelSource(path=str(model))))
    text = load_tokenizer(resumed.student).apply_chat_template([USER], tokenize=False)
    assert text.startswith("2024-07-26\n")


def test_a_tokenizer_class_that_loses_spaces_is_refused(model: Path) -> None:
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "tokenizer_class": "LlamaTokenizerFast"}))
    tokenizer = load_tokenizer(ModelSource(path=str(model)))
    with pytest.raises(DataError, match=r"makes .* of .*two  spaces.* correct tokenizer_class"):
        check_rendering(config_of(model), tokenizer)
