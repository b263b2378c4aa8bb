"""A model whose loader may fail halfway ends on one whole checkpoint, or its process ends."""

import logging
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from sync.errors import SnapshotError
from sync.replica.swap import MIXED_EXIT, Source, Swap
from sync.snapshots.checkpoint import digesting, read_folder
from sync.snapshots.checkpoint import tensor_digest as digest


class Model:
    """Two tensors; loading fails after the first one when told to."""

    def __init__(self) -> None:
        self.held = {"a": 0.0, "b": 0.0}
        self.fail_on = ""

    def load(self, tensors) -> None:
        for name, tensor in tensors:
            if name == self.fail_on:
                raise RuntimeError(f"no room for {name}")
            self.held[name] = float(tensor)


def source(value: float, digests=None) -> Source:
    return Source(str(value), {"a": torch.tensor(value), "b": torch.tensor(value)}.items, digests)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def swap(model):
    return Swap(model.load, source(0.0))


def test_what_was_handed_over_is_on_record(swap, model):
    assert swap.digests is None
    swap.apply(source(1.0))
    assert model.held == {"a": 1.0, "b": 1.0}
    assert swap.digests == {name: digest(torch.tensor(1.0)) for name in "ab"}
    assert (swap.error, swap.mixed) == (None, False)


def test_a_load_that_fails_halfway_is_told_and_reverted(swap, model):
    swap.apply(source(1.0))
    model.fail_on = "b"
    swap.apply(source(2.0))
    assert swap.mixed
    assert "no room for b" in swap.error
    assert model.held == {"a": 2.0, "b": 1.0}
    with pytest.raises(SnapshotError, match="not reverted"):
        swap.apply(source(3.0))
    model.fail_on = ""
    swap.revert()
    assert model.held == {"a": 1.0, "b": 1.0}
    assert swap.digests == {name: digest(torch.tensor(1.0)) for name in "ab"}
    assert not swap.mixed


def test_a_worker_that_succeeded_can_revert_with_the_others(swap, model):
    swap.apply(source(1.0))
    swap.apply(source(2.0))
    swap.revert()
    assert model.held == {"a": 1.0, "b": 1.0}
    swap.apply(source(2.0))
    swap.settle()
    swap.revert()
    assert model.held == {"a": 2.0, "b": 2.0}


def test_bytes_other_than_announced_are_no_success(swap, model):
    swap.apply(source(1.0, {"a": digest(torch.tensor(1.0)), "b": digest(torch.tensor(9.0))}))
    assert swap.mixed
    assert "'b'" in swap.error


def test_an_old_checkpoint_that_changed_meanwhile_is_not_reverted_to(model):
    weights = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    swap = Swap(model.load, source(0.0))
    swap.apply(Source("old", weights.items))
    weights["b"] = torch.tensor(5.0)
    model.fail_on = "a"
    swap.apply(source(2.0))
    model.fail_on = ""
    with pytest.raises(SnapshotError, match=r"old gave other bytes .*'b'"):
        swap.revert()
    assert swap.mixed


ENDING = """
from sync.replica.swap import Source, Swap
def load(tensors): raise RuntimeError("broken")
Swap(load, Source("old", dict().items)).revert_or_end()
print("still here")
"""


def test_a_process_that_cannot_revert_ends():
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (MIXED_EXIT, "")
    assert "cannot be loaded again" in ended.stderr


def test_reverting_leaves_the_process_alive_when_it_works(swap, caplog):
    with caplog.at_level(logging.CRITICAL):
        swap.revert_or_end()
    assert not caplog.records


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(SnapshotError, match="twice"):
        list(digesting([("a", torch.zeros(1)), ("a", torch.zeros(1))], {}))


def test_folders_are_read_file_by_file_with_their_bits(tmp_path):
    weights = {"x": torch.tensor([-0.0, float("nan")], dtype=torch.bfloat16), "y": torch.zeros(0, 3)}
    save_file({"x": weights["x"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"y": weights["y"]}, tmp_path / "model-00002-of-00002.safetensors")
    digests: dict[str, str] = {}
    assert [name for name, _ in digesting(read_folder(tmp_path), digests)] == ["x", "y"]
    assert digests == {name: digest(tensor) for name, tensor in weights.items()}


def test_a_cut_file_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(SnapshotError, match="it is no checkpoint folder"):
        list(read_folder(tmp_path))
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(100)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SnapshotError, match="cannot be read as safetensors"):
        list(read_folder(tmp_path))
