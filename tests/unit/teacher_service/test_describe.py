"""A teacher's fingerprint names the weights it scores with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from teacher_service.engines.base import EngineInfo
from teacher_service.messages import model_fingerprint


def test_the_fingerprint_changes_with_weights_revision_and_precision_alone(tmp_path: Path) -> None:
    weights = bytearray(range(256)) * 8192
    (tmp_path / "model.safetensors").write_bytes(weights)
    engine_info = EngineInfo(str(tmp_path), "float32", "transformers", 8, 8, 64, ())
    first = model_fingerprint(engine_info)
    assert model_fingerprint(engine_info) == first
    others = [replace(engine_info, dtype="bfloat16"), replace(engine_info, revision="b")]
    found = {first, *map(model_fingerprint, others)}
    for place in (0, len(weights) - 1):  # training changes far more than one byte
        changed = bytearray(weights)
        changed[place] ^= 1
        (tmp_path / "model.safetensors").write_bytes(changed)
        found.add(model_fingerprint(engine_info))
    (tmp_path / "model.safetensors").write_bytes(weights + b"0")
    found.add(model_fingerprint(engine_info))
    assert len(found) == 6
    assert len(model_fingerprint(replace(engine_info, model="org/name"))) == 64
