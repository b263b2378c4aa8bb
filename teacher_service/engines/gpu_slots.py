"""How many teachers of one machine may be loaded at once: slots, as locked files in a folder.

A process that needs a slot and finds none requests the least recently used one, by creating NAME.wanted
beside it. The holder releases it between two batches, yet not before it has held it as long as loading took,
so that teachers that take turns spend at most half of their time loading; and it does not take a slot again
before whoever requested it. A process that dies releases its slot by dying.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from sync.base.errors import ConfigError
from sync.base.settings import Settings

SLOTS_VARIABLE: Final = "DISTILL_TEACHER_SLOTS"
"""Environment variable that holds a GpuSlotsConfig as JSON."""
POLL_SECONDS: Final = 0.05


class GpuSlotsConfig(Settings):
    """The slots of one machine."""

    folder: Path
    """Where the files are; all teachers that share the slots name the same one."""
    slots: int = Field(ge=1)
    """Teachers that may be loaded at once."""

    def environment(self) -> dict[str, str]:
        """The variable that `GpuSlot.from_environment` reads."""
        return {SLOTS_VARIABLE: self.model_dump_json()}


class GpuSlot:
    """One teacher's hold on a slot. Order of use: `take`, `used` after each batch, `leave`; then again."""

    def __init__(self, config: GpuSlotsConfig | None) -> None:
        """None: there is no bound, and `take` returns at once."""
        self._paths: list[Path] = []
        if config is not None:
            config.folder.mkdir(parents=True, exist_ok=True)
            self._paths = [config.folder / f"slot-{i}" for i in range(config.slots)]
        self._held: tuple[Path, int] | None = None
        self._until = 0.0

    @classmethod
    def from_environment(cls) -> GpuSlot:
        """Of the slots in SLOTS_VARIABLE. Raises ConfigError when it is malformed."""
        text = os.environ.get(SLOTS_VARIABLE)
        try:
            return cls(GpuSlotsConfig.model_validate_json(text) if text else None)
        except ValidationError as error:
            raise ConfigError(f"{SLOTS_VARIABLE} cannot be used: {error}") from None

    @property
    def wanted(self) -> bool:
        """Whether another process requests the slot, and it was held long enough."""
        return self._held is not None and time.monotonic() >= self._until and _request(self._held[0]).exists()

    def take(self) -> None:
        """Wait for a slot, requesting the least recently used one."""
        if not self._paths:
            return
        requests: set[Path] = set()
        while (slot := self._free(requests)) is None:
            request = _request(min(self._paths, key=_last_use))
            request.touch()
            requests.add(request)
            time.sleep(POLL_SECONDS)
        self._held = slot
        for request in {*requests, _request(slot[0])}:  # other processes request it again
            request.unlink(missing_ok=True)
        self.used()

    def _free(self, requests: set[Path]) -> tuple[Path, int] | None:
        """A slot that nobody holds nor another process requested, and the descriptor that now holds it."""
        for path in self._paths:
            of_another = _request(path).exists() and _request(path) not in requests
            if not of_another and (descriptor := _lock(path)) is not None:
                return path, descriptor
        return None

    def keep_for(self, seconds: float) -> None:
        """Do not release it before so many seconds have passed."""
        self._until = time.monotonic() + seconds

    def used(self) -> None:
        """Mark the slot as the most recently used one, by the number in its file."""
        if self._held is not None:
            os.pwrite(self._held[1], b"%20d" % (1 + max(map(_last_use, self._paths))), 0)

    def leave(self) -> None:
        """Release the slot, if this process holds one."""
        if self._held is not None:
            os.close(self._held[1])
            self._held = None


def _request(path: Path) -> Path:
    return path.with_name(f"{path.name}.wanted")


def _last_use(path: Path) -> int:
    """Number of a slot's last use, greater for a later one; independent of any clock."""
    text = path.read_bytes() if path.exists() else b""
    return int(text) if text.strip().isdigit() else 0


def _lock(path: Path) -> int | None:
    """Descriptor that holds the file's lock; None: another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
