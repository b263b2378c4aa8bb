"""Engines whose model is loaded again while they serve: a self-teacher, and one that shares its GPU.

FollowingEngine    serving v ──(v + every is published)──▶ load it beside v ──▶ swap between two calls
IdleUnloadEngine   loaded ──(no work for a while, or its GPU slot is wanted)──▶ unloaded ──(work)──▶ loaded

GpuSlot says how many teachers of one machine may be loaded at once: slots, as locked files in a folder. A
process that needs a slot and finds none requests the least recently used one, by creating NAME.wanted beside
it. The holder releases it between two batches, yet not before it has held it as long as loading took, so that
teachers that take turns spend at most half of their time loading; and it does not take a slot again before
whoever requested it. A process that dies releases its slot by dying.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field, ValidationError

from sync.base.errors import ConfigError, DistillError, Unreachable
from sync.base.settings import Settings
from sync.wire import Head, Version
from teacher_service.engines import base
from teacher_service.engines.base import Engine, EngineScores, Item, Steps

if TYPE_CHECKING:  # the launcher needs none of it
    from sync.weights.subscribe import Subscriber

log = logging.getLogger(__name__)
VERSION_SECONDS: Final = 1.0
"""How often the newest version is read."""
SLOT_SECONDS: Final = 0.05
"""How often a slot is looked at."""
SLOTS_VARIABLE: Final = "DISTILL_TEACHER_SLOTS"
"""Environment variable that holds a GpuSlotsConfig as JSON."""
JOIN_SECONDS: Final = 0.5
"""How long `close` waits for a version that is being read or loaded."""


class _ReloadingEngine:
    """Forwards each call to the engine of `_in_memory`, and calls `_tend` from a thread of its own."""

    engine_info: base.EngineInfo

    def __init__(self, poll_seconds: float) -> None:
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._watch, args=(poll_seconds,), daemon=True)

    def score(self, items: Sequence[Item], options: base.ScoreOptions) -> EngineScores:
        """See `Engine.score`; one model scores a whole batch."""
        with self._in_memory() as engine:
            return engine.score(items, options)

    def generate(self, prompts: Sequence[base.EnginePrompt], params: base.GenerationParams) -> Steps:
        """See `Engine.generate`; one model generates a whole batch."""
        steps = completions = None
        while completions is None:
            with self._in_memory() as engine:
                steps = steps or engine.generate(prompts, params)
                completions = next(steps)
            yield completions

    def head(self) -> Head | None:
        with self._in_memory() as engine:
            return engine.head() if "hidden" in self.engine_info.can else None

    @contextmanager
    def _in_memory(self) -> Iterator[Engine]:
        """The engine, in memory and not replaced for as long as the context lasts."""
        with self._lock:
            assert self._engine is not None, "only `close` unloads it, at the end"
            yield self._engine

    def _tend(self) -> None:
        """Load or unload, if it is time to."""
        raise NotImplementedError

    def _unload(self, why: str) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            log.info("unloaded %s", why)

    def close(self) -> None:
        """See `Engine.close`; does not wait for a version that is being read or loaded."""
        self._closed.set()
        self._thread.join(JOIN_SECONDS)
        with self._lock:
            self._unload("at the end")

    def _watch(self, poll_seconds: float) -> None:
        while not self._closed.wait(poll_seconds):
            try:
                self._tend()
            except Exception as error:  # edge of a thread: it must go on, whatever a loader raises
                unknown = not isinstance(error, DistillError)
                log.warning("the model stays as it is: %s", error, exc_info=unknown)


class FollowingEngine(_ReloadingEngine):
    """Serves `load(None)`, and `load(folder)` of each version `every` steps after the one it holds.

    A version of another lineage is loaded at once: the trainer went back. A version that cannot be staged or
    loaded is logged and retried while the old one serves. Two models are in memory during a swap. No head is
    given: callers cache it, and the next version has another.
    """

    def __init__(
        self,
        load: Callable[[Path | None], Engine],
        versions: Subscriber,
        every: int,
        poll_seconds: float = VERSION_SECONDS,
    ) -> None:
        super().__init__(poll_seconds)
        self._load, self._versions, self._every = load, versions, every
        self._engine = load(None)
        loaded = self._engine.engine_info
        self.engine_info = replace(loaded, can=tuple(name for name in loaded.can if name != "hidden"))
        self.version: Version | None = None
        """What it serves; None: the folder of its configuration."""
        self._thread.start()

    def _tend(self) -> None:
        newest, started = self._versions.newest(), time.monotonic()
        if newest is None:
            return
        loaded = self.version or Version(newest.lineage, 0)
        if newest.lineage == loaded.lineage and newest.step < loaded.step + self._every:
            return
        fresh = self._load(self._versions.folder(newest))
        with self._lock:
            if self._closed.is_set():
                return
            old, self._engine, self.version = self._engine, fresh, newest
        assert old is not None, "only `close` unloads it, under the lock"
        old.close()
        log.info("serving %s after %.1f s", newest, time.monotonic() - started)


class IdleUnloadEngine(_ReloadingEngine):
    """Loads an engine when work comes, and closes it after `idle_seconds` without work.

    It is loaded once at the start, so that a teacher that cannot serve fails early, and for `engine_info`.
    A later load that fails raises Unreachable, and the next call loads again.
    It is loaded only while it holds its `slot`, and unloaded early when another teacher wants that.
    It is never unloaded while completions are generated: they hold the model until their last step.
    """

    def __init__(self, load: Callable[[], Engine], idle_seconds: float, slot: GpuSlot | None = None) -> None:
        super().__init__(min(SLOT_SECONDS, idle_seconds))
        self._load, self._idle_seconds, self._slot = load, idle_seconds, slot or GpuSlot(None)
        self._generating = 0
        """Batches of completions under way."""
        self.engine_info = self._load_engine().engine_info
        self._used = time.monotonic()
        self._thread.start()

    def generate(self, prompts: Sequence[base.EnginePrompt], params: base.GenerationParams) -> Steps:
        """See `Engine.generate`; counts as work until the last step."""
        self._tend()  # another teacher's turn also comes between two batches that follow at once
        self._generating += 1
        try:
            yield from super().generate(prompts, params)
        finally:
            self._generating -= 1

    @contextmanager
    def _in_memory(self) -> Iterator[Engine]:
        with self._lock:
            try:
                yield self._engine or self._load_again()
            finally:
                self._used = time.monotonic()
                self._slot.used()

    def _load_again(self) -> Engine:
        try:
            return self._load_engine()
        except Exception as error:  # whatever a loader raises: the work that waits for it is not at fault
            raise Unreachable(
                f"the model cannot be loaded again ({type(error).__name__}: {error}): make sure that its "
                "folder can be read and that memory is free; the next request tries again"
            ) from error

    def _load_engine(self) -> Engine:
        self._slot.take()
        started = time.monotonic()
        try:
            self._engine = self._load()
        except BaseException:
            self._unload("after a load that failed")
            raise
        seconds = time.monotonic() - started
        self._slot.keep_for(seconds)
        log.info("loaded in %.1f s", seconds)
        return self._engine

    def _tend(self) -> None:
        if not self._reason():
            return
        with self._lock:  # a batch that held it until now was work
            if reason := self._reason():
                self._unload(reason)

    def _reason(self) -> str | None:
        """Why it is to be unloaded now; None where it is not."""
        if self._engine is None or self._generating:
            return None
        if time.monotonic() - self._used >= self._idle_seconds:
            return "without work"
        return "for another teacher" if self._slot.wanted else None

    def _unload(self, why: str) -> None:
        super()._unload(why)
        self._slot.leave()


# --- the slots of one machine's GPUs ------------------------------------------------------------------------


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
        self._taken: tuple[Path, int] | None = None
        self._until = 0.0

    @classmethod
    def from_environment(cls) -> GpuSlot:
        """The slot of this process among those in SLOTS_VARIABLE. Raises ConfigError when it is malformed."""
        text = os.environ.get(SLOTS_VARIABLE)
        try:
            return cls(GpuSlotsConfig.model_validate_json(text) if text else None)
        except ValidationError as error:
            raise ConfigError(f"{SLOTS_VARIABLE} cannot be used: {error}") from None

    @property
    def wanted(self) -> bool:
        """Whether another process requests the slot, and it was held long enough."""
        return (
            self._taken is not None and time.monotonic() >= self._until and _request(self._taken[0]).exists()
        )

    def take(self) -> None:
        """Wait for a slot, requesting the least recently used one."""
        if not self._paths:
            return
        requests: set[Path] = set()
        while (slot := self._free(requests)) is None:
            request = _request(min(self._paths, key=_last_use))
            request.touch()
            requests.add(request)
            time.sleep(SLOT_SECONDS)
        self._taken = slot
        for request in {*requests, _request(slot[0])}:  # other processes request it again
            request.unlink(missing_ok=True)
        self.used()

    def _free(self, requests: set[Path]) -> tuple[Path, int] | None:
        """A slot that nobody holds nor another process requested, and the descriptor that now holds it."""
        for path in self._paths:
            if _request(path).exists() and _request(path) not in requests:
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
            else:
                return path, descriptor
        return None

    def keep_for(self, seconds: float) -> None:
        """Do not release it before so many seconds have passed."""
        self._until = time.monotonic() + seconds

    def used(self) -> None:
        """Mark the slot as the most recently used one, by the number in its file."""
        if self._taken is not None:
            os.pwrite(self._taken[1], b"%20d" % (1 + max(map(_last_use, self._paths))), 0)

    def leave(self) -> None:
        """Release the slot, if this process holds one."""
        if self._taken is not None:
            os.close(self._taken[1])
            self._taken = None


def _request(path: Path) -> Path:
    return path.with_name(f"{path.name}.wanted")


def _last_use(path: Path) -> int:
    """Number of a slot's last use, greater for a later one; independent of any clock."""
    text = path.read_bytes() if path.exists() else b""
    return int(text) if text.strip().isdigit() else 0
