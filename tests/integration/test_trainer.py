"""The real deepspeed launcher, ZeRO-3 on CPU ranks, and a controller written by hand.

Two tiny models from random weights: Qwen3 with tied embeddings, Llama with untied ones; both have two rows
more than their tokenizer has ids.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import launched_trainer
import msgspec
import numpy as np
import psutil
import pytest
import torch
import waiting
from flat_tensors import digests
from launched_trainer import STOP, Running, StubController, mirror_of, settings, shares, trained, until
from published import follow
from safetensors.torch import load_file
from teacher_process import TeacherProcess
from tiny_models import language_model

from student_trainer import launch, ledger
from student_trainer.teacher_scores import with_scores
from sync import wire
from sync.wire import FinalDigests, Message, Published, Rows, StepReport, TrainBatch, Version, Wait, Want
from sync.wire.client import BlockingPeer

pytestmark = launched_trainer.LAUNCHED
TOPK: dict[str, Any] = {"objective": {"type": "topk", "k": 4}}
FULL: dict[str, Any] = {"objective": {"type": "full"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `qwen` and `llama`."""
    folder = tmp_path_factory.mktemp("models")
    size = {"vocab_size": launched_trainer.VOCAB + 2, "hidden_size": 32, "intermediate_size": 48}
    size |= {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.02}
    for name, kind in (("qwen", "Qwen3"), ("llama", "Llama")):
        model = language_model(kind, **size, tie_word_embeddings=kind == "Qwen3")
        model.to(torch.bfloat16).save_pretrained(folder / name)
        launched_trainer.save_tokenizer(folder / name)
    return folder


def widest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of any element."""
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


class Whole(NamedTuple):
    """Four steps of two ranks on the tied Qwen3 with nothing in between; checkpoints of steps 2 and 4."""

    run_dir: Path
    stub: StubController


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder, share = tmp_path_factory.mktemp("whole"), until(4, STOP, full=True)
    stub, _ = trained(models, folder, "qwen", share, trainer={"checkpoint_every": 2}, **FULL)
    assert [saved.version.step for saved in stub.told(wire.CheckpointSaved)] == [2, 4]
    return Whole(folder, stub)


def test_two_ranks_train_and_publish_a_tied_model(whole: Whole, tmp_path: Path) -> None:
    stub = whole.stub
    kinds = [type(event).__name__ for event in stub.events]
    assert kinds[:2] == ["TrainerHello", "Published"]
    assert kinds[-1] == "FinalDigests"
    reports, published = stub.told(StepReport), stub.told(Published)
    assert [report.version.step for report in reports] == [1, 2, 3, 4]
    assert [p.version.step for p in published] == [0, 1, 2, 3, 4]
    assert [p.kind for p in published] == ["full", *["delta"] * 4]
    assert set(reports[0].seconds) == {"wait", "train", "publish", "checkpoint"}
    parts = reports[0].parts
    assert list(parts) == ["forward", "backward", "optimizer"]
    assert 0 < min(parts.values()) < sum(parts.values()) <= reports[0].seconds["train"]
    assert all(0 < p.encode_seconds <= p.seconds for p in published[1:])
    assert published[0].encode_seconds == 0 < published[0].seconds
    assert reports[0].metrics["tokens"] == sum(2 + index % 5 for index in range(6))
    assert reports[2].metrics["reverse_kl"] < reports[0].metrics["reverse_kl"]

    (final,) = stub.told(FinalDigests)
    assert final.digests == digests(whole.run_dir / "final")
    assert "lm_head.weight" not in final.digests
    with mirror_of(whole.run_dir, tmp_path) as mirror:
        follow(mirror, Version(0, 4))
        assert digests(mirror.path) == final.digests
    lineages = ledger.read(whole.run_dir / "ledger")
    assert sorted(lineages[0].steps[2]) == [f"s1-r{index}" for index in range(6)]
    assert (sorted(lineages[0].steps), lineages[0].damage) == ([1, 2, 3, 4], [])


def test_resumed_and_stopped_by_signal_equals_uninterrupted(
    whole: Whole, models: Path, tmp_path: Path
) -> None:
    (unbroken,) = whole.stub.told(FinalDigests)
    shutil.copytree(whole.run_dir, tmp_path, dirs_exist_ok=True)
    parent = Version(0, 2)
    trainer = {"checkpoint_every": 0, "env": {"OPENBLAS_NUM_THREADS": "4"}}  # numpy's threads get no signal
    (tmp_path / "checkpoints/latest").write_text(f"{parent}\n")
    with (
        closing(StubController(until(4, Wait(), full=True), Version(1, 2), parent)) as resumed,
        Running(settings(models, tmp_path, resumed.url, "qwen", trainer=trainer, **FULL)) as running,
    ):
        running.until(lambda: [r.version.step for r in resumed.told(StepReport)] == [3, 4])
        os.killpg(running.process.pid, signal.SIGTERM)  # all of them, as a terminal does
        assert running.end() == 0, running.log
    (hello,) = resumed.told(wire.TrainerHello)
    assert hello.checkpoint == parent
    (again,) = resumed.told(FinalDigests)
    assert again.digests == unbroken.digests
    assert [saved.version for saved in resumed.told(wire.CheckpointSaved)] == [Version(1, 4)]
    assert (tmp_path / "checkpoints/latest").read_text().strip() == str(Version(1, 4))
    lineages = ledger.read(tmp_path / "ledger")
    assert ledger.repeated(lineages) == ([Version(1, 3), Version(1, 4)], []), "bit for bit, step for step"
    assert [lineages[1].parent, sorted(lineages[1].steps)] == [parent, [3, 4]]
    assert not lineages[0].damage + lineages[1].damage


def test_a_checkpoint_resumes_on_another_number_of_ranks(whole: Whole, models: Path, tmp_path: Path) -> None:
    """From two ranks to one and back: what they then train is what two ranks train, bit for bit."""
    shutil.copytree(whole.run_dir, tmp_path, dirs_exist_ok=True)

    def resumed(ranks: int, at: Version, steps: int, parent: Version) -> tuple[StubController, str]:
        share = until(steps, wire.Stop(reason="enough", checkpoint=True), full=True)
        trainer = {"ranks": ranks, "checkpoint_every": 2}
        return trained(models, tmp_path, "qwen", share, at, parent, trainer=trainer, **FULL)

    _, said = resumed(1, Version(1, 2), 2, Version(0, 2))
    assert "is of 2 ranks, this run has 1" in said
    back, said = resumed(2, Version(2, 2), 4, Version(1, 2))
    assert "is of 1 ranks, this run has 2" in said
    ours, theirs = ([report.metrics for report in stub.told(StepReport)] for stub in (back, whole.stub))
    for name in ("lr", "grad_norm", "reverse_kl"):
        assert [metrics[name] for metrics in ours] == [metrics[name] for metrics in theirs[2:]], name
    assert back.told(FinalDigests)[0].digests == whole.stub.told(FinalDigests)[0].digests


def test_one_rank_with_snapshots_and_two_with_broadcasts_make_the_same_weights(
    models: Path, tmp_path: Path
) -> None:
    """On padded rows, and on rows laid end to end whose activations are recomputed."""
    folders = []
    for ranks, transport, packing in ((1, "snapshot", "padded"), (2, "broadcast", "varlen")):
        trainer = {"ranks": ranks, "packing": packing, "activation_checkpointing": packing == "varlen"}
        more = {"objective": {"type": "topk", "k": 4, "discount": 0.5}, "weights": {"transport": transport}}
        more |= {"trainer": trainer, "overrides": {"bf16.enabled": False}}
        stub, _ = trained(models, tmp_path / transport, "llama", until(2, STOP), **more)
        folders.append(load_file(tmp_path / transport / "final/model.safetensors"))
    assert [published.version.step for published in stub.told(Published)] == [0, 1, 2]
    assert stub.receptions[-1].result().digests == stub.told(FinalDigests)[0].digests
    start = load_file(models / "llama/model.safetensors")
    assert widest(start, folders[0]) > 1e-3
    assert widest(*folders) < 1e-6


def test_a_step_that_is_not_finite_is_left_out(models: Path, tmp_path: Path) -> None:
    give = shares(full=False)

    def overflowing(version: Version, rank: int, world: int) -> Message:
        if version.step == 3:
            return STOP
        batch = give(version, rank, world)
        if version.step == 1:
            rows = batch.micro_batches[0]
            huge = np.full(rows.teacher_logprob.shape, -3e38, np.float32)
            batch.micro_batches[0] = msgspec.structs.replace(rows, teacher_logprob=wire.pack(huge))
        return batch

    more = {"objective": {"type": "sampled"}, "trainer": {"ranks": 1}}
    stub, _ = trained(models, tmp_path, "llama", overflowing, **more)
    reports, published = stub.told(StepReport), stub.told(Published)
    assert [report.metrics["skipped"] for report in reports] == [0.0, 1.0, 0.0]
    assert not np.isfinite(reports[1].metrics["grad_norm"])
    assert np.isfinite(reports[2].metrics["loss"])
    assert published[2].bytes < published[1].bytes / 2, "nothing changed in the step that was left out"


def test_an_error_in_one_rank_ends_all_with_one_message(models: Path, tmp_path: Path) -> None:
    give = shares(full=False)

    def broken(version: Version, rank: int, world: int) -> Message:
        batch = give(version, rank, world)
        return TrainBatch(version=version, denominator=0, micro_batches=[]) if rank == 1 else batch

    stub, said = trained(models, tmp_path, "llama", broken, code=1, **TOPK)
    assert said.count("Expected `int` >= 1 - at `$.denominator`, which is 0") == 1
    assert "Traceback" not in said
    assert stub.told(StepReport) == []


def test_a_signal_that_comes_before_the_ranks_ends_them_before_they_train(
    models: Path, tmp_path: Path
) -> None:
    """The launcher is without them for a tenth of a second: who comes too late for that tries again."""
    for attempt in itertools.count():
        with (
            closing(StubController(until(9, Wait()))) as stub,
            Running(settings(models, tmp_path / f"{attempt}", stub.url, "llama", **TOPK)) as running,
        ):
            while psutil.Process(running.process.pid).num_threads() == 1:
                assert running.process.poll() is None, running.log
            if launch.ranks_of(running.process.pid) == []:
                running.process.terminate()
                running.end()
                break
    assert stub.events == []


@pytest.mark.parametrize("of", ["launcher", "rank"])
def test_ranks_leave_when_the_launcher_is_killed_which_ends_by_the_signal_of_a_rank(
    models: Path, tmp_path: Path, of: str
) -> None:
    with closing(StubController(until(1, Wait()))) as stub:
        config = settings(models, tmp_path, stub.url, "llama", trainer={"ranks": 1}, **TOPK)
        with Running(config) as running:
            running.until(lambda: stub.told(StepReport))
            launcher = psutil.Process(running.process.pid)
            (launcher if of == "launcher" else launcher.children()[0]).kill()
            assert running.process.wait(600.0) == -signal.SIGKILL
            waiting.until(lambda: not launched_trainer.members(running.process.pid), 600.0, poll_seconds=0.1)


# --- kept scores ------------------------------------------------------------------------------------------


def scored(peer: BlockingPeer, given: Rows, want: Want) -> Rows:
    """`given` with a teacher's scores, or with references to them."""
    if not given.ids:
        return msgspec.structs.replace(given, kept=[] if want.keep else None)
    prompts, completions = (wire.unpack(lens) for lens in (given.prompt_lens, given.completion_lens))
    rows = np.split(wire.unpack(given.tokens), (prompts + completions).cumsum()[:-1])
    sequences = [
        wire.ScoreSequence(id_, wire.pack(tokens), int(prompt))
        for id_, tokens, prompt in zip(given.ids, rows, prompts, strict=True)
    ]
    request = wire.ScoreRequest(sequences=sequences, want=want)
    results: list[Any] = peer.call("/v1/score", request, wire.ScoreReply).results
    if not want.keep:
        return msgspec.structs.replace(with_scores(given, [[one] for one in results]), kept=None)
    kept = [msgspec.structs.replace(one.kept, url=peer.url) for one in results]
    bare = {name: None for name in given.__struct_fields__ if name.startswith("teacher_topk")}
    return msgspec.structs.replace(given, kept=kept, teacher_prompts=[None] * len(kept), **bare)


def test_scores_of_a_teacher_killed_before_they_are_fetched_are_computed_again(
    models: Path, tmp_path: Path
) -> None:
    steps, give, killing = 3, shares(full=False), threading.Lock()
    keeps = {"keep_folder": str(tmp_path / "scores")}
    teacher, dead = TeacherProcess(models / "llama", tmp_path, "only", **keeps), threading.Event()
    peer = BlockingPeer(teacher.url, timeout=300.0)

    def batches(keep: bool) -> dict[tuple[int, int], TrainBatch]:
        want, made = Want(topk=4, entropy=True, keep=keep), {}
        for step, rank in ((step, rank) for step in range(steps) for rank in range(2)):
            batch = give(Version(0, step), rank, 2)
            micros = [scored(peer, one, want) for one in batch.micro_batches]
            made[step, rank] = msgspec.structs.replace(batch, micro_batches=micros)
        return made

    def metrics(name: str, given: dict[tuple[int, int], TrainBatch], kill_at: int) -> list[dict[str, float]]:
        def share(version: Version, rank: int, world_size: int) -> Message:
            with killing:
                if version.step == kill_at and not dead.is_set():
                    dead.set()
                    teacher.end()
                    teacher.start()
            return given.get((version.step, rank), STOP)

        servers = wire.TeacherServers(urls=[teacher.url], fingerprint=None)
        stub, _ = trained(models, tmp_path / name, "qwen", share, servers=servers, **TOPK)
        return [report.metrics for report in stub.told(StepReport)]

    try:
        inline = metrics("inline", batches(keep=False), kill_at=99)
        kept = metrics("kept", batches(keep=True), kill_at=1)
    finally:
        teacher.end()
    assert dead.is_set()
    assert [one["rescored"] for one in inline] == [0, 0, 0]
    assert [one["rescored"] for one in kept] == [0, 6, 6]
    for name in ("loss", "reverse_kl", "teacher_entropy", "teacher_mass", "score_gap"):
        assert [one[name] for one in kept] == pytest.approx([one[name] for one in inline], abs=1e-3), name
