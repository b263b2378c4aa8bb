"""Limits of a teacher, against memory counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sync.base import memory
from sync.base.errors import ConfigError
from teacher_service.config import CAPABILITIES, TeacherConfig
from teacher_service.engines.base import EngineInfo
from teacher_service.limits import limits, token_bytes

GIB = 1 << 30
WIDTH = 5120
OWN = 40960


def info(**fields: Any) -> EngineInfo:
    model: dict[str, Any] = {"model": "m", "dtype": "bfloat16", "engine": "transformers", "can": CAPABILITIES}
    base = model | {"vocab_size": 1000, "hidden_size": WIDTH, "max_length": OWN}
    return EngineInfo(**base | fields)


def config(**fields: Any) -> TeacherConfig:
    return TeacherConfig(path="m", **fields)


def test_a_large_machine_takes_what_the_model_takes() -> None:
    found = limits(config(), info(), 1024 * GIB, [40 * GIB, 20 * GIB])
    assert found.max_length == OWN
    assert found.queue_tokens == 256 * GIB // (2 * (16 + 2 * WIDTH))
    assert found.bodies_bytes == 128 * GIB
    assert found.line.startswith("takes sequences of 40,960 tokens, queues 13,400,")
    assert limits(config(queue_tokens=5), info(), 1024 * GIB).queue_tokens == 5


def test_one_longest_sequence_is_always_taken() -> None:
    found = limits(config(engine="vllm"), info(), 4 * (2 * OWN * (16 + 2 * WIDTH)))
    assert found.max_length == found.queue_tokens == OWN


def test_scores_take_what_the_engine_may_be_asked_for() -> None:
    assert token_bytes(info(dtype="float32")) == 16 + 4 * WIDTH
    assert token_bytes(info(can=("topk",))) == 16 + 8 * 128
    assert token_bytes(info(can=(), max_topk=0)) == 16


@pytest.mark.parametrize(
    ("host", "devices", "length"),
    [
        (4 * GIB, [], 1 * GIB // (18 * WIDTH * 2) // 1024 * 1024),  # a pass on the CPU, in a quarter
        (1024 * GIB, [3 * GIB, 2 * GIB], 2 * GIB // (18 * WIDTH * 2) // 1024 * 1024),
    ],
)
def test_the_length_is_what_memory_takes(host: int, devices: list[int], length: int) -> None:
    assert 1024 < length < OWN
    assert limits(config(), info(), host, devices).max_length == length
    why = rf"forward pass of a sequence of {OWN:,} tokens does not fit .* set max_length = {length} or less"
    with pytest.raises(ConfigError, match=why):
        limits(config(max_length=OWN), info(), host, devices)


def test_a_teacher_without_room_for_a_sequence_is_refused() -> None:
    why = "does not fit into what is left of memory, 728 do: set max_length = 728"
    with pytest.raises(ConfigError, match=why):
        limits(config(), info(), 1024 * GIB, [128 << 20])


def test_a_container_limits_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"available": 1000, "total": 1500}
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("M", (), machine))
    assert memory.memory(tmp_path) == (1000, 1500), "no group"
    (tmp_path / "memory.current").write_text("350\n")
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 50\n")
    limits = {"max": (1000, 1500), "900": (600, 900), "2000": (1000, 1500), "200": (0, 200)}
    for limit, left_and_total in limits.items():
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory.memory(tmp_path) == left_and_total
