"""What is published has the names, shapes and bits of the folder that is saved; whole models and adapters."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faults import BALLAST, free
from memory_store import MemoryStore
from tmpfs import mounted
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from student_trainer.config import LoRAConfig
from student_trainer.engine import Student, check_head, with_adapters
from student_trainer.head import HeadShape
from student_trainer.ranks import Ranks
from student_trainer.weights import Weights, copy_of
from sync.base import durable
from sync.base.errors import ConfigError
from sync.weights.publish import Publisher
from sync.weights.snapshots.checkpoint import bits, fingerprint, tensors
from sync.wire import RunIdentity, Version

ALONE = Ranks(0, 1, torch.device("cpu"))


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """Nothing to write."""


def model(dtype: torch.dtype, tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size: dict[str, Any] = {
        "vocab_size": 12,
        "hidden_size": 8,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
    }
    config = LlamaConfig(**size, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_folder_holds_what_is_published(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    weights = Weights(Student(model(dtype, tied), HeadShape(11), 8).model, ALONE)
    weights.save_folder(tmp_path / "out", NoTokenizer())
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "whoever may read the config may read the weights"
    assert fingerprint(tmp_path / "out") == weights.fingerprint
    saved, shards = bits(tensors(tmp_path / "out")), weights.snapshot()
    assert saved.keys() == shards.keys() == weights.digests().keys()
    assert ("lm_head.weight" in saved) is not tied
    assert all(np.array_equal(saved[name].ravel(), shards[name]) for name in saved)


def test_a_folder_is_waited_for_whatever_part_of_it_finds_the_disk_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each library that writes a part has an error of its own for a full disk."""
    weights = Weights(Student(model(torch.bfloat16, tied=True), HeadShape(11), 8).model, ALONE)
    letters = Tokenizer(WordLevel({f"letter-{n}": n for n in range(500)}, unk_token="letter-0"))
    tokenizer, waits = PreTrainedTokenizerFast(tokenizer_object=letters), list[int]()
    weights.save_folder(tmp_path / "wanted", tokenizer)
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "wanted").iterdir()}
    with mounted(tmp_path / "disk", 512) as disk:
        for pages in range(16):

            def wait(_: float, pages: int = pages) -> None:
                waits.append(pages)
                free(disk)

            monkeypatch.setattr(durable, "time", SimpleNamespace(sleep=wait))
            leave(disk, pages)
            weights.save_folder(disk / "out", tokenizer)
            assert {path.name: path.read_bytes() for path in (disk / "out").iterdir()} == wanted
            shutil.rmtree(disk / "out")
            (disk / BALLAST).unlink(missing_ok=True)
    assert 8 <= len(waits) < 16, "some of these disks have room for all of it"
    assert waits == list(range(len(waits)))


def leave(disk: Path, pages: int) -> None:
    """Fill a disk but for some pages."""
    space = os.statvfs(disk)
    with (disk / BALLAST).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (space.f_bavail - pages) * space.f_frsize)


def test_the_checksum_of_the_shards_changes_with_a_single_bit() -> None:
    student = Student(model(torch.bfloat16, tied=True), HeadShape(11), 8)
    weights = Weights(student.model, ALONE)
    before = weights.checksum()
    assert weights.checksum() == before
    one = next(iter(student.parameters()))
    with torch.no_grad():
        one.view(torch.int16)[0, 0] ^= 1
    assert weights.checksum() != before
    with torch.no_grad():
        one.view(torch.int16)[0, 0] ^= 1
    assert weights.checksum() == before


def test_the_padding_of_a_shard_is_not_in_the_checksum() -> None:
    """DeepSpeed never sets it: two starts may find other bits there."""
    student = Student(model(torch.float32, tied=True), HeadShape(11), 8)
    for parameter in student.parameters():
        length = -(-parameter.numel() // 3)
        parameter.ds_shape, parameter.ds_tensor = parameter.shape, torch.ones(length)  # type: ignore[attr-defined]
    weights = Weights(student.model, Ranks(2, 3, torch.device("cpu")))
    before, shard = weights.checksum(), next(p for p in student.parameters() if p.numel() == 8).ds_tensor  # type: ignore[attr-defined]
    shard[2] = 5.0
    assert weights.checksum() == before
    shard[1] = 5.0
    assert weights.checksum() != before


def test_a_snapshot_does_not_follow_the_weights() -> None:
    student = Student(model(torch.float32, tied=True), HeadShape(11), 8)
    shards = Weights(student.model, ALONE).snapshot()
    before = {name: shard.copy() for name, shard in shards.items()}
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(1.0)
    assert all(np.array_equal(before[name], shards[name]) for name in shards)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, torch.int16), (torch.float32, torch.int32)])
def test_a_snapshot_of_a_device_shard_stays_on_the_device(dtype: torch.dtype, bits: torch.dtype) -> None:
    copied = copy_of(torch.empty(5, dtype=dtype, device="meta"))
    assert isinstance(copied, torch.Tensor)
    assert (copied.device.type, copied.dtype, tuple(copied.shape)) == ("meta", bits, (5,))


def test_ranks_share_a_tensor_without_gaps() -> None:
    """Slices as ZeRO-3 cuts them: shards of one length, padded at the end."""
    student = Student(model(torch.float32, tied=True), HeadShape(11), 8)
    for parameter in student.parameters():
        length = -(-parameter.numel() // 3)
        parameter.ds_shape, parameter.ds_tensor = parameter.shape, torch.zeros(length)  # type: ignore[attr-defined]
    parts = [Weights(student.model, Ranks(rank, 3, torch.device("cpu"))).slices for rank in range(3)]
    for pieces in zip(*parts, strict=True):
        ends = [piece.start + piece.count for piece in pieces]
        assert [piece.start for piece in pieces] == [0, *ends[:-1]]
        assert ends[-1] == int(np.prod(pieces[0].shape))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_adapters_of_the_embeddings_and_of_the_output_layer_are_refused(name: str) -> None:
    adapters = LoRAConfig(rank=2, target_modules=["q_proj", name])
    with pytest.raises(ConfigError, match=rf"'q_proj', '{name}'\]: .*; leave their names out"):
        with_adapters(model(torch.float32, tied=False), adapters, 0)


def test_adapters_alone_are_trained_and_published(tmp_path: Path) -> None:
    wrapped = with_adapters(model(torch.bfloat16, tied=True), LoRAConfig(rank=2, alpha=4.0), 0)
    student = Student(wrapped, HeadShape(11), 8)
    assert check_head(student, student, torch.device("cpu")) < 0.1
    weights = Weights(student.model, ALONE)
    assert all("lora_" in part.name for part in weights.slices)
    weights.save_folder(tmp_path / "out", NoTokenizer())
    written = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert json.loads(weights.adapter_config or "") == written | {
        "inference_mode": False,
        "target_modules": sorted(written["target_modules"]),
    }
    publisher = Publisher(MemoryStore(), RunIdentity("run", model=weights.fingerprint), weights.slices)
    report = publisher.anchor(Version(0, 0), None, tmp_path / "out", weights.snapshot(), "lora")
    assert report.kind == "lora"
