"""Which weight files of a model folder are read, and which folders are refused: loaders would differ."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sync.base.errors import SnapshotError
from sync.weights.snapshots import checkpoint


def weights_folder(folder: Path, files: str, index: str = "", pickled: str = "") -> str:
    """What is said of a model folder with these files, and indexes that name those."""
    folder.mkdir()
    for name in ["config.json", *files.split()]:
        (folder / name).write_bytes(b"{}")
    for whole, named in (("model.safetensors", index), ("pytorch_model.bin", pickled)):
        if named:
            entries = {f"layer.{number}": name for number, name in enumerate(named.split())}
            (folder / f"{whole}.index.json").write_text(json.dumps({"weight_map": entries}))
    try:
        return checkpoint.check_weights(folder)
    except SnapshotError as error:
        return f"refused: {error}"


@pytest.mark.parametrize(
    ("files", "index", "pickled", "says"),
    [
        ("model.safetensors", "", "", ""),
        ("pytorch_model.bin training_args.bin", "", "", ""),
        ("a.safetensors b.safetensors", "a.safetensors b.safetensors", "", ""),
        ("model.safetensors pytorch_model.bin", "", "", "nothing reads pytorch_model.bin"),
        ("a.safetensors b.safetensors", "a.safetensors", "", "a.safetensors are loaded, and nothing reads b"),
        ("a.safetensors b.safetensors", "a.safetensors b.safetensors", "gone.bin", ""),
        (
            "a.safetensors",
            "a.safetensors c.safetensors",
            "",
            "refused.* names c.*1 of its 2 files are missing",
        ),
        ("a.bin", "", "a.bin c.bin", "refused: .* names c.bin"),
        ("a.bin b.bin", "", "a.bin", "refused: .*the trainer would load a.bin, and vLLM a.bin, b.bin"),
        ("a.safetensors model.safetensors", "a.safetensors", "", "refused: .*load model.*, and vLLM a.saf"),
        ("model.safetensors old.safetensors", "", "", "refused: .*load model.*and vLLM model.*, old"),
        ("model-1-of-2.safetensors", "", "", "refused: .*, and neither model.safetensors nor"),
    ],
)
def test_one_set_of_weights_is_taken_and_stray_files_are_named_or_refused(
    tmp_path: Path, files: str, index: str, pickled: str, says: str
) -> None:
    said = weights_folder(tmp_path / "model", files, index, pickled)
    assert re.search(says, said), said
    assert bool(says) == bool(said), said


def test_tensors_are_those_of_the_shards_that_the_index_names(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("old", 2)):
        save_file({name: np.full(2, value, np.int8)}, tmp_path / f"{name}.safetensors")
    assert sorted(checkpoint.tensors(tmp_path)) == ["a", "old"]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    assert [*checkpoint.tensors(tmp_path)] == ["a"]
    assert checkpoint.vllm_formats(str(tmp_path)) == {}
    (tmp_path / "consolidated.safetensors").touch()
    assert checkpoint.vllm_formats(str(tmp_path))["load-format"] == "safetensors"
