"""The published versions of a run: listed, read back, collected, exported, uploaded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from distill.config import RunConfig
from distill.config.loading import load_run_dir
from distill.metrics.card import FOLDER, write_card
from distill.metrics.results import read_summary
from sync.base.errors import ConfigError, RemoteError, SnapshotError, StoreError
from sync.base.own_code import use_folder
from sync.weights.snapshots import admin
from sync.weights.snapshots.manifest import read_latest, read_manifest
from sync.weights.stores import Store, open_store
from sync.wire import Version

LISTED: Final = ("version", "kind", "base", "parent", "bytes", "full_bytes", "created")
"""Fields of a version's manifest that a listing has."""


def store_of(config: RunConfig, run_dir: Path) -> Store:
    """The store that the run in `run_dir` publishes to."""
    use_folder(config.run.code_folder)
    return open_store(config.weights.store, run_dir / "store")


def check_store(config: RunConfig) -> None:
    """Create, read and delete a key where versions go, unless that is the run's own folder or no store.

    Raises StoreError with the store, what it refused and the remedy.
    """
    if config.weights.store_in_run_folder or not config.uses_store:
        return
    store, key, tried = store_of(config, config.run_dir), f"preflight/{uuid4().hex}", uuid4().bytes
    store.create(key, tried)
    content = store.read(key)
    store.delete(key)
    if content != tried or store.exists(key):
        what = "still has it after it was deleted" if content == tried else "gave back other bytes"
        raise StoreError(f"weights.store: {store} was given {key!r} and {what}: use another store")


def listing(run_dir: Path) -> list[dict[str, Any]]:
    """Every published version, oldest first, then entries that cannot be used (with a "problem")."""
    config = load_run_dir(run_dir)
    contents = admin.ls(store_of(config, run_dir), config.run.name)
    versions = []
    for version, manifest in contents.manifests.items():
        figures = {name: getattr(manifest, name) for name in LISTED}
        named = {name: str(value) for name, value in figures.items() if isinstance(value, Version)}
        versions.append(figures | named | {"latest": version == contents.latest})
    return [*versions, *_unusable(contents.odd)]


def verification(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Read back each version as a replica would; its problem (None: whole)."""
    config = load_run_dir(run_dir)
    versions = admin.verify(store_of(config, run_dir), config.run.name)
    return ({"version": version, "problem": problem} for version, problem in versions)


def collection(run_dir: Path, grace_seconds: float, dry_run: bool) -> dict[str, Any]:
    """Remove what no reader needs, given weights.keep_anchors."""
    config = load_run_dir(run_dir)
    store, keep = store_of(config, run_dir), config.weights.keep_anchors
    done = admin.gc(store, config.run.name, keep, grace_seconds, dry_run=dry_run)
    kept, removed = ([str(version) for version in versions] for versions in (done.kept, done.removed))
    return {"kept": kept, "removed": removed, "bytes": done.bytes, "odd": _unusable(done.odd)}


def export_version(
    run_dir: Path, version: str, target: Path, adapter: bool = False, repo: str | None = None
) -> Version:
    """Write `version` ("": the newest) as a model folder with its card; returns the version.

    A version that is an adapter is merged into the student that the run started from, unless `adapter`.
    `repo`: what the card calls the model.
    """
    config, figures = load_run_dir(run_dir), read_summary(run_dir)
    store, run = store_of(config, run_dir), config.run.name
    chosen = Version.parse(version) if version else read_latest(store, run)
    if chosen is None:
        raise SnapshotError(f"{run_dir} has published no version yet: wait for the first one")
    if adapter or read_manifest(store, run, chosen).kind != "lora":
        admin.export(store, run, chosen, target)
    elif target.exists():
        raise SnapshotError(f"{target} exists: export {chosen} into a new folder")
    else:
        from distill.evaluation.models import write_merged

        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as work:
            admin.export(store, run, chosen, Path(work) / "adapter")
            write_merged(config.student, Path(work) / "adapter", Path(work) / "model")
            (Path(work) / "model").rename(target)
    write_card(target, config, figures, str(chosen), repo or FOLDER)
    return chosen


# --- the Hugging Face Hub -----------------------------------------------------------------------------------


def hub_has(repo: str) -> bool:
    """Whether the Hub has the model `repo` ("owner/name"). Raises ConfigError without a token."""
    from huggingface_hub import HfApi, get_token

    if not get_token():
        raise ConfigError(
            f"--push-to-hub {repo} needs a Hugging Face token with write access, and none is set: set "
            "HF_TOKEN, or run `hf auth login`"
        )
    with _explained(repo):
        return HfApi().repo_exists(repo)


def push(folder: Path, repo: str, version: Version, private: bool) -> str:
    """Upload a model folder in one commit, which creates `repo` when it is missing; URL of the commit."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    with _explained(repo), disable_progress_bars():
        HfApi().create_repo(repo, private=private, exist_ok=True)
        message = f"{version} by onpolicy-distill"
        return str(HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=message).commit_url)


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    from httpx2 import HTTPError
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {repo}: give OWNER/NAME of a model on the Hub: {error}") from None
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        remedy = "check HF_TOKEN, HF_ENDPOINT, the name and the network"
        raise RemoteError(f"{repo} cannot be uploaded: {why}; {remedy}") from error


def _unusable(odd: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "problem": problem} for name, problem in odd.items()]
