"""After fifty random versions publisher, follower and late joiner hold the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from replica_server import CONTEXT, save_model

from distill.cli.weight_identity import prove
from distill.config import StudentConfig

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


async def test_fifty_versions_later_all_hold_the_same_bits(tmp_path: Path) -> None:
    save_model("Qwen3", 0, tmp_path / "student")
    config = StudentConfig(
        path=str(tmp_path / "student"), engine_args={"enforce-eager": True, "max-model-len": CONTEXT}
    )
    proof = await prove(config, tmp_path / "work", versions=50, sequences=64)
    assert (proof.digests_equal, proof.scores_equal) == (True, True)
    assert (proof.planted_digests_differ, proof.planted_scores_differ) == (True, True)
    assert proof.holds
