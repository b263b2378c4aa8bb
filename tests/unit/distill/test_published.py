"""Stores of runs: what the preflight tries where versions will go, and `distill sync …` on bad ones."""

from __future__ import annotations

from pathlib import Path

import hostile_store
import pytest
import s3_server
from command import left
from memory_store import MemoryStore
from ports import refusing
from small_config import make_config

from distill import published
from distill.config import RunConfig
from distill.config.loading import load
from distill.published import check_store
from sync.base.errors import StoreError
from sync.weights.stores.store import DirectoryStore


def on_s3(address: str, bucket: str = "bucket") -> RunConfig:
    options = {"endpoint": address, "region": "us-east-1"}
    store = {"type": "object", "url": f"s3://{bucket}/runs", "options": options}
    return make_config(weights={"store": store})


def test_a_store_that_works_is_left_as_it_was_and_one_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with s3_server.serve() as address:  # which has a bucket named "bucket"
        check_store(config := on_s3(address))
        assert published.store_of(config, config.run_dir).list("") == []
        said = r"cannot write .* in the store s3://absent/runs: .*NoSuchBucket.* check the address"
        with pytest.raises(StoreError, match=said):
            check_store(on_s3(address, "absent"))
    monkeypatch.setattr("sync.weights.stores.object_store._RETRY", {"max_retries": 1})
    with refusing() as address, pytest.raises(StoreError, match=r"s3://bucket/runs.*check the address"):
        check_store(on_s3(address))


def test_the_runs_own_folder_is_not_made(tmp_path: Path) -> None:
    check_store(make_config(run={"name": "r", "steps": 1, "folder": tmp_path / "runs"}))
    assert not (tmp_path / "runs").exists()


class Alters(MemoryStore):
    def read(self, key: str) -> bytes:
        return super().read(key) + b"!"


class Keeps(MemoryStore):
    def delete(self, key: str) -> None:
        pass


@pytest.mark.parametrize(("kind", "problem"), [(Alters, "other bytes"), (Keeps, "still has it")])
def test_a_store_that_does_other_things_is_refused(
    kind: type[MemoryStore], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "open_store", lambda *_: kind())
    with pytest.raises(StoreError, match=problem):
        check_store(on_s3("http://anywhere"))


# --- commands

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.toml"


def run_folder(folder: Path, store: str) -> Path:
    """A run's folder with the configuration alone."""
    config = load(QUICKSTART, [f"weights.store={store}", f"run.folder={folder}", "run.name=run"])
    (folder / "run").mkdir()
    (folder / "run/config.json").write_text(config.model_dump_json())
    return folder / "run"


def filled(folder: Path, versions: int) -> DirectoryStore:
    """The store in a run's folder, with so many versions."""
    store = DirectoryStore(folder / "store")
    hostile_store.publish(store, folder / "model", versions)
    return store


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ('{type="object", url="no url at all"}', "store url 'no url at all' cannot be used"),
        ('{type="object", url="other://place"}', 'Unable to recognise URL "other://place"'),
        ('{type="object", url="s3://b", options={colour="red"}}', "'colour' is not valid for store 'S3'"),
        ('{type="bucket", bucket="me/none", create=false}', "check HF_ENDPOINT, HF_TOKEN, the bucket's name"),
        ('{type="directory", path="/dev/null/store"}', "the store /dev/null/store: Not a directory"),
    ],
)
def test_a_store_that_cannot_be_opened_is_one_message(
    store: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    said = refused(tmp_path, ["sync", "ls", str(run_folder(tmp_path, store))], capsys)
    assert message in said
    assert len(said.strip().splitlines()) == 1


def refused(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command leaves with; it fails without a traceback."""
    status = left(*words, *([str(tmp_path / "out")] if "export" in words else []))
    said = capsys.readouterr().err
    assert status in (1, 2), said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("command", ["verify", "export"])
def test_an_empty_store_is_no_success(command: str, tmp_path, capsys) -> None:
    words = ["sync", command, str(run_folder(tmp_path, '{type="directory"}'))]
    assert "wait for the first one" in refused(tmp_path, words, capsys)


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("ls", ["L000-v00000000  full", "00000001  run/L000-v00000001/manifest.json is not a Manifest"]),
        ("verify", ["L000-v00000000  whole", "'L9'  it is no version's name"]),
        ("gc", ["kept 1, removed 0", "'run/leases/x.json'  run/leases/x.json is not a Lease"]),
    ],
)
def test_what_is_bad_in_a_store_is_told_beside_what_is_good(
    command: str, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path, '{type="directory"}')
    store = filled(folder, versions=1)
    for key in ("run/L000-v00000001/manifest.json", "run/L9/manifest.json", "run/leases/x.json"):
        store.create(key, b"{")
    assert left("sync", command, str(folder), "--json", str(tmp_path / "figures.json")) == 1
    said = capsys.readouterr()
    assert "see above" in said.err
    assert "Traceback" not in said.err
    assert all(line in said.out for line in lines), said.out
    assert "problem" in (tmp_path / "figures.json").read_text()


def test_a_renamed_folder_reads_its_own_store(tmp_path: Path) -> None:
    filled(run_folder(tmp_path, '{type="directory"}'), versions=1)
    renamed = (tmp_path / "run").rename(tmp_path / "run.1")
    later = filled(run_folder(tmp_path, '{type="directory"}'), versions=2)
    before = later.list("")
    assert [one["version"] for one in published.listing(renamed)] == ["L000-v00000000"]
    assert [one["version"] for one in published.verification(renamed)] == ["L000-v00000000"]
    published.collection(renamed, grace_seconds=0.0, dry_run=False)
    assert later.list("") == before
    assert str(published.export_version(renamed, "", tmp_path / "out")) == "L000-v00000000"
