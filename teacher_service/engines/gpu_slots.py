"""How many teachers of one machine may be loaded at once: seats, as locked files in a folder.

A process that needs a seat and finds none asks for the one that was used the longest time ago, by writing the
file NAME.wanted beside it; its holder gives it up between two batches, yet not before it has held it as long
as loading took, so that teachers that take turns spend at most half of their time loading. It leaves the seat
to whoever asked before it takes one again. A process that dies gives its seat up by dying.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from sync.errors import ConfigError
from sync.settings import Settings

log = logging.getLogger(__name__)
SLOTS_VARIABLE: Final = "DISTILL_TEACHER_SLOTS"
"""Environment variable that holds a GpuSlotsConfig as JSON."""
POLL_SECONDS: Final = 0.05


class GpuSlotsConfig(Settings):
    """The seats of one machine."""

    folder: Path
    """Where the files are; all teachers that share the seats name the same one."""
    slots: int = Field(ge=1)
    """Teachers that may be loaded at once."""

    def environment(self) -> dict[str, str]:
        """The variable that `from_environment` reads."""
        return {SLOTS_VARIABLE: self.model_dump_json()}

    @classmethod
    def from_environment(cls) -> GpuSlotsConfig | None:
        """The seats of this process; None: no bound. Raises ConfigError when the variable is malformed."""
        text = os.environ.get(SLOTS_VARIABLE)
        try:
            return cls.model_validate_json(text) if text else None
        except ValidationError as error:
            raise ConfigError(f"{SLOTS_VARIABLE} cannot be used: {error}") from None


class GpuSlot:
    """One teacher's claim on a seat. Order of use: `take`, `used` after each batch, `leave`; then again."""

    def __init__(self, config: GpuSlotsConfig) -> None:
        config.folder.mkdir(parents=True, exist_ok=True)
        self._paths = [config.folder / f"seat-{i}" for i in range(config.slots)]
        self._held: tuple[Path, int] | None = None
        self._until = 0.0

    @property
    def taken(self) -> bool:
        """Whether this process holds one."""
        return self._held is not None

    @property
    def wanted(self) -> bool:
        """Whether another process asks for the seat, and it was held long enough."""
        return self._held is not None and time.monotonic() >= self._until and _request(self._held[0]).exists()

    def take(self) -> None:
        """Wait for a seat, asking for the least recently used one."""
        options: set[Path] = set()
        while (held := self._free(options)) is None:
            if not options:
                log.info("all %d seats are taken: asking for one", len(self._paths))
            request = _request(min(self._paths, key=_last_use))
            request.touch()
            options.add(request)
            time.sleep(POLL_SECONDS)
        self._held = held
        for request in {*options, _request(held[0])}:  # others who ask do so again
            request.unlink(missing_ok=True)
        self.used()

    def _free(self, options: set[Path]) -> tuple[Path, int] | None:
        """A seat that nobody holds, nor asks for unless this process does too, and what holds it now."""
        for path in self._paths:
            others_ask = _request(path).exists() and _request(path) not in options
            if not others_ask and (descriptor := _lock(path)) is not None:
                return path, descriptor
        return None

    def keep_for(self, seconds: float) -> None:
        """Not to be given up before so many seconds have passed."""
        self._until = time.monotonic() + seconds

    def used(self) -> None:
        """It was worked on just now: later than any other, by the number in its file."""
        if self._held is not None:
            os.pwrite(self._held[1], b"%20d" % (1 + max(map(_last_use, self._paths))), 0)

    def leave(self) -> None:
        """Give it up, if there is one."""
        if self._held is not None:
            os.close(self._held[1])
            self._held = None


def _request(path: Path) -> Path:
    return path.with_name(f"{path.name}.wanted")


def _last_use(path: Path) -> int:
    """Number of a seat's last use; the greater, the later. No clock has a say in it."""
    text = path.read_bytes() if path.exists() else b""
    return int(text) if text.strip().isdigit() else 0


def _lock(path: Path) -> int | None:
    """Descriptor that holds the file's lock; None: another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
