"""`check_store`: what the preflight tries where versions will go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server
from memory_store import MemoryStore
from ports import free_port
from small_config import make_config

from distill import published
from distill.config import RunConfig
from distill.published import check_store
from sync.base.errors import StoreError


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.fixture
def s3() -> Iterator[str]:
    """Address of an S3 server with a bucket named "bucket"."""
    with s3_server.serve() as address:
        yield address


def on_s3(address: str, bucket: str = "bucket") -> RunConfig:
    options = {"endpoint": address, "region": "us-east-1"}
    return make_config(
        weights={"store": {"type": "object", "url": f"s3://{bucket}/runs", "options": options}}
    )


def test_a_store_that_works_is_left_as_it_was(s3: str) -> None:
    config = on_s3(s3)
    check_store(config)
    assert published.store_of(config, config.run_dir).list("") == []


def test_a_bucket_that_is_not_there_is_refused_by_name(s3: str) -> None:
    said = r"cannot write .* in the store s3://absent/runs: .*NoSuchBucket.* check the address"
    with pytest.raises(StoreError, match=said):
        check_store(on_s3(s3, "absent"))


def test_a_store_that_nobody_serves_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync.weights.stores.object_store._RETRY", {"max_retries": 1})
    with pytest.raises(StoreError, match=r"s3://bucket/runs.*check the address"):
        check_store(on_s3(f"http://127.0.0.1:{free_port()}"))


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
    kind: type[MemoryStore], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "open_store", lambda *_: kind())
    store: dict[str, Any] = {"type": "directory", "path": tmp_path}
    with pytest.raises(StoreError, match=problem):
        check_store(make_config(weights={"store": store}))
