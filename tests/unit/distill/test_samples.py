"""Samples of what is trained on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from in_memory import MemoryTrainer
from small_config import run_of_letters

from distill.buffer import Batch
from distill.cli.main import main
from distill.interfaces import Hooks
from distill.metrics.samples import (
    QUARANTINE,
    SAMPLES,
    Quarantine,
    Sample,
    SampleFile,
    choose,
    figures,
    read_samples,
    shaded,
    shown,
)
from distill.record.rollout import Rollout
from distill.tasks.sort_letters import letter_tokenizer
from sync.base.errors import DataError
from sync.base.jsonl import JsonLines
from sync.wire import Scored, Version, pack, unpack


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
    samples = read_samples(tmp_path)
    assert {sample.version for sample in samples} == {"L000-v00000000", "L000-v00000002", "L000-v00000004"}
    assert len(samples) == 9
    for sample in samples:
        batch = batches[int(sample.version[-8:])]
        (rollout,) = (rollout for rollout in batch.rollouts if rollout.id == sample.id)
        assert sample.tokens == unpack(rollout.tokens).tolist()
        assert sample.logprob == pytest.approx(unpack(rollout.logprob).tolist(), abs=1e-4)
        assert rollout.scored is not None
        assert sample.teacher_logprob == pytest.approx(unpack(rollout.scored.logprob).tolist(), abs=1e-4)
        assert sample.age == batch.ages[batch.rollouts.index(rollout)]


def ids(samples: list[Sample]) -> str:
    return "".join(sample.id for sample in samples)


def test_the_worst_the_longest_and_the_truncated_come_first() -> None:
    samples = [sample("a", [0.5, 0.5]), sample("b", [3.0], truncated=True), sample("c", [0.0] * 3)]
    orders = {"worst": 2, "longest": 1, "truncated": 5}
    assert [ids(choose(samples, order, count)) for order, count in orders.items()] == ["ba", "c", "b"]


def test_a_token_is_coloured_by_what_the_teacher_finds_unlikely() -> None:
    text = shown(sample("a", [0.0, 0.6, 5.0]), Letters())  # type: ignore[arg-type]
    assert text.plain.endswith("a\nabc")
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert (styles["b"], styles["c"]) == ("khaki3", "white on red3")


def episode() -> Sample:
    """Two turns, ab and e, an environment's cd between and fg behind them."""
    one = sample("a", [0.5, 1.5, 9.0, 9.0, 4.0, 9.0, 9.0])
    return msgspec.structs.replace(one, own=((0, 2), (4, 5)), reward=1.0)


def test_of_an_episode_the_students_tokens_alone_have_a_divergence() -> None:
    one = episode()
    assert one.parts == [(0, 2, False), (2, 4, True), (4, 5, False), (5, 7, True)]
    assert (one.own_length, one.reverse_kl) == (3, 2.0)
    assert "2 turns  3 tokens" in figures(one)
    assert "reward 1" in figures(one)
    plain = sample("b", [3.0])
    assert plain.parts == [(0, 1, False)]
    assert (ids(choose([one, plain], "worst", 2)), ids(choose([plain, one], "longest", 1))) == ("ba", "a")


def test_of_an_episode_it_is_shown_who_said_what() -> None:
    text = shown(episode(), Letters())  # type: ignore[arg-type]
    assert text.plain.endswith("a\nstudent: ab\nenvironment: cd\nstudent: e\nenvironment: fg")
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert (styles["b"], styles["cd"], styles["e"]) == ("black on khaki1", "dim", "white on red3")
    grey = '<span title="environment" style="color:#7b8794">{}</span>'
    page = shaded(episode(), Letters())  # type: ignore[arg-type]
    assert [page.count(grey.format(text)) for text in ("cd", "fg")] == [1, 1]
    assert page.count("nats") == 3


def test_the_turns_of_a_rollout_are_in_its_sample_and_another_file_is_refused(tmp_path: Path) -> None:
    f4, i4 = pack(np.zeros(3, "f4")), pack(np.zeros(3, "i4"))
    rollout = Rollout("a", 0, i4, i4, f4, scored=Scored("a", f4), own=((0, 1), (2, 3)))
    file = SampleFile(tmp_path / SAMPLES, every=1, count=1)
    file.write(Batch(Version(0, 0), [rollout], [0], []))
    file.close()
    assert [sample.own for sample in read_samples(tmp_path)] == [((0, 1), (2, 3))]
    (tmp_path / SAMPLES).write_bytes(msgspec.json.encode({"version": 3}) + b"\n")
    with pytest.raises(DataError, match="something else than samples"):
        read_samples(tmp_path)


def test_what_was_quarantined_is_printed_newest_first_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tokenizer = run_of_letters(tmp_path), letter_tokenizer()
    lines = JsonLines(config.run_dir / QUARANTINE)
    for name, letters in {"0:1:0": "ab", "0:2:0": "cd"}.items():
        tokens = tokenizer.encode(letters)
        lines.write(Quarantine(name, tokenizer.encode("ba>"), tokens, "over_long", "cut at 2 tokens"))
    lines.close()
    with pytest.raises(SystemExit) as leaving:
        main(["samples", str(config.run_dir), "--order", "quarantined"])
    assert leaving.value.code == 0
    said = capsys.readouterr().out
    first, second = (
        f"0:{row}:0  over_long: cut at 2 tokens\nba>\n{text}\n" for row, text in ((2, "cd"), (1, "ab"))
    )
    assert said == f"{first}\n{second}\n"
