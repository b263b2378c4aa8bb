"""Samples of what is trained on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from in_memory import MemoryTrainer

from distill.buffer import Batch
from distill.interfaces import Hooks
from distill.metrics.samples import SAMPLES, Sample, SampleFile, choose, read_samples, shown
from sync.errors import DataError
from sync.wire import unpack


class Letters:
    """Decodes id i as the i-th letter."""

    def text(self, tokens: Any) -> str:
        return "".join(self.pieces(tokens))

    def pieces(self, tokens: Any) -> list[str]:
        return [chr(ord("a") + token) for token in tokens]


def sample(id: str, excess: list[float], truncated: bool = False) -> Sample:
    count = len(excess)
    return Sample(
        version="L000-v00000000",
        id=id,
        age=1,
        teacher="t",
        prompt=[0],
        tokens=list(range(count)),
        logprob=[0.0] * count,
        teacher_logprob=[-nats for nats in excess],
        reward=None,
        truncated=truncated,
        by_teacher=False,
    )


async def test_a_run_writes_samples_of_every_nth_batch(controller, config, tmp_path: Path) -> None:
    batches: dict[int, Batch] = {}
    file = SampleFile(tmp_path / SAMPLES, every=2, count=3)

    def note(batch: Batch) -> None:
        batches[batch.version.step] = batch
        file.write(batch)

    run = controller(config(run={"steps": 5}), hooks=Hooks(batch=note))
    trainer = MemoryTrainer(run.session)
    await asyncio.gather(run.run(), trainer.run())
    file.close()
    found = read_samples(tmp_path)
    assert {one.version for one in found} == {"L000-v00000000", "L000-v00000002", "L000-v00000004"}
    assert len(found) == 9
    for one in found:
        batch = batches[int(one.version[-8:])]
        (rollout,) = (r for r in batch.rollouts if r.id == one.id)
        assert one.tokens == unpack(rollout.tokens).tolist()
        assert one.logprob == pytest.approx(unpack(rollout.logprob).tolist(), abs=1e-4)
        assert rollout.scored is not None
        assert one.teacher_logprob == pytest.approx(unpack(rollout.scored.logprob).tolist(), abs=1e-4)
        assert one.age == batch.ages[batch.rollouts.index(rollout)]


def test_the_worst_the_longest_and_the_truncated_come_first() -> None:
    samples = [sample("a", [0.5, 0.5]), sample("b", [3.0], truncated=True), sample("c", [0.0] * 3)]
    assert [one.id for one in choose(samples, "worst", 2)] == ["b", "a"]
    assert [one.id for one in choose(samples, "longest", 1)] == ["c"]
    assert [one.id for one in choose(samples, "truncated", 5)] == ["b"]


def test_a_token_is_coloured_by_what_the_teacher_finds_unlikely() -> None:
    text = shown(sample("a", [0.0, 0.6, 5.0]), Letters())  # type: ignore[arg-type]
    assert text.plain.endswith("a\nabc")
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert (styles["b"], styles["c"]) == ("khaki3", "white on red3")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_bytes(msgspec.json.encode({"version": 3}) + b"\n")
    with pytest.raises(DataError, match="something else than samples"):
        read_samples(tmp_path)
