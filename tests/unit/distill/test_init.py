"""`distill init`: the file loads, fits, and no two roles share a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow
import pytest
import typer
from command import left
from pyarrow import parquet
from sized_models import dense

from distill.config.loading import load
from distill.config.prompts import DatasetPrompts
from distill.planning import starter
from distill.planning.starter import Wanted, write
from distill.preflight_checks import devices
from distill.preflight_checks.machine import GIB
from student_trainer.objectives.config import Auto
from sync.base.errors import ConfigError
from sync.base.settings import ModelSource

ROOT = Path(__file__).parents[3]
ROWS = str(ROOT / "configs/user_run.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dense(tmp_path_factory.mktemp("model"), max_position_embeddings=64)


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose configurations a written file names."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("gpus", [3, 4, 8])
def test_every_gpu_has_one_role_at_most(model: str, gpus: int, tmp_path: Path) -> None:
    write(tmp_path / "run.toml", Wanted(model, model, ROWS, gpus, 10.0))
    config = load(tmp_path / "run.toml")
    used = [*config.student.devices, *config.teachers["teacher"].devices, str(config.trainer.devices)]
    if gpus > 3:
        used += config.evaluation.placement.devices
    names = [name for one in used for name in one.split(",")]
    assert sorted(names) == [str(index) for index in range(gpus)]
    assert (config.trainer.ranks, config.student.replicas) == {3: (1, 1), 4: (1, 1), 8: (3, 3)}[gpus]
    assert config.rollout.max_tokens == 32
    assert config.trainer.deepspeed.name == "zero3_gpu.json"
    assert config.objective == Auto()


def test_a_teacher_that_needs_several_gpus_is_split_over_a_power_of_two(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def three_gib(
        source: ModelSource, dtype: str, flags: dict[str, int], length: int, names: list[str]
    ) -> tuple[dict[str, float], float, tuple[str, ...]]:
        tensor = flags["tensor-parallel-size"]
        size = 3 if source.path.endswith("/") else 0.5
        return {"weights": size * GIB / tensor}, 0.9, tuple(names[:tensor])

    monkeypatch.setattr(starter, "engine_memory", three_gib)
    monkeypatch.setattr(starter, "check_devices", lambda config: [])
    write(tmp_path / "run.toml", Wanted(f"{model}/", model, ROWS, 8, 1.0))  # 3 / 4 GiB < 0.9 < 3 / 2 GiB
    config = load(tmp_path / "run.toml")
    assert config.teachers["teacher"].devices == ["0,1,2,3"]
    assert config.teachers["teacher"].engine_args["tensor_parallel_size"] == 4
    assert config.student.devices == ["6", "7"]
    assert config.trainer.devices == "4"


def test_without_gpus_every_role_computes_on_cores(model: str, tmp_path: Path) -> None:
    write(tmp_path / "run.toml", Wanted(model, model, ROWS, 0, 0))
    config = load(tmp_path / "run.toml")
    assert (config.student.devices, config.trainer.devices) == ([], None)
    assert config.trainer.deepspeed.name == "zero3_cpu.json"


@pytest.mark.parametrize(
    ("gpus", "gib", "prompts", "message"),
    [
        (2, 10.0, ROWS, r"the teacher needs 1, a replica 1 and the trainer 1 .* give 3 or more"),
        (4, 1.0, ROWS, r"needs 2\.0 GiB on each of 4 GPUs, and 0\.9 of 1 GiB are there"),
        (4, 10.0, "rows.jsonl", r"--prompts rows\.jsonl is no file: name a \.jsonl file"),
        (0, 0.0, "HERE/odd.jsonl", r"its rows have a, b, and none of them is called prompt, messages"),
    ],
)
def test_what_does_not_suffice_is_refused_and_nothing_is_written(
    model: str, tmp_path: Path, gpus: int, gib: float, prompts: str, message: str
) -> None:
    (tmp_path / "odd.jsonl").write_text('{"a": "x", "b": "y"}\n')
    prompts = prompts.replace("HERE", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "run.toml", Wanted(model, model, prompts, gpus, gib))
    assert not (tmp_path / "run.toml").exists()


def test_the_command_asks_on_a_terminal_alone_and_overwrites_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "gpus", dict)
    words = ["init", str(tmp_path / "run.toml"), "--teacher", model, "--student", model]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert left(*words) == 2
    assert "needs --prompts, --gpus, --gpu-gib: give them" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    answers = {"prompts": [ROWS, ROWS], "gpus": [-1, 0]}
    monkeypatch.setattr(typer, "prompt", lambda name, type: answers[name].pop(0))
    assert left(*words) == 2
    assert "--gpus -1 is too little: give 0 or more" in capsys.readouterr().err
    assert left(*words) == 0
    assert answers == {"prompts": [], "gpus": []}
    before = (tmp_path / "run.toml").read_text()
    assert left(*words) == 2
    assert "exists, and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "run.toml").read_text() == before


ANSWERED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("row", "field", "drops"),
    [
        ({"n": 1, "messages": ANSWERED[:1]}, "messages", False),
        ({"messages": ANSWERED}, "messages", True),
        ({"conversations": SHAREGPT}, "conversations", True),
        ({"question": "a", "answer": "b"}, "question", False),
        ({"id": 3, "utterance": "a"}, "utterance", False),
    ],
)
def test_the_field_is_the_one_that_the_rows_have(
    model: str, row: object, field: str, drops: bool, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    write(tmp_path / "run.toml", Wanted(model, model, str(rows), 0, 0))
    prompts = load(tmp_path / "run.toml").prompts
    assert (prompts.field, prompts.drop_answer) == (field, drops)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_is_read_as_its_folder(model: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if kind == "csv":
        (folder / "train.csv").write_text("id,question,answer\n1,a,b\n")
    else:
        table = pyarrow.table({"id": [1], "question": ["a"], "answer": ["b"]})
        parquet.write_table(table, folder / "train.parquet")
    write(tmp_path / "run.toml", Wanted(model, model, str(folder / f"train.{kind}"), 0, 0))
    prompts = load(tmp_path / "run.toml").prompts
    assert isinstance(prompts, DatasetPrompts)
    assert (prompts.path, prompts.field) == (str(folder), "question")
    (folder / "other.csv").write_text("question\na\n")
    with pytest.raises(ConfigError, match=r"holds other\.csv too: move the file to a folder of its own"):
        write(tmp_path / "other.toml", Wanted(model, model, str(folder / f"train.{kind}"), 0, 0))
