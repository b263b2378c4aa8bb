"""Which prompt has which index, across passes, resumes and processes: tables, tasks, streams and mixtures."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from byte_tokenizer import Letters, byte_tokenizer, letters
from small_config import make_config

from distill.config import RunConfig
from distill.config.prompts import DatasetPrompts, MixturePrompts
from distill.prompts import sources, streaming
from distill.prompts.rewards import load_rewards
from distill.prompts.rows import RowReader
from distill.prompts.sources import EnvironmentSource, PromptSplit, TableSource, keep_position
from distill.prompts.stream import DRAWS, Cursor, Mixture, Prompt, PromptStream, by_weight
from distill.prompts.streaming import StreamSource, open_stream, saved_starts
from distill.record.resume import content
from sync.base.errors import ConfigError, DataError


def table(name: str, count: int) -> TableSource:
    return TableSource(Prompt(str(i), [i], "default", None, f"{name} {i}") for i in range(count))


def test_every_epoch_gives_each_row_once_in_an_order_of_its_own() -> None:
    stream = PromptStream(table("s", 7), seed=3)
    epochs = [[prompt.id for prompt in stream.take(7)] for _ in range(3)]
    for number, ids in enumerate(epochs):
        assert sorted(ids) == [f"{number}:{row}:0" for row in range(7)]
    assert len({tuple(i.split(":")[1] for i in ids) for ids in epochs}) == 3
    assert epochs[0] != [prompt.id for prompt in PromptStream(table("s", 7), seed=4).take(7)]


def test_copies_of_a_prompt_follow_each_other_under_their_own_ids() -> None:
    prompts = PromptStream(table("s", 3), seed=0, per_prompt=2).take(6)
    rows = [prompt.id.split(":") for prompt in prompts]
    assert [copy for _, _, copy in rows] == ["0", "1"] * 3
    assert [row for _, row, _ in rows[::2]] == [row for _, row, _ in rows[1::2]]
    assert prompts[0].token_ids == prompts[1].token_ids


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 9])
def test_a_cursor_goes_on_where_another_stream_stopped(taken: int) -> None:
    whole = PromptStream(table("s", 5), seed=1).take(12)
    first = PromptStream(table("s", 5), seed=1)
    assert first.take(taken) == whole[:taken]
    second = PromptStream(table("s", 5), seed=1)
    second.cursor = Cursor(*first.cursor)
    assert second.take(12 - taken) == whole[taken:]


# --- streams that are read block by block

FILES, ROWS = 3, 20


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetPrompts:
    """60 rows "0" to "59" in three files."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(FILES):
        rows = range(number * ROWS, (number + 1) * ROWS)
        (folder / f"{number}.jsonl").write_text("".join(f'{{"prompt": "{row}"}}\n' for row in rows))
    return DatasetPrompts(type="dataset", path=str(folder), template="plain", stream_rows=7)


def opened(config: DatasetPrompts, wanted: int = 0, seed: int = 1) -> tuple[StreamSource, list[Prompt]]:
    return open_stream(config, RowReader(config, Letters(), 50), seed, wanted)


def going_on(source: Any, folder: Path) -> Any:
    """The source, whose place is read from the folder and kept there."""
    keep_position(source, folder, saved_starts(folder))
    return source


def texts(source: StreamSource, indices: Iterable[int]) -> list[str]:
    return [source[index].text for index in indices]


def test_a_pass_gives_every_row_once_and_never_one_that_is_held_out(dataset: DatasetPrompts) -> None:
    source, held_out = opened(dataset, wanted=3)
    held = {prompt.text for prompt in held_out}
    assert len(held) == 3
    rows = FILES * ROWS - 3
    every = [source[index] for index in range(3 * rows + dataset.stream_rows)]
    assert len({prompt.id for prompt in every}) == len(every)
    for number in range(3):
        counts = Counter(prompt.text for prompt in every if prompt.id.startswith(f"{number}."))
        assert counts == dict.fromkeys({str(row) for row in range(60)} - held, 1)


def test_rows_are_shuffled_within_their_block_alone(dataset: DatasetPrompts) -> None:
    source, _ = opened(dataset)
    blocks = [texts(source, range(7 * block, 7 * block + 7)) for block in range(3)]
    for number, block in enumerate(blocks):
        assert sorted(map(int, block)) == list(range(7 * number, 7 * number + 7))
        assert block != sorted(block, key=int)
    assert texts(opened(dataset, seed=2)[0], range(21)) != list(itertools.chain(*blocks))


@pytest.mark.parametrize("position", [0, 6, 7, 33, 59, 60, 61, 150])
@pytest.mark.parametrize("kept", [True, False], ids=["with its file", "without its file"])
def test_a_resumed_stream_goes_on_with_the_same_rows(
    dataset: DatasetPrompts, tmp_path: Path, position: int, kept: bool
) -> None:
    whole = going_on(opened(dataset, wanted=4)[0], tmp_path)
    wanted = [whole[index] for index in range(position + 30)]
    if not kept:
        (tmp_path / "stream-prompts.json").unlink()
    stream = PromptStream(going_on(opened(dataset, wanted=4)[0], tmp_path), seed=5, per_prompt=2)
    stream.cursor = Cursor(0, 2 * position)
    taken = [(one.token_ids, one.id.split(":")[1]) for one in stream.take(60)[::2]]
    assert taken == [(one.token_ids, one.id) for one in wanted[position:]]


def test_a_resume_with_its_file_reads_little_again(dataset: DatasetPrompts, tmp_path: Path) -> None:
    whole = going_on(opened(dataset)[0], tmp_path)
    expected = texts(whole, range(55))[50:]
    for _ in range(3):
        again = going_on(opened(dataset)[0], tmp_path)
        assert texts(again, range(50, 55)) == expected
        again._thread.shutdown()
        assert again._reader.read <= 3 * 7, "two blocks, and the beginning of a third"
    other = going_on(opened(dataset.model_copy(update={"min_prompt_tokens": 2}))[0], tmp_path)
    assert texts(other, range(5)) != texts(whole, range(5)), "the file of another stream is not believed"
    (tmp_path / "stream-prompts.json").write_text("{")
    assert texts(going_on(opened(dataset)[0], tmp_path), range(50, 55)) == expected


def test_a_jump_is_exact_two_blocks_are_in_memory_and_the_next_is_read_ahead(dataset: DatasetPrompts) -> None:
    source, jumping = opened(dataset)[0], opened(dataset)[0]
    expected, jumps = [], (0, 90, 3, 55, 99, 7, 98)
    for index in range(100):
        expected.append(source[index].text)
        assert len(source._blocks) <= 3
    assert texts(jumping, jumps) == [expected[index] for index in jumps]
    stream = PromptStream(source, seed=0)
    stream.cursor = Cursor(0, 100)
    while (loading := stream.loading(5)) is not None:
        loading.result(timeout=60)
    assert {100 // 7, 104 // 7} <= source._blocks.keys()


def rows_of(folder: Path, rows: list[dict[str, str]], **fields: Any) -> DatasetPrompts:
    """A dataset of these rows."""
    (folder / "rows").mkdir()
    (folder / "rows/rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return DatasetPrompts(**{"type": "dataset", "path": str(folder / "rows"), "template": "plain", **fields})


def test_filters_and_unusable_rows_are_dropped_and_counted(tmp_path: Path, caplog: Any) -> None:
    rows = [{"prompt": "x" * (1 + row % 3)} for row in range(60)] + [{"prompt": ""}] * 3
    source, _ = opened(rows_of(tmp_path, rows, stream_rows=8, max_prompt_tokens=2))
    assert {len(source[index].token_ids) for index in range(40)} == {1, 2}
    [source[index] for index in range(48)]
    assert "pass 0 has ended; prompts: 23 of 63 rows" in caplog.text
    assert "20 longer than 2 tokens, 3 unusable" in caplog.text
    assert "row 60: field 'prompt' is ''" in caplog.text


def test_what_is_odd_about_the_first_rows_is_counted_once_and_messages_are_kept(tmp_path: Path) -> None:
    config = rows_of(tmp_path, [{"prompt": "x", "tools": "y"}] * 9, stream_rows=4, template="chat")
    reader = RowReader(config, byte_tokenizer(), 50, keeps_messages=True)
    assert open_stream(config, reader, 1, 0)[0][0].messages
    assert reader.notes == (f"prompts: nothing reads these of {config.path}: 'tools' (9 of 9 rows)",)


def test_a_stream_of_which_most_is_unusable_ends_the_run(tmp_path: Path) -> None:
    rows = [{"prompt": "x"}] * 300 + [{"prompt": ""}] * 400
    source, _ = opened(rows_of(tmp_path, rows, stream_rows=50))
    assert source[249].text == "x"
    problem = r"301 of 601 rows cannot be used, such as .* row 600: field 'prompt'"
    with pytest.raises(DataError, match=problem):
        [source[index] for index in range(400)]


def test_where_a_resume_begins_does_not_decide_whether_a_stream_goes_on(tmp_path: Path) -> None:
    rows = [{"prompt": "x"}] * 300 + [{"prompt": ""}] * 40 + [{"prompt": "y"}] * 300
    config = rows_of(tmp_path, rows, stream_rows=50)
    for _ in range(2):
        source = going_on(opened(config)[0], tmp_path)
        assert texts(source, range(300, 330)) == ["y"] * 30
        source._thread.shutdown()


def test_a_stream_that_gives_nothing_or_may_change_is_refused(dataset: DatasetPrompts) -> None:
    with pytest.raises(DataError, match=r"gives no prompt to train on in 60 rows .*60 shorter than 9 tokens"):
        opened(dataset.model_copy(update={"min_prompt_tokens": 9}))[0][0]
    hub = dataset.model_copy(update={"path": "org/rows"})
    with pytest.raises(ConfigError, match=r"name a commit in prompts\.revision"):
        opened(hub)
    with pytest.raises(DataError, match="cannot be loaded"):
        opened(dataset.model_copy(update={"split": "train[:10%]"}))


@pytest.mark.parametrize("kind", [ConnectionError, httpx2.ConnectError])
def test_a_dataset_that_cannot_be_read_any_further_is_named_and_tried_again(
    dataset: DatasetPrompts, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    expected = texts(opened(dataset)[0], range(21))
    source, _ = opened(dataset)
    real = streaming.open_dataset

    class Torn:
        def __init__(self, config: DatasetPrompts) -> None:
            self._rows = real(config)
            self.load_state_dict, self.state_dict = self._rows.load_state_dict, self._rows.state_dict

        def __iter__(self) -> Iterator[Any]:
            yield from itertools.islice(self._rows, 10)
            raise kind("the server left")

    monkeypatch.setattr(streaming, "open_dataset", Torn)
    assert texts(source, range(7)) == expected[:7]
    wanted = rf"rows row 10 cannot be read \({kind.__name__}: the server left\): resume the run when it can"
    with pytest.raises(DataError, match=wanted):
        source[7]
    monkeypatch.setattr(streaming, "open_dataset", real)
    assert texts(source, range(21)) == expected


# --- mixtures


class Endless:
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(str(index), [index], "default", None, f"endless {index}")


def test_a_mixture_draws_in_proportion_and_each_part_goes_through_its_rows() -> None:
    parts = {"a": table("a", 10), "b": table("b", 30), "c": Endless()}
    mixture = Mixture(parts, {"a": 2.0, "b": 1.0}, seed=3)
    drawn = [mixture[index] for index in range(4000)]
    counts = Counter(prompt.source for prompt in drawn)
    for name, share in {"a": 0.5, "b": 0.25, "c": 0.25}.items():
        assert abs(counts[name] / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5, "four sigma"
    assert len({prompt.id for prompt in drawn}) == 4000
    for name, rows in {"a": 10, "b": 30}.items():
        mine = [prompt for prompt in drawn if prompt.source == name]
        for epoch in range(len(mine) // rows):
            texts_ = [prompt.text for prompt in mine[epoch * rows : (epoch + 1) * rows]]
            assert sorted(texts_) == sorted(f"{name} {row}" for row in range(rows))
    assert [p.text for p in drawn if p.source == "c"] == [f"endless {i}" for i in range(counts["c"])]
    assert mixture.sources == {"a", "b", "c"}


@pytest.mark.parametrize("position", [0, 5, DRAWS - 1, DRAWS, 3 * DRAWS + 17])
def test_a_mixture_needs_nothing_but_the_index(position: int) -> None:
    def made() -> Mixture:
        return Mixture({"a": table("a", 7), "b": Endless()}, {}, seed=1)

    first = made()
    wanted = [first[index] for index in range(position + 9)][position:]
    again = made()
    assert [again[position + i] for i in reversed(range(9))] == wanted[::-1]
    assert [first[i] for i in range(3)] == [made()[i] for i in range(3)], "and goes back"


def test_held_out_prompts_are_shared_out_by_weight() -> None:
    assert by_weight(10, [1, 1]) == [5, 5]
    assert by_weight(10, [2, 1]) == [7, 3]
    assert by_weight(2, [1, 1, 1]) == [1, 1, 0]
    assert by_weight(0, [1, 5]) == [0, 0]


PLAIN: dict[str, Any] = {"type": "jsonl", "template": "plain"}


def mixed(tmp_path: Path, **more: Any) -> RunConfig:
    for name, reply in {"math": "7", "law": "no"}.items():
        rows = [json.dumps({"prompt": f"{name} {i}", "gold": reply}) for i in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    part = {**PLAIN, "answer_field": "gold", "reward_fn": "exact"}
    parts = {name: {**part, "path": str(tmp_path / f"{name}.jsonl")} for name in ("math", "law")}
    prompts = {"type": "mixture", "parts": {**parts, **more.pop("parts", {})}, "weights": {"math": 3.0}}
    config = make_config(evaluation={"prompts": 8})
    return RunConfig.model_validate(config.model_dump() | {"prompts": prompts | more})


def opened_mixture(config: RunConfig) -> PromptSplit:
    return sources.open_prompts(config, Letters(), 64)


@pytest.mark.parametrize(("kind", "least"), [("file", 7), ("stream", 2)])
def test_parts_that_read_the_same_rows_train_on_none_that_another_holds_out(
    tmp_path: Path, dataset: DatasetPrompts, kind: str, least: int
) -> None:
    """Of two with 3 to 1 of the held-out prompts, one of which drops rows; and of a copy of a file."""
    plain = {**PLAIN, "path": str(tmp_path / "math.jsonl")}
    other = {"path": str(tmp_path / "copy.jsonl")}
    if kind == "stream":
        plain, other = {**dataset.model_dump(), "stream_rows": 50}, {}
    config = mixed(tmp_path, parts={"math": plain, "law": plain | other | {"min_prompt_tokens": least}})
    shutil.copy(tmp_path / "math.jsonl", tmp_path / "copy.jsonl")
    split = opened_mixture(config)
    held = {prompt.text for prompt in split.held_out}
    assert len(held) >= 4
    trained = {split.train[index].text for index in range(600)}
    assert held.isdisjoint(trained)
    assert len(trained) > 40


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_what_is_held_out_is_trained_on_under_no_other_row(tmp_path: Path, kind: str) -> None:
    """Of a file and a stream with every row ten times."""
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows/train.jsonl"
    path.write_text("".join(f'{{"prompt": "q{n}"}}\n' for n in range(40)) * 10)
    plain = {**PLAIN, "path": str(path)}
    if kind == "stream":
        plain = {**plain, "type": "dataset", "path": str(path.parent), "stream_rows": 50}
    config = make_config(evaluation={"prompts": 4})
    split = opened_mixture(RunConfig.model_validate(config.model_dump() | {"prompts": plain}))
    held = [prompt.text for prompt in split.held_out]
    assert len(held) == len({*held}) >= 2
    assert {split.train[index].text for index in range(400 if kind == "stream" else 300)}.isdisjoint(held)
    assert ("prompts: 400 rows hold 40 prompts" in split.notes) == (kind == "file")


def test_parts_of_one_environment_train_on_no_task_that_another_holds_out() -> None:
    tasks = [EnvironmentSource("e", 0)[task] for task in range(6)]
    counted = sources.CountedEnvironmentSource("e", 2, 32)
    splits = {
        "a": PromptSplit(EnvironmentSource("e", 6), tasks, None),
        "b": PromptSplit(counted, tasks[:2], None),
    }
    parts = {name: {"type": "environment", "environment": "e"} for name in splits}
    prompts = MixturePrompts.model_validate({"type": "mixture", "parts": parts})
    sources._hold_out_together(prompts, splits)
    assert [splits[name].train[0].task for name in "ab"] == [6, 6]
    assert len(splits["b"].train) == 26
    splits["b"] = PromptSplit(sources.CountedEnvironmentSource("e", 0, 5), [], None)
    with pytest.raises(ConfigError, match=r"parts\.b: another part holds out all of its prompts: give"):
        sources._hold_out_together(prompts, splits)


def test_a_configured_mixture_holds_out_of_each_part_and_rewards_by_part(tmp_path: Path) -> None:
    split = opened_mixture(mixed(tmp_path))
    assert Counter(prompt.source for prompt in split.held_out) == {"math": 6, "law": 2}
    held = {prompt.text for prompt in split.held_out}
    trained = [split.train[index] for index in range(1000)]
    assert held.isdisjoint(prompt.text for prompt in trained)
    assert sources.data_sources(split) == {"math", "law"}
    rewards = split.rewards
    worker = load_rewards(rewards.prompts)
    of = {prompt.source: prompt for prompt in trained}
    found = [worker(of[part], rewards.read(of[part], [*letters("7")])).value for part in ("math", "law")]
    assert found == [1.0, 0.0]


def test_a_part_of_a_mixture_may_be_streamed(tmp_path: Path, dataset: DatasetPrompts) -> None:
    part = dataset.model_dump() | {"reward_fn": None}
    split = opened_mixture(mixed(tmp_path, parts={"more": part}))
    assert split.rewards is None
    assert split.notes == ("prompts: completions have no reward, because more of prompts.parts has none",)
    parts = {name: PLAIN | {"path": str(tmp_path / f"{name}.jsonl")} for name in ("math", "law")}
    config = mixed(tmp_path, parts={**parts, "more": part})
    first, second = opened_mixture(config), opened_mixture(config)
    stream = PromptStream(going_on(first.train, tmp_path), seed=0)
    while (loading := stream.loading(100)) is not None:
        loading.result(timeout=60)
    wanted = [prompt.id for prompt in stream.take(300)]
    assert (tmp_path / "stream-more.json").is_file()
    again = PromptStream(going_on(second.train, tmp_path), seed=0)
    again.cursor = Cursor(0, 200)
    assert [prompt.id for prompt in again.take(100)] == wanted[200:]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"weights": {"maths": 1.0}}, "prompts.weights names maths, the parts are math, law"),
        ({"parts": {"law": {**PLAIN, "path": "x", "source_field": "f"}}}, r"parts\.law\.source_field is set"),
    ],
)
def test_what_a_mixture_cannot_use_is_refused(tmp_path: Path, more: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        opened_mixture(mixed(tmp_path, **more))


def test_a_resume_compares_the_rows_of_every_part(tmp_path: Path) -> None:
    deepspeed = Path(__file__).parents[3] / "configs/deepspeed/zero3_cpu.json"
    config = mixed(tmp_path).with_(trainer={"deepspeed": deepspeed})
    before = content(config, opened_mixture(config))["prompts"]
    (tmp_path / "law.jsonl").write_text((tmp_path / "law.jsonl").read_text().replace("law 99", "law 98"))
    after = content(config, opened_mixture(config))["prompts"]
    assert before["math"] == after["math"]
    assert before["law"] != after["law"]
