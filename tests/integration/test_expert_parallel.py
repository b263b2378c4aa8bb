"""Experts shared by ranks under the real deepspeed launcher, against one process that has them all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launched_trainer
import pytest
import torch
from flat_tensors import digests
from launched_trainer import STOP, Share, StubController, mirror_of, save_tokenizer, trained, until
from one_process import routed, same_step
from published import follow
from routed_models import spread, untrained
from safetensors.torch import load_file

from student_trainer.objectives.config import TopK
from sync import wire
from sync.wire import FinalDigests, Version

pytestmark = launched_trainer.LAUNCHED
SIZE: dict[str, Any] = {"vocab_size": launched_trainer.VOCAB + 2, "hidden_size": 32, "num_hidden_layers": 3}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None, "num_experts_per_tok": 2}
NAMED = SIZE | {"num_experts": 4, "moe_intermediate_size": 24, "intermediate_size": 24}
GROUPS = SIZE | {"n_routed_experts": 4, "moe_intermediate_size": 24, "intermediate_size": 40}
GROUPS |= {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": NAMED | {"head_dim": 8, "norm_topk_prob": False, "mlp_only_layers": [1]},
    "Qwen2Moe": NAMED | {"shared_expert_intermediate_size": 20, "norm_topk_prob": True},
    "Mixtral": SIZE | {"num_local_experts": 4, "intermediate_size": 24},
    "Olmoe": NAMED,
    "DeepseekV3": GROUPS | LATENT | {"num_key_value_heads": 4},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each of CONFIGS, in fp32."""
    folder = tmp_path_factory.mktemp("models")
    for kind, fields in CONFIGS.items():
        torch.manual_seed(0)
        model = untrained(kind, fields)
        spread(model, 0.2)
        model.save_pretrained(folder / kind)
        save_tokenizer(folder / kind)
    return folder


@pytest.mark.parametrize(
    ("kind", "more", "share"),
    [
        ("Qwen2Moe", {}, until(1, STOP)),
        ("Mixtral", {"activation_checkpointing": True, "packing": "padded"}, until(1, STOP)),
        ("Olmoe", {}, until(1, STOP)),
        ("DeepseekV3", {}, until(1, STOP)),
        ("Qwen3Moe", {"activation_checkpointing": True, "ranks": 4}, routed(until(1, STOP))),
    ],
    ids=["qwen2", "mixtral", "olmoe", "deepseek", "qwen3 on four ranks, replayed"],
)
def test_gradients_of_shared_experts_are_those_of_one_process(
    kind: str, more: dict[str, Any], share: Share, models: Path, tmp_path: Path
) -> None:
    sections = {"trainer": {"expert_parallel": 2, "ranks": 2} | more}
    sections["weights"] = {"transport": "broadcast" if kind == "Olmoe" else "snapshot"}
    metrics, expected = same_step(models, kind, tmp_path, share, 1, TopK(k=4), **sections)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_shared_experts_are_published_saved_and_resumed_bit_for_bit(models: Path, tmp_path: Path) -> None:
    """Every version comes from the shards of the experts' owners; Adam, clipping and bf16."""

    def run(
        start: Version, parent: Version | None, size: int = 2, ranks: int = 2, steps: int = 4, code: int = 0
    ) -> tuple[StubController, str]:
        trainer = {"checkpoint_every": 2, "keep_checkpoints": 9, "expert_parallel": size, "ranks": ranks}
        more: dict[str, Any] = {"objective": {"type": "topk", "k": 4}, "trainer": trainer}
        share = until(steps, wire.Stop(reason="enough", checkpoint=True))
        return trained(models, tmp_path / "run", "Qwen2Moe", share, start, parent, code, **more)

    whole, _ = run(Version(0, 0), None)
    (final,), folder = whole.told(FinalDigests), tmp_path / "run/final"
    assert final.digests == digests(folder)
    start = load_file(models / "Qwen2Moe/model.safetensors")
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in start.items()}
    with mirror_of(tmp_path / "run", tmp_path) as mirror:
        for version in whole.told(wire.Published):
            follow(mirror, version.version)
            published = load_file(mirror.path / "model.safetensors")
            assert published.keys() == rounded.keys()
            if version.version.step == 0:
                assert all(torch.equal(published[name], one) for name, one in rounded.items())
        assert digests(mirror.path) == final.digests
    changed = [name for name in rounded if not torch.equal(published[name], rounded[name])]
    assert {f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in range(4)} <= set(changed)
    places = models / "Qwen2Moe", folder
    theirs, ours = (json.loads((place / "config.json").read_text()) for place in places)
    assert ours | {"dtype": None} == theirs | {"dtype": None}

    resumed, _ = run(Version(1, 2), Version(0, 2))
    assert resumed.told(FinalDigests)[0].digests == final.digests
    _, said = run(Version(2, 2), Version(0, 2), ranks=4, steps=2)
    assert "is of 2 ranks, this run has 4" in said
    back, said = run(Version(3, 2), Version(2, 2))
    assert "is of 4 ranks, this run has 2" in said
    assert back.told(FinalDigests)[0].digests == final.digests
    _, said = run(Version(4, 2), Version(0, 2), size=1, code=1)
    assert "was saved with trainer.expert_parallel = 2, this run has 1" in said


def test_a_family_that_cannot_be_shared_is_refused_by_every_rank(tmp_path: Path) -> None:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    sizes = {name: value for name, value in GROUPS.items() if name not in LATENT} | {"n_group": 1}
    Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, head_dim=8)).save_pretrained(tmp_path / "glm")
    save_tokenizer(tmp_path / "glm")
    more = {"trainer": {"expert_parallel": 2}}
    stub, said = trained(tmp_path, tmp_path / "run", "glm", until(1, STOP), code=1, **more)
    assert "the student is a glm4_moe: DeepSpeed's AutoEP computes deepseek_v3" in said
    assert "Traceback" not in said
    assert stub.events == []
