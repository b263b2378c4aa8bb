"""Checkpoint tensors as flat ranges of parameters, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flat_tensors import digests
from routed_models import PUBLISHED, build

from student_trainer.engine import Student
from student_trainer.head import HeadShape
from student_trainer.ranks import Ranks
from student_trainer.weights import Piece, Weights, layout, shape_of
from sync.base.errors import ConfigError
from sync.weights.publish import Slice
from sync.weights.snapshots import checkpoint

EXPERTS = "model.layers.0.mlp.experts"


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """Nothing to write."""


def experts(kind: str = "Qwen3Moe", **more: Any) -> Any:
    """Random weights of a model with three experts of 4 × 6."""
    import transformers

    size: dict[str, Any] = {"vocab_size": 12, "hidden_size": 6, "num_hidden_layers": 2, "head_dim": 4}
    size |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    size |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "intermediate_size": 4}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(size | more))
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: shape_of(parameter) for name, parameter in model.named_parameters()}


def test_fused_experts_are_flat_ranges_gate_before_up() -> None:
    model = experts()
    found = layout(model, shapes_of(model))
    assert found[f"{EXPERTS}.gate_up_proj"][:3] == [
        Piece(f"{EXPERTS}.0.gate_proj.weight", (4, 6), 0),
        Piece(f"{EXPERTS}.0.up_proj.weight", (4, 6), 24),
        Piece(f"{EXPERTS}.1.gate_proj.weight", (4, 6), 48),
    ]
    assert [piece.start for piece in found[f"{EXPERTS}.down_proj"]] == [0, 24, 48]
    assert found["lm_head.weight"] == [Piece("lm_head.weight", (12, 6), 0)]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("family", PUBLISHED)
def test_shards_of_fused_experts_are_the_bits_of_the_saved_folder(
    family: str, world: int, tmp_path: Path
) -> None:
    model = build(family).to(torch.bfloat16)
    student = Student(model, HeadShape(31), 8)
    whole = Weights(student.model, Ranks(0, 1, torch.device("cpu")))
    whole.save_folder(tmp_path / "out", NoTokenizer())
    saved = checkpoint.bits(checkpoint.tensors(tmp_path / "out"))
    assert checkpoint.fingerprint(tmp_path / "out") == whole.fingerprint
    assert whole.digests() == digests(tmp_path / "out")
    if world > 1:
        partition(model, world)
    held = {name: np.zeros_like(array) for name, array in saved.items()}
    for rank in range(world):
        for parameter in model.parameters():
            if world > 1:
                parameter.ds_tensor = parameter.parts[rank]
        weights = Weights(student.model, Ranks(rank, world, torch.device("cpu")))
        shards = weights.snapshot()
        for part in weights.slices:
            place(held[part.name], part, shards[part.name])
    assert saved.keys() == held.keys()
    assert all(np.array_equal(saved[name], held[name]) for name in saved)


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_saved_folder_of_every_family_with_experts_is_what_transformers_saves(
    family: str, tmp_path: Path
) -> None:
    """The correction of scores in a router too, which is no parameter."""
    model = build(family)
    weights = Weights(model, Ranks(0, 1, torch.device("cpu")))
    weights.save_folder(tmp_path / "ours", NoTokenizer())
    model.save_pretrained(tmp_path / "theirs")
    assert digests(tmp_path / "ours") == digests(tmp_path / "theirs")
    assert digests(tmp_path / "ours") == weights.digests()
    if family in ("deepseek-v3", "glm4"):
        assert "model.layers.1.mlp.gate.e_score_correction_bias" in weights.digests()


def partition(model: Any, world: int) -> None:
    """Shards as ZeRO-3 cuts them: of one length, padded at the end."""
    for parameter in model.parameters():
        length = -(-parameter.numel() // world)
        flat = torch.nn.functional.pad(
            parameter.detach().flatten(), (0, length * world - parameter.numel()), value=9.0
        )
        parameter.parts, parameter.ds_shape = flat.split(length), parameter.shape


def place(whole: np.ndarray, part: Slice, shard: np.ndarray) -> None:
    """Put a slice where it belongs; nothing may lie there yet."""
    assert shard.shape == (part.count,)
    assert not whole[part.start : part.start + part.count].any()
    whole[part.start : part.start + part.count] = shard


def test_a_checkpoint_tensor_that_is_no_flat_range_is_refused() -> None:
    from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

    model = experts("Qwen3", intermediate_size=8)
    model._weight_conversions = [
        WeightConverter("mlp.turned_proj.weight", "mlp.up_proj.weight", [Transpose(0, 1)])
    ]
    with pytest.raises(ConfigError, match=r"turned_proj.weight is no flat range of .*up_proj"):
        layout(model, shapes_of(model))
    model._weight_conversions = [
        WeightConverter(
            ["mlp.left_proj.weight", "mlp.right_proj.weight"], "mlp.up_proj.weight", [Concatenate(dim=1)]
        )
    ]
    with pytest.raises(ConfigError, match="no flat range"):
        layout(model, shapes_of(model))
