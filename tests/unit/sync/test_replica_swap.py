"""A model whose weights may come halfway ends on one whole checkpoint, or its process ends."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from sync.base.errors import SnapshotError
from sync.vllm.swap import MIXED_EXIT, Source, Swap
from sync.weights.snapshots.checkpoint import digesting, read_folder
from sync.weights.snapshots.checkpoint import tensor_digest as digest


class Model:
    """Two tensors; staging refuses `refused`, and placing fails after the first one when told to."""

    def __init__(self) -> None:
        self.held = {"a": 0.0, "b": 0.0}
        self.refused, self.fail_on = "", ""

    def stage(self, tensors):
        staged = {name: float(tensor) for name, tensor in tensors}
        if self.refused in staged:
            raise RuntimeError(f"no room for {self.refused}")
        return partial(self._place, staged.items())

    def not_staged(self, tensors):
        return partial(self._place, ((name, float(tensor)) for name, tensor in tensors))

    def _place(self, tensors) -> None:
        for name, value in tensors:
            if name == self.fail_on:
                raise RuntimeError(f"{name} broke")
            self.held[name] = value

    def source(self, value: float, digests=None, read=None) -> Source:
        return Source(str(value), read or both(value).items, self.stage, digests)


def both(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor(value), "b": torch.tensor(value)}


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def swap(model):
    return Swap(model.source(0.0))


ZEROS, ONES, TWOS = ({"a": value, "b": value} for value in (0.0, 1.0, 2.0))
DIGESTS = {name: digest(torch.tensor(1.0)) for name in "ab"}
"""Of ONES."""


def follow(swap: Swap, source: Source) -> str | None:
    swap.prepare(source)
    return swap.apply()


def test_nothing_changes_before_what_was_staged_is_put_in_place(swap, model):
    assert swap.digests is None
    swap.prepare(model.source(1.0))
    assert (model.held, swap.digests) == (ZEROS, None)
    assert swap.apply() is None
    assert (model.held, swap.digests, swap.mixed) == (ONES, DIGESTS, False)
    with pytest.raises(SnapshotError, match="nothing is staged"):
        swap.apply()


def test_nothing_is_read_or_digested_while_what_was_staged_is_put_in_place(swap, model, monkeypatch):
    reads = []
    swap.prepare(model.source(1.0, read=lambda: reads.append("a read") or both(1.0).items()))
    digesting = "sync.weights.snapshots.checkpoint.tensor_digest"
    monkeypatch.setattr(digesting, lambda tensor: reads.append("a digest"))
    swap.apply()
    assert (reads, swap.mixed) == (["a read"], False)


def test_a_version_that_cannot_be_staged_changes_nothing(swap, model):
    follow(swap, model.source(1.0))
    model.refused = "b"
    with pytest.raises(RuntimeError, match="no room for b"):
        swap.prepare(model.source(2.0))
    model.refused = ""
    with pytest.raises(SnapshotError, match="'b'"):  # bytes other than announced
        swap.prepare(model.source(2.0, {"a": digest(torch.tensor(2.0)), "b": digest(torch.tensor(9.0))}))
    assert (model.held, swap.mixed) == (ONES, False)
    with pytest.raises(SnapshotError, match="nothing is staged"):
        swap.apply()


def test_what_fails_halfway_is_told_and_reverted(swap, model):
    follow(swap, model.source(1.0))
    model.fail_on = "b"
    assert "b broke" in follow(swap, model.source(2.0))
    assert swap.mixed
    assert model.held == {"a": 2.0, "b": 1.0}
    model.fail_on = ""
    with pytest.raises(SnapshotError, match="not reverted"):
        follow(swap, model.source(3.0))
    swap.revert()
    assert (model.held, swap.digests, swap.mixed) == (ONES, DIGESTS, False)


def test_a_worker_that_succeeded_can_revert_with_the_others(swap, model):
    follow(swap, model.source(1.0))
    follow(swap, model.source(2.0))
    swap.revert_or_end()
    assert model.held == ONES
    follow(swap, model.source(2.0))
    swap.settle()
    swap.revert_or_end()
    assert model.held == TWOS


def test_a_model_that_is_not_staged_is_read_in_the_pause_and_checked_there(swap, model):
    given = replace(model.source(1.0), stage=model.not_staged)
    follow(swap, given)
    assert (model.held, swap.digests) == (ONES, DIGESTS)
    assert "gave other bytes" in follow(swap, replace(given, digests={"a": "another"}))
    assert swap.mixed


def test_an_old_checkpoint_that_changed_meanwhile_is_not_reverted_to(swap, model):
    weights = both(1.0)
    follow(swap, replace(model.source(1.0, read=weights.items), name="old"))
    weights["b"] = torch.tensor(5.0)
    model.fail_on = "a"
    follow(swap, model.source(2.0))
    model.fail_on = ""
    with pytest.raises(SnapshotError, match=r"old gave other bytes .*'b'"):
        swap.revert()
    assert swap.mixed


ENDING = """
from sync.vllm.swap import Source, Swap
def stage(tensors): raise RuntimeError("broken")
Swap(Source("old", dict().items, stage)).revert_or_end()
print("still here")
"""


def test_a_process_that_cannot_revert_ends():
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (MIXED_EXIT, "")
    assert "cannot be loaded again" in ended.stderr


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
