"""A replica's local copy of the weights: one checkpoint folder is live while another is brought forward.

    MIRROR/a/  b/          Hugging Face checkpoint folders
           state.json      what each of them holds
           deltas/         verified downloads that the other slot will need as well

The live folder is never written. The spare takes the first route that verifies: the deltas since the version
it holds, else a copy of the live folder and the deltas since; else the newest anchor at or before the wanted
version and the deltas since. Files are checked against the manifest before anything changes, and every
tensor against the trainer's digest before the spare counts as good.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from sync.base.durable import write
from sync.base.errors import ConfigError, SnapshotError, StoreError
from sync.base.mounts import network_mount
from sync.base.settings import ReplicaConfig
from sync.weights.delta.file import apply_chain
from sync.weights.snapshots import checkpoint
from sync.weights.snapshots.manifest import Download, Manifest, dump, lease, load, read_chain, read_latest
from sync.weights.stores import Store, open_store
from sync.wire import Version
from sync.wire.claims import Claim

logger = logging.getLogger(__name__)
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Staged(NamedTuple):
    """A verified version in a slot."""

    path: Path
    """Checkpoint folder; it stays as it is until `stage` is called after another promotion."""
    bytes_read: int
    """Bytes that came from the store."""


class _State(msgspec.Struct, frozen=True):
    run: str
    boot: str
    """Boot id of the machine when this was written."""
    fingerprint: str | None
    """Fingerprint of the model; None until a version was held."""
    live: str | None = None
    a: Version | None = None
    b: Version | None = None
    run_id: str | None = None
    """`RunIdentity.id` of what the slots hold; None: of no run that is known."""


class Mirror:
    """One per replica, in one process, one call at a time. Use it inside `with`, or `close()` it.

        dirty ──verified──▶ holds a version ──promote──▶ live ──other slot promoted──▶ spare ──stage──▶ dirty

    `state.json` is replaced by an atomic rename. The spare is marked dirty before its first byte changes and
    gets a version only after all of it was verified: at whatever instant the process dies, a slot that has a
    version holds exactly that version. After a reboot, which may lose written pages, both count as dirty.
    """

    def __init__(self, folder: Path, store: Store, run: str) -> None:
        """Open or make the mirror of `run` in `folder`; its model is that of the first version staged. Raises
        SnapshotError when another process holds the folder, or it mirrors another run."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._store, self._run = folder, store, run
        self._run_id: str | None = None
        self._lock = (folder / "lock").open("ab")  # held until it is closed, or until the process dies
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._state = _read(folder / "state.json", run)
        except BlockingIOError:
            self._lock.close()
            raise SnapshotError(
                f"mirror {folder} is in use by another process: give each replica a folder of its own"
            ) from None
        except SnapshotError:
            self._lock.close()
            raise

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process own the folder."""
        self._lock.close()

    def follow(self, run_id: str | None) -> None:
        """Take versions of the run with this id alone, and forget what is held of another; None: of any."""
        self._run_id = run_id
        if run_id is not None and self._state.run_id != run_id:
            self._write(run_id=run_id, live=None, a=None, b=None, fingerprint=None)

    @property
    def version(self) -> Version | None:
        """Version of the live slot; None before the first promotion."""
        return self._version_in(self._state.live)

    @property
    def path(self) -> Path | None:
        """The live slot's checkpoint folder; None before the first promotion."""
        return None if self._state.live is None else self._folder / self._state.live

    def stage(self, version: Version) -> Staged:
        """Bring the spare slot to `version` and verify it; the live slot is only read.

        A version that is live is returned as it is. Raises SnapshotError when the version is of another run
        or model, or verifies on no route; StoreError when the store or the disk fails. The live slot is then
        as it was, and the next call recovers.
        """
        if version == self.version and self.path is not None:
            return Staged(self.path, 0)
        read = 0
        if self._version_in(self._spare) != version:
            with self._writing():
                read = self._bring_forward(version)
        return Staged(self._folder / self._spare, read)

    def promote(self, version: Version) -> None:
        """Make the spare live; again changes nothing. Raises SnapshotError unless it holds `version`,
        StoreError when the disk fails."""
        if version == self.version:
            return
        if self._version_in(self._spare) != version:
            raise SnapshotError(
                f"the spare slot holds {self._version_in(self._spare)}, not {version}: stage it again"
            )
        with self._writing():
            self._write(live=self._spare)

    def holds(self, version: Version) -> bool:
        """Whether a slot, live or spare, holds `version`."""
        return version in (self._state.a, self._state.b)

    def _bring_forward(self, version: Version) -> int:
        """Take the first route to `version` that verifies; returns the bytes read from the store."""
        download = Download(self._store, self._folder / "deltas")
        for slot in (self._spare, self._state.live):
            if slot is None or (local := self._version_in(slot)) is None:
                continue
            try:
                chain = read_chain(self._store, self._run, version, frozenset([local]))
            except SnapshotError as error:
                logger.info("no deltas from %s to %s: %s", local, version, error)
                continue
            if chain[0].base != local:
                continue
            try:
                self._take(slot, chain, download)
                return download.bytes_read
            except (SnapshotError, StoreError) as error:
                logger.warning("staging %s on top of slot %s failed: %s", version, slot, error)
        with lease(self._store, self._run, version):
            self._take(None, read_chain(self._store, self._run, version), download)
        return download.bytes_read

    def _take(self, slot: str | None, chain: list[Manifest], download: Download) -> None:
        """Bring the spare along one route: deltas on what `slot` holds, or from the anchor (None). Raises
        SnapshotError when a file or its result is not what the trainer had."""
        self._check_model(chain)
        links = [link for link in chain if link.base is not None]
        spare, begin = self._folder / self._spare, self._folder / (slot or self._spare)
        if slot is None:
            self._empty_spare()
            download.anchor(chain[0], spare)
        places = checkpoint.tensors(begin)
        if checkpoint.fingerprint(places) != chain[-1].fingerprint:
            raise SnapshotError(
                f"the files of {chain[0].version} are of another model than its manifest says"
            )
        for link in links:
            download.delta(link, places)
        if begin == self.path:
            self._empty_spare()
            shutil.copytree(begin, spare)
        else:
            self._write(**{self._spare: None})
        apply_chain(spare, (download.open(link, places) for link in links))
        self._write(**{self._spare: chain[-1].version}, fingerprint=chain[-1].fingerprint)
        next_of_live = dropwhile(lambda link: link.base != self.version, links)
        download.keep({link.version for link in next_of_live})

    def _check_model(self, chain: list[Manifest]) -> None:
        known = self._state.fingerprint or chain[0].fingerprint
        for link in chain:
            if self._run_id is not None and link.run_id not in (None, self._run_id):
                raise SnapshotError(
                    f"{link.version} in the store is of another run {self._run!r} (id {link.run_id}), this "
                    f"one has id {self._run_id}: remove the old run from the store, or use another name"
                )
            if link.fingerprint != known:
                raise SnapshotError(
                    f"{link.version} is of model {link.fingerprint[:12]}, this mirror holds {known[:12]}: "
                    "names, shapes or dtypes differ"
                )

    @property
    def _spare(self) -> str:
        return "b" if self._state.live == "a" else "a"

    def _version_in(self, slot: str | None) -> Version | None:
        return {"a": self._state.a, "b": self._state.b, None: None}[slot]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"mirror {self._folder} cannot be written: {error}; it needs room for two checkpoints"
            ) from error

    def _empty_spare(self) -> None:
        self._write(**{self._spare: None})
        shutil.rmtree(self._folder / self._spare, ignore_errors=True)

    def _write(self, **changes: object) -> None:
        state = msgspec.structs.replace(self._state, **changes)
        write(self._folder / "state.json", dump(state))
        self._state = state


def check_local(folder: Path) -> None:
    """Raise ConfigError when a folder, which need not exist yet, is on a network file system. All that follow
    a run's weights read and write checkpoints there all the time; over a network these would travel several
    times per version."""
    if mount := network_mount(folder):
        raise ConfigError(
            f"mirror {folder} would lie on a network file system ({mount}): set student.mirror_folder to a "
            "folder on a local disk of each host"
        )


def _read(path: Path, run: str) -> _State:
    """State after a start, less what a reboot may have spoilt."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    if not path.exists():
        return _State(run, boot, None)
    state = load(path.read_bytes(), _State, str(path))
    if state.run != run:
        raise SnapshotError(
            f"{path.parent} mirrors run {state.run!r}, not run {run!r}: use another folder, or remove it"
        )
    if state.boot != boot:
        logger.warning("%s is from before the machine's restart: its weights are read anew", path)
        return _State(run, boot, state.fingerprint)
    return state


# --- subscriber -----------------------------------------------------------------------------------------


class Subscriber:
    """Versions of a run, read from its store into a mirror; not for two threads at once. `claim` is the run
    whose requests are served: versions of another one are refused. Raises ConfigError when the mirror is on a
    network file system."""

    def __init__(self, config: ReplicaConfig, claim: Claim) -> None:
        check_local(config.mirror)
        self._store, self._run = open_store(config.store, config.store_path), config.run
        self._claim = claim
        self._mirror = Mirror(config.mirror, self._store, config.run)

    def newest(self) -> Version | None:
        """The version published last; None: none yet, or no run claimed this process. Raises StoreError."""
        return read_latest(self._store, self._run) if self._claim.run_id else None

    def folder(self, version: Version) -> Path:
        """A model or adapter folder that holds exactly `version`. Raises SnapshotError or StoreError."""
        self._mirror.follow(self._claim.run_id)
        staged = self._mirror.stage(version)
        self._mirror.promote(version)
        return staged.path
