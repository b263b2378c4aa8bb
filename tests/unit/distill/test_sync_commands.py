"""`distill sync …` on runs whose store cannot be used, and the proof's questions to servers that are none."""

from __future__ import annotations

from pathlib import Path

import hostile_store
import pytest
from command import left
from memory_store import MemoryStore

from distill import published
from distill.config.loading import load
from sync.weights.stores.store import DirectoryStore

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.toml"
COMMANDS = ["ls", "verify", "gc", "export"]


def run_folder(folder: Path, store: str) -> Path:
    """A run's folder with the configuration alone."""
    config = load(QUICKSTART, [f"weights.store={store}", f"run.folder={folder}", "run.name=run"])
    (folder / "run").mkdir()
    (folder / "run/config.json").write_text(config.model_dump_json())
    return folder / "run"


def published_in(folder: Path, versions: int) -> DirectoryStore:
    """The store in a run's folder, with so many versions."""
    sound, store = MemoryStore(), DirectoryStore(folder / "store")
    hostile_store.publish(sound, folder / "model", versions)
    for key in sound.list(""):
        store.create(key, sound.read(key))
    return store


@pytest.mark.parametrize("command", COMMANDS)
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
    command: str, store: str, message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    said = refused(tmp_path, ["sync", command, str(run_folder(tmp_path, store))], capsys)
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
    store = published_in(folder, versions=1)
    for key in ("run/L000-v00000001/manifest.json", "run/L9/manifest.json", "run/leases/x.json"):
        store.create(key, b"{")
    assert left("sync", command, str(folder), "--json", str(tmp_path / "figures.json")) == 1
    said = capsys.readouterr()
    assert "see above" in said.err
    assert "Traceback" not in said.err
    assert all(line in said.out for line in lines), said.out
    assert "problem" in (tmp_path / "figures.json").read_text()


def test_a_renamed_folder_reads_its_own_store(tmp_path: Path) -> None:
    published_in(run_folder(tmp_path, '{type="directory"}'), versions=1)
    renamed = (tmp_path / "run").rename(tmp_path / "run.1")
    later = published_in(run_folder(tmp_path, '{type="directory"}'), versions=2)
    before = later.list("")
    assert [one["version"] for one in published.listing(renamed)] == ["L000-v00000000"]
    assert [one["version"] for one in published.verification(renamed)] == ["L000-v00000000"]
    published.collection(renamed, grace_seconds=0.0, dry_run=False)
    assert later.list("") == before
    assert str(published.export_version(renamed, "", tmp_path / "out")) == "L000-v00000000"
