"""The real teacher process over HTTP: start, refusals, a flood, signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz import flood
from teacher_completions import check_completions_score_alike
from teacher_process import TeacherProcess
from tiny_models import language_model, save_words
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from sync import wire
from sync.base.settings import ObjectStoreConfig, ReplicaConfig
from sync.base.tokenizers import fingerprint
from sync.wire import Scored, ScoreSequence, Want, unpack
from sync.wire.claims import Claim
from sync.wire.client import Peer
from teacher_service.client import TeacherClient

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
VOCAB = 20
MAX_LENGTH = 64
QUEUE_TOKENS = 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 and a tokenizer of VOCAB ids; the model has padded rows."""
    path = tmp_path_factory.mktemp("teacher")
    save_words(path, ("<eos>", *(f"t{i}" for i in range(1, VOCAB))), eos_token="<eos>")
    size = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    language_model("Qwen3", **size, max_position_embeddings=MAX_LENGTH).save_pretrained(path)
    return path


def started(model: Path, folder: Path, **config: Any) -> TeacherProcess:
    settings = {"wire_dtype": "float32", "queue_tokens": QUEUE_TOKENS}
    return TeacherProcess(model, folder, "toy", "secret", **settings, **config)


@pytest.fixture(scope="module")
def teacher(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeacherProcess]:
    process = started(folder, tmp_path_factory.mktemp("one"))
    yield process
    process.end()


async def up(process: TeacherProcess) -> None:
    """Start it if it has ended, and wait until it answers."""
    if process.child.poll() is not None:
        process.start()
    async with Peer(process.url) as peer:
        async with asyncio.timeout(300):
            while not await peer.alive():
                assert process.child.poll() is None, process.log()
                await asyncio.sleep(0.1)


def sequences(n: int, seed: int = 0) -> list[ScoreSequence]:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, VOCAB, int(rng.integers(4, 12))).astype(np.int32) for _ in range(n)]
    return [ScoreSequence(f"{seed}-{i}", wire.pack(one), 2) for i, one in enumerate(ids)]


async def test_it_gives_what_a_plain_forward_pass_does_and_scores_what_it_generates_alike(
    teacher: TeacherProcess, folder: Path
) -> None:
    await up(teacher)
    options = sequences(5)
    async with TeacherClient("toy", [teacher.url], "secret") as client:
        info = await client.info()
        results, _ = await client.score(options, Want(topk=4))
        await check_completions_score_alike(client, VOCAB)
    what = info.name, info.engine, info.vocab_size, info.max_length
    assert what == ("toy", "transformers", VOCAB, MAX_LENGTH)
    assert info.tokenizer_fingerprint == fingerprint(PreTrainedTokenizerFast.from_pretrained(folder))
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sequence, result in zip(options, results, strict=True):
        assert isinstance(result, Scored)
        ids = torch.from_numpy(unpack(sequence.token_ids).astype(np.int64))
        with torch.inference_mode():
            logp = model(ids[None]).logits[0, :, :VOCAB].double().log_softmax(-1)
        expected = logp[torch.arange(1, len(ids) - 1), ids[2:]].numpy()
        np.testing.assert_allclose(unpack(result.logprob), expected, atol=1e-5)


async def test_a_flood_is_refused_and_memory_stays_flat(teacher: TeacherProcess) -> None:
    await up(teacher)
    statuses, grown = await flood(teacher.url, teacher.child.pid, QUEUE_TOKENS, MAX_LENGTH, "secret")
    assert set(statuses) == {200, 429}
    assert statuses.total() == 160
    assert grown < 100 << 20
    async with TeacherClient("toy", [teacher.url], "secret") as client:
        assert len((await client.score(sequences(3))).results) == 3


async def test_a_termination_signal_ends_it_cleanly(teacher: TeacherProcess) -> None:
    await up(teacher)
    assert teacher.end(signal.SIGTERM) == 0


async def test_a_self_teacher_ends_while_a_version_that_it_reads_does_not_come(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store is an S3 endpoint that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(600)
        options = {"endpoint": "http://127.0.0.1:{1}".format(*silent.getsockname()), "region": "here"}
        options |= {"access_key_id": "a", "secret_access_key": "b"}
        store = ObjectStoreConfig(type="object", url="s3://bucket/prefix", options=options)
        follows = ReplicaConfig(run="r", store=store, store_path=tmp_path, mirror=tmp_path / "mirror")
        for name, value in follows.environment().items():
            monkeypatch.setenv(name, value)
        teacher = started(folder, tmp_path, follow_student_every=1)
        try:
            await up(teacher)
            claim = Claim(wire.RunIdentity("r", "id"))  # no version is read before a run claims the teacher
            async with TeacherClient("toy", [teacher.url], "secret", claim=claim) as client:
                assert len((await client.score(sequences(1))).results) == 1
            connection, _ = await asyncio.to_thread(silent.accept)  # the newest version is being read
            with connection:
                assert teacher.end(signal.SIGTERM) == 0, teacher.log()
        finally:
            teacher.child.kill()


@pytest.mark.parametrize(
    ("config", "arguments", "says"),
    [
        ('{"path": "/no/such/folder"}', (), "'/no/such/folder' does not exist: correct `path`"),
        ('{"path": "m"}', ("--host", "0.0.0.0"), "no token is set"),
    ],
)
def test_what_cannot_be_served_is_said_and_ends_with_status_2(
    tmp_path: Path, config: str, arguments: tuple[str, ...], says: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(config)
    line = [sys.executable, "-m", "teacher_service", "--config", str(path), "--name", "x", *arguments]
    environment = os.environ | {"DISTILL_TOKEN": ""}
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
