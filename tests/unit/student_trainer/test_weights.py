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
from blake3 import blake3
from disks import BALLAST, free, mounted
from flat_tensors import digests
from plain_step import ALONE, zero_shards
from routed_models import PUBLISHED, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from student_trainer import weights as module
from student_trainer.config import LoRAConfig
from student_trainer.engine import Student, check_head, with_adapters
from student_trainer.ranks import Ranks
from student_trainer.weights import BLOCK, Weights, block_sums, checksum, copy_of, layout
from sync.base import durable
from sync.base.errors import ConfigError
from sync.weights.snapshots.checkpoint import bits, fingerprint, tensors
from sync.wire.head import HeadShape

INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
every_precision = pytest.mark.parametrize("dtype", INTEGERS, ids=str)


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """Nothing to write."""


def model(dtype: torch.dtype = torch.float32, tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size: Any = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 1}
    config = LlamaConfig(**size, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).to(dtype)


def test_a_folder_is_waited_for_whatever_part_of_it_finds_the_disk_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each library that writes a part has an error of its own for a full disk."""
    weights = Weights(model(torch.bfloat16), ALONE)
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
            space = os.statvfs(disk)
            with (disk / BALLAST).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, (space.f_bavail - pages) * space.f_frsize)
            weights.save_folder(disk / "out", tokenizer)
            assert {path.name: path.read_bytes() for path in (disk / "out").iterdir()} == wanted
            shutil.rmtree(disk / "out")
            (disk / BALLAST).unlink(missing_ok=True)
    assert 8 <= len(waits) < 16, "some of these disks have room for all of it"
    assert waits == list(range(len(waits)))


def cut(network: Any, world: int, rank: int) -> Ranks:
    """Give every parameter its shard of that rank."""
    for parameter in network.parameters():
        parameter.ds_tensor = zero_shards(parameter, world)[rank].clone()
        parameter.ds_shape = parameter.shape
    return Ranks(rank, world, torch.device("cpu"))


def test_the_padding_of_a_shard_is_not_in_the_checksum() -> None:
    """DeepSpeed never sets it: two starts may find other bits there."""
    network = model()
    weights = Weights(network, cut(network, 3, 2))
    before, shard = weights.checksum(), next(p for p in network.parameters() if p.numel() == 8).ds_tensor
    shard[2] = 5.0
    assert weights.checksum() == before
    shard[1] = 5.0
    assert weights.checksum() != before


def test_a_snapshot_does_not_follow_the_weights() -> None:
    network = model()
    shards = Weights(network, ALONE).snapshot()
    before = {name: shard.copy() for name, shard in shards.items()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)
    assert all(np.array_equal(before[name], shards[name]) for name in shards)


@every_precision
def test_a_snapshot_of_a_device_shard_stays_on_the_device(dtype: torch.dtype) -> None:
    copied: Any = copy_of(torch.empty(5, dtype=dtype, device="meta"))
    assert (copied.device.type, copied.dtype, copied.shape) == ("meta", INTEGERS[dtype], (5,))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_adapters_of_the_embeddings_and_of_the_output_layer_are_refused(name: str) -> None:
    adapters = LoRAConfig(rank=2, target_modules=["q_proj", name])
    with pytest.raises(ConfigError, match=rf"'q_proj', '{name}'\]: .*; leave their names out"):
        with_adapters(model(tied=False), adapters, 0)


def test_adapters_alone_are_trained_and_published(tmp_path: Path) -> None:
    adapted = with_adapters(model(torch.bfloat16), LoRAConfig(rank=2, alpha=4.0), 0)
    pupil = Student(adapted, HeadShape(11), 8)
    assert check_head(pupil, pupil, torch.device("cpu")) < 0.1
    weights = Weights(adapted, ALONE)
    weights.save_folder(tmp_path / "out", NoTokenizer())
    written = json.loads((tmp_path / "out/adapter_config.json").read_text())
    trained = {"inference_mode": False, "target_modules": sorted(written["target_modules"])}
    assert json.loads(weights.adapter_config or "") == written | trained
    adapted.save_pretrained(tmp_path / "theirs")
    assert digests(tmp_path / "out") == digests(tmp_path / "theirs") == weights.digests()
    assert fingerprint(tensors(tmp_path / "out")) == weights.fingerprint
    saved, shards = bits(tensors(tmp_path / "out")), weights.snapshot()
    assert {*saved} == {part.name for part in weights.slices}
    assert all(np.array_equal(saved[name].ravel(), shards[name]) for name in saved)


# --- checkpoint tensors as flat ranges of parameters --------------------------------------------------------


@pytest.mark.parametrize("family", [*PUBLISHED, "llama"])
def test_shards_are_the_bits_of_the_saved_folder_which_transformers_saves_alike(
    family: str, tmp_path: Path
) -> None:
    """Fused experts in bf16 with a head of their own; a tied llama in fp32."""
    network, world = model() if family == "llama" else build(family).to(torch.bfloat16), 3
    whole = Weights(network, ALONE)
    whole.save_folder(tmp_path / "ours", NoTokenizer())
    network.save_pretrained(tmp_path / "theirs")
    modes = {path.stat().st_mode for path in (tmp_path / "ours").iterdir()}
    assert len(modes) == 1, "whoever may read the config may read the weights"
    assert whole.digests() == digests(tmp_path / "ours") == digests(tmp_path / "theirs")
    assert ("lm_head.weight" in whole.digests()) is (family != "llama")
    if family in ("deepseek-v3", "glm4"):  # which is no parameter
        assert "model.layers.1.mlp.gate.e_score_correction_bias" in whole.digests()
    assert fingerprint(tensors(tmp_path / "ours")) == whole.fingerprint
    saved = bits(tensors(tmp_path / "ours"))
    held = {name: np.zeros_like(array) for name, array in saved.items()}
    for rank in range(world):
        weights = Weights(network, cut(network, world, rank))
        shards = weights.snapshot()
        for part in weights.slices:
            there = slice(part.start, part.start + part.count)
            assert not held[part.name][there].any(), "it is another rank's"
            held[part.name][there] = shards[part.name]
    assert saved.keys() == held.keys()
    assert all(np.array_equal(saved[name], held[name]) for name in saved)


def test_a_checkpoint_tensor_that_is_no_flat_range_is_refused() -> None:
    from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

    network, halves = model(), ["mlp.left_proj.weight", "mlp.right_proj.weight"]
    for source, how, why in (
        ("mlp.turned_proj.weight", Transpose(0, 1), r"turned_proj.weight is no flat range of .*up_proj"),
        (halves, Concatenate(dim=1), "no flat range"),
    ):
        network._weight_conversions = [WeightConverter(source, "mlp.up_proj.weight", [how])]
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        with pytest.raises(ConfigError, match=why):
            layout(network, shapes)


# --- the checksum -------------------------------------------------------------------------------------------


LENGTHS = [0, 1, 5, BLOCK - 1, BLOCK, 3 * BLOCK + 7]


def drawn(dtype: torch.dtype) -> list[torch.Tensor]:
    """Shards behind one another in one buffer, as DeepSpeed's are."""
    whole = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0)).to(dtype)
    return list(whole.split(LENGTHS))


@every_precision
def test_the_checksum_of_host_memory_is_a_digest_of_every_bit(dtype: torch.dtype) -> None:
    whole = b"".join(shard.view(torch.uint8).numpy().tobytes() for shard in drawn(dtype))
    assert checksum(drawn(dtype)) == blake3(whole).hexdigest(length=8)


@every_precision
@pytest.mark.parametrize("blocks", [1, 2, 256])
def test_block_sums_are_their_definition(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, blocks: int
) -> None:
    monkeypatch.setattr(module, "_BLOCKS_AT_ONCE", blocks)
    keys = module._keys(torch.device("cpu")).tolist()
    assert all(key % 2 for key in keys), "one element that changes always shows"
    assert len({*keys}) == BLOCK, "opposite changes of two do not cancel"
    for shard in drawn(dtype):
        numbers = shard.view(INTEGERS[dtype])
        parts = [numbers[start : start + BLOCK].tolist() for start in range(0, len(numbers), BLOCK)]
        expected = [sum(k * x for k, x in zip(keys, part, strict=False)) % (1 << 64) for part in parts]
        assert [int(one) % (1 << 64) for one in block_sums(numbers)] == expected


def test_the_checksum_of_fixed_weights_is_fixed() -> None:
    """Ledgers of different days are compared."""
    assert checksum([torch.arange(40000.0)]) == "23597cfb2b1d886c"
    assert block_sums(torch.arange(3, dtype=torch.int32)).tolist() == [6298312645221868911]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_precision
def test_a_gpu_finds_the_same_block_sums(dtype: torch.dtype) -> None:
    for shard in drawn(dtype):
        numbers = shard.view(INTEGERS[dtype])
        assert torch.equal(block_sums(numbers.cuda()).cpu(), block_sums(numbers))
