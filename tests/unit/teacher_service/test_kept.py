"""The store of kept scores, and its routes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from served_teacher import serving
from table_engine import TableEngine, random_table

from sync import wire
from sync.base.errors import RemoteError
from sync.wire import Scored, ScoreReply, ScoreRequest, ScoreSequence, Want, pack, unpack
from sync.wire.client import Peer
from teacher_service.client import TeacherClient
from teacher_service.kept import PART_BYTES, KeptScores


def store(folder: Path | None, memory: int, disk: int) -> KeptScores:
    return KeptScores(folder, memory, disk, CollectorRegistry())


def read(kept: KeptScores, key: str) -> bytes | None:
    body = kept.open(key)
    return None if body is None else b"".join(body[1])


def test_the_oldest_go_to_disk_and_then_away(tmp_path: Path) -> None:
    kept = store(tmp_path / "kept", 20, 20)
    bodies = [bytes([i]) * 10 for i in range(6)]
    keys = [kept.put([body[:4], body[4:]]).key for body in bodies]
    assert [read(kept, key) for key in keys] == [None, None, *bodies[2:]]
    assert len(list((tmp_path / "kept").iterdir())) == 2
    kept.release(keys[:4])
    assert [read(kept, key) for key in keys] == [None] * 4 + bodies[4:]
    assert list((tmp_path / "kept").iterdir()) == []
    kept.close()
    assert not (tmp_path / "kept").exists()


def test_a_body_larger_than_the_memory_is_kept_on_disk_and_read_to_its_end_once_begun(tmp_path: Path) -> None:
    kept = store(tmp_path, 0, 1 << 30)
    body = np.random.default_rng(0).bytes(3 * PART_BYTES + 7)
    one = kept.put([body])
    assert (one.size, one.digest, one.url) == (len(body), blake3(body).digest(wire.DIGEST_BYTES), "")
    begun = kept.open(one.key)
    kept.release([one.key])
    assert b"".join(begun[1]) == body
    assert kept.open(one.key) is None


@pytest.mark.parametrize("folder", [None, "file/kept"], ids=["a temporary folder", "its own"])
def test_a_disk_that_cannot_be_written_costs_the_oldest_and_nothing_else(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    kept = store(folder and tmp_path / folder, 10, 1 << 30)
    keys = [kept.put([bytes(10)]).key for _ in range(3)]
    assert [read(kept, key) for key in keys] == [None, None, bytes(10)]
    kept.close()


def test_a_temporary_folder_is_for_its_owner_alone_and_goes_with_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    key = (kept := store(None, 0, 1 << 30)).put([bytes(10)]).key
    (folder,) = tmp_path.glob("distill-scores-*")
    assert key.partition("-")[0] not in folder.name, "a key in a URL tells nobody where the folder is"
    assert folder.stat().st_mode & 0o777 == 0o700
    kept.close()
    assert not folder.exists()


def test_another_start_answers_no_key_of_this_one_and_clears_its_files(tmp_path: Path) -> None:
    first = store(tmp_path, 0, 1 << 30)
    key = first.put([b"x"]).key
    (tmp_path / "notes.txt").write_text("not ours")
    second = store(tmp_path, 0, 1 << 30)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert second.open(key) is None
    assert second.put([b"x"]).key != key
    second.close()
    assert (tmp_path / "notes.txt").exists()


TABLE = random_table(50)


def sequence(name: str, length: int) -> ScoreSequence:
    ids = pack(np.arange(length, dtype="i4") % 50)
    return ScoreSequence(name, ids, 1)


async def test_kept_scores_are_those_of_an_inline_answer_until_they_are_released() -> None:
    want = Want(topk=3, entropy=True, hidden=True)
    ids = pack(np.array([[7, -1], [1, 2], [3, 4]], "i4"))
    asked = [sequence("a", 9), replace(sequence("b", 4), gather_ids=ids)]
    async with serving(TableEngine(TABLE)) as url, TeacherClient("t", [url]) as client, Peer(url) as peer:
        inline, _ = await client.score(asked, want)
        kept, _ = await client.score(asked, replace(want, keep=True))
        for whole, reference in zip(inline, kept, strict=True):
            place = reference.kept
            assert reference == Scored(whole.id, whole.logprob, kept=place)
            assert place.url == url
            body = await peer.once(f"/v1/scores/{place.key}", None, 600)
            assert (len(body), blake3(body).digest(wire.DIGEST_BYTES)) == (place.size, place.digest)
            (reply,) = wire.frames(body, ScoreReply)
            given = next(one.gather_ids for one in asked if one.id == whole.id)
            assert reply.results == [replace(whole, gather_ids=given)]
        first, second = (one.kept for one in kept)
        await client.release([first])
        with pytest.raises(RemoteError, match="404: these scores are released, evicted"):
            await peer.once(f"/v1/scores/{first.key}", None, 600)
        assert await peer.once(f"/v1/scores/{second.key}", None, 600)
        assert client.servers().urls == [url]


async def test_a_long_body_comes_in_frames_of_some_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that comes alone is scored, although it is longer than the queue."""
    monkeypatch.setattr("teacher_service.messages.FRAME_BYTES", 100 * 204)  # 50 floats and a log-probability
    count = 250
    engine = TableEngine(TABLE, max_length=count)
    async with serving(engine, queue_tokens=count - 1) as url, Peer(url) as peer:
        request = ScoreRequest(sequences=[sequence("a", count)], want=Want(hidden=True, keep=True))
        (scored,) = (await peer.call("/v1/score", request, ScoreReply)).results
        body = await peer.once(f"/v1/scores/{scored.kept.key}", None, 600)
        assert (len(body), blake3(body).digest(wire.DIGEST_BYTES)) == (scored.kept.size, scored.kept.digest)
        parts = [one for reply in wire.frames(body, ScoreReply) for one in reply.results]
        assert [part.hidden.shape for part in parts] == [(100, 50), (100, 50), (49, 50)]
        logprob = np.concatenate([unpack(part.logprob) for part in parts])
        assert logprob.tolist() == unpack(scored.logprob).tolist()
