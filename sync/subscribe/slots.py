"""The two folders of a mirror, and the small file that says what each of them holds.

    dirty ──hold──▶ holds a version ──promote──▶ live ──the other is promoted──▶ spare ──spoil──▶ dirty

`state.json` is replaced by an atomic rename. The spare is marked dirty before its first byte changes and gets
a version only after all of it was verified: at whatever instant the process dies, a slot that has a version
holds exactly that version. After a reboot, which may lose written pages, both slots count as dirty.
"""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from sync.durable import write
from sync.errors import SnapshotError
from sync.snapshots.manifest import dump, load
from sync.wire import Version

logger = logging.getLogger(__name__)
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class _State(msgspec.Struct, frozen=True):
    run: str
    boot: str
    """Which start of the machine wrote this."""
    fingerprint: str | None
    """Of the model; None until a version was held."""
    live: str | None = None
    a: Version | None = None
    b: Version | None = None
    run_id: str | None = None
    """`RunIdentity.id` of what the slots hold; None: of no run that is known."""


class Slots:
    """Slots "a" and "b" under one folder, owned by one process."""

    def __init__(self, folder: Path, run: str, fingerprint: str | None) -> None:
        """Raises SnapshotError when another process owns the folder, or it mirrors another run or model."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _own(folder / "lock")
        try:
            self._state = _read(folder / "state.json", run, fingerprint)
        except SnapshotError:
            self._lock.close()
            raise

    def close(self) -> None:
        """Let another process own the folder."""
        self._lock.close()

    @property
    def fingerprint(self) -> str | None:
        return self._state.fingerprint

    @property
    def live(self) -> str | None:
        return self._state.live

    @property
    def spare(self) -> str:
        return "b" if self._state.live == "a" else "a"

    def path(self, slot: str) -> Path:
        return self.folder / slot

    def version(self, slot: str | None) -> Version | None:
        """What a slot holds; None: nothing usable."""
        return {"a": self._state.a, "b": self._state.b, None: None}[slot]

    def follow(self, run_id: str) -> None:
        """Versions of another run are forgotten: this one will use their names again."""
        if self._state.run_id != run_id:
            self._write(run_id=run_id, live=None, a=None, b=None, fingerprint=None)

    def spoil(self) -> None:
        """The spare is about to change: until `hold` it holds nothing."""
        self._write(**{self.spare: None})

    def hold(self, version: Version, fingerprint: str) -> None:
        """The spare holds `version`, verified."""
        self._write(**{self.spare: version}, fingerprint=fingerprint)

    def promote(self) -> None:
        """The spare becomes live."""
        self._write(live=self.spare)

    def _write(self, **changes: object) -> None:
        state = msgspec.structs.replace(self._state, **changes)
        write(self.folder / "state.json", dump(state))
        self._state = state


def _own(path: Path) -> BinaryIO:
    """Open file whose lock is held until it is closed, or until the process dies."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SnapshotError(
            f"mirror {path.parent} is in use by another process: give each replica a folder of its own"
        ) from None
    return file


def _read(path: Path, run: str, fingerprint: str | None) -> _State:
    """State after a start, less what a reboot may have spoilt."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    if not path.exists():
        return _State(run, boot, fingerprint)
    state = load(path.read_bytes(), _State, str(path))
    if state.run != run or (
        None not in (fingerprint, state.fingerprint) and fingerprint != state.fingerprint
    ):
        raise SnapshotError(
            f"{path.parent} mirrors run {state.run!r} and model {state.fingerprint}, not run {run!r} and "
            f"model {fingerprint}: use another folder, or remove it"
        )
    if state.boot != boot:
        logger.warning("%s is from before the machine's restart: its weights are read anew", path)
        return _State(run, boot, state.fingerprint)
    return state
