"""Ranks that share rows under the real deepspeed launcher and ZeRO-3, against one process with whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launched_trainer
import pytest
from attention_families import model
from flat_tensors import digests
from launched_trainer import STOP, VOCAB, StubController, mirror_of, save_tokenizer, trained, until
from one_process import routed, same_step, sharing
from published import follow

from student_trainer import ledger
from student_trainer.objectives.config import TopK
from sync.wire import FinalDigests, Published, Stop, TrainerHello, Version

pytestmark = launched_trainer.LAUNCHED


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("Qwen3", "Qwen3Moe"):
        more = {"vocab_size": VOCAB + 2, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": None}
        model(family, **more).save_pretrained(folder / family)
        save_tokenizer(folder / family)
    return folder


@pytest.mark.parametrize(
    ("family", "ranks", "more"),
    [
        ("Qwen3", 2, {"activation_checkpointing": True}),
        ("Qwen3Moe", 4, {"activation_checkpointing": True, "expert_parallel": 2}),
    ],
    ids=["packed", "four ranks share experts too, replayed"],
)
def test_loss_and_gradients_are_those_of_one_process(
    family: str, ranks: int, more: dict[str, Any], models: Path, tmp_path: Path
) -> None:
    share = until(1, STOP) if "expert_parallel" not in more else routed(until(1, STOP))
    trainer = {"sequence_parallel": 2, "ranks": ranks, **more}
    objective = TopK(k=4, discount=0.7)  # credit crosses the boundary between two ranks
    metrics, expected = same_step(models, family, tmp_path, share, 2, objective, trainer=trainer)
    del expected["lr"], expected["tokens_per_slot"]
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_published_saved_and_recorded_as_without_and_resumed_by_other_ranks(models: Path, tmp_path) -> None:
    """Adam and bf16; a start that trains nothing must publish the very weights of the checkpoint."""
    run_dir, stop = tmp_path / "run", Stop(reason="enough", checkpoint=True)

    def start(ranks: int, size: int, at: Version, parent: Version | None) -> StubController:
        trainer = {"sequence_parallel": size, "ranks": ranks, "keep_checkpoints": 9}
        more = {"objective": {"type": "topk", "k": 4, "discount": 0.7}, "trainer": trainer}
        share = sharing(until(2, stop), size)
        return trained(models, run_dir, "Qwen3", share, at, parent, **more)[0]

    first = start(2, 2, Version(0, 0), None)
    (hello,) = first.told(TrainerHello)
    assert (hello.world_size, hello.sequence_parallel) == (2, 2)
    (final,) = first.told(FinalDigests)
    with mirror_of(run_dir, tmp_path) as mirror:
        for published in first.told(Published):
            follow(mirror, published.version)
        assert digests(mirror.path) == digests(run_dir / "final") == final.digests
    lineage = ledger.read(run_dir / "ledger")[0]
    assert lineage.steps == {step + 1: [f"s{step}-r{row}" for row in range(6)] for step in range(2)}
    batches = [until(2, stop)(Version(0, step), 0, 1) for step in range(2)]
    assert [lineage.tokens[1], lineage.tokens[2]] == [batch.denominator for batch in batches]
    assert {rank: len(ids) for rank, (ids, _) in lineage.shown[2].items()} == {0: 6, 1: 0}
    again = start(1, 1, Version(1, 2), Version(0, 2))
    assert again.told(TrainerHello)[0].checkpoint == Version(0, 2)
    assert again.told(FinalDigests)[0].digests == final.digests
