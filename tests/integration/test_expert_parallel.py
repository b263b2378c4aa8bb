"""Experts shared by ranks under the real deepspeed launcher, against one process that has them all."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import launched_trainer
import pytest
import torch
from flat_tensors import digests
from launched_trainer import STOP, Share, StubController, mirror_of, ran, save_tokenizer, until
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


class Trained(NamedTuple):
    run_dir: Path
    stub: StubController
    log: str


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

    def trained(
        start: Version, parent: Version | None, size: int = 2, ranks: int = 2, steps: int = 4, code: int = 0
    ) -> Trained:
        stop = wire.Stop(reason="enough", checkpoint=True)
        with closing(StubController(until(steps, stop), start, parent)) as stub:
            trainer = {"checkpoint_every": 2, "keep_checkpoints": 9, "expert_parallel": size, "ranks": ranks}
            more: dict[str, Any] = {"objective": {"type": "topk", "k": 4}, "trainer": trainer}
            config = launched_trainer.settings(models, tmp_path / "run", stub.url, "Qwen2Moe", **more)
            if parent is not None:
                (config.run_dir / "checkpoints/latest").write_text(f"{parent}\n")
            return Trained(config.run_dir, stub, ran(config, code))

    whole = trained(Version(0, 0), None)
    (final,) = whole.stub.told(FinalDigests)
    assert final.digests == digests(whole.run_dir / "final")
    start = load_file(models / "Qwen2Moe/model.safetensors")
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in start.items()}
    with mirror_of(whole.run_dir, tmp_path) as mirror:
        for version in whole.stub.told(wire.Published):
            follow(mirror, version.version)
            published = load_file(mirror.path / "model.safetensors")
            assert published.keys() == rounded.keys()
            if version.version.step == 0:
                assert all(torch.equal(published[name], one) for name, one in rounded.items())
        assert digests(mirror.path) == final.digests
    changed = [name for name in rounded if not torch.equal(published[name], rounded[name])]
    assert {f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in range(4)} <= set(changed)
    folders = models / "Qwen2Moe", whole.run_dir / "final"
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert ours | {"dtype": None} == theirs | {"dtype": None}

    resumed = trained(Version(1, 2), Version(0, 2))
    assert resumed.stub.told(FinalDigests)[0].digests == final.digests
    wider = trained(Version(2, 2), Version(0, 2), ranks=4, steps=2)
    assert "is of 2 ranks, this run has 4" in wider.log
    back = trained(Version(3, 2), Version(2, 2))
    assert "is of 4 ranks, this run has 2" in back.log
    assert back.stub.told(FinalDigests)[0].digests == final.digests
    refused = trained(Version(4, 2), Version(0, 2), size=1, code=1)
    assert "was saved with trainer.expert_parallel = 2, this run has 1" in refused.log


def test_a_family_that_cannot_be_shared_is_refused_by_every_rank(tmp_path: Path) -> None:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    sizes = {name: value for name, value in GROUPS.items() if name not in LATENT} | {"n_group": 1}
    Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, head_dim=8)).save_pretrained(tmp_path / "glm")
    save_tokenizer(tmp_path / "glm")
    with closing(StubController(until(1, STOP))) as stub:
        more = {"trainer": {"expert_parallel": 2}}
        said = ran(launched_trainer.settings(tmp_path, tmp_path / "run", stub.url, "glm", **more), code=1)
    assert "the student is a glm4_moe: DeepSpeed's AutoEP computes deepseek_v3" in said
    assert "Traceback" not in said
    assert stub.events == []
