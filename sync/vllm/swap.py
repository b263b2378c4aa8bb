"""Swapping a live model's weights so that it always ends on one whole, known checkpoint.

    WHOLE ── prepare: read, digested, staged ──▶ WHOLE, with staged weights
      ▲ └─── prepare fails: nothing changed         │ apply
      │ ◀──────────── all of it is in place ────────┤
      └── revert ── MIXED ◀── it failed on the way ─┘      revert that fails: the process must end

`prepare` works while the model generates, in a thread of its own; `apply` and `revert` while it does not.
Several workers may hold one model: when one of them ends MIXED, all revert, those that succeeded too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from sync.base.errors import SnapshotError
from sync.base.memory import give_back
from sync.weights.snapshots.checkpoint import NamedTensors, digesting

logger = logging.getLogger(__name__)
MIXED_EXIT: Final = 70
"""Exit status of a process whose model cannot be brought back to whole weights."""
Place: TypeAlias = Callable[[], None]
"""Puts staged weights into the live model. It may raise halfway."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be read as often as needed."""

    name: str
    """What messages call it."""
    read: Callable[[], NamedTensors]
    stage: Callable[[NamedTensors], Place]
    """Makes its tensors ready for the model without changing that, or raises; works again afterwards. Where a
    model cannot be staged, `Place` takes the tensors and so loads them while nothing is generated."""
    digests: dict[str, str] | None = None
    """What reading must give, checkpoint tensor name → BLAKE3 hex; None: not known beforehand."""


class _Staged(NamedTuple):
    source: Source
    place: Place
    digests: dict[str, str]
    """Digests of what was read so far."""


class Swap:
    """The checkpoint that one worker's model holds; `initial` is what it holds now."""

    def __init__(self, initial: Source) -> None:
        self._current = self._previous = initial
        self._staged: _Staged | None = None
        self._replaced: _Staged | None = None  # frees what was replaced, which takes time
        self.mixed = False
        """Whether the model holds parts of two checkpoints; only `revert` may follow."""

    @property
    def digests(self) -> dict[str, str] | None:
        """Digests of the bytes that the model's weights were made of; None before the first `apply`."""
        return self._current.digests

    def prepare(self, source: Source) -> None:
        """Read and stage `source` for `apply`, in place of what was staged before. Raises what reading and
        staging raise; the model is as it was."""
        self._staged = None
        give_back()
        self._staged = _stage(source)

    def apply(self) -> str | None:
        """Put in place what `prepare` staged. Returns why that failed, which the caller must `revert`; None:
        it did not. Raises SnapshotError when nothing is staged, or an earlier failure was not reverted."""
        staged, self._staged = self._staged, None
        if self.mixed:
            raise SnapshotError("an update failed before and was not reverted: revert it, or restart")
        if staged is None:
            raise SnapshotError("nothing is staged: prepare a version first")
        self.mixed = True
        try:
            loaded = _place(staged)
        except Exception as error:  # placing may run any model's loader: whatever it raises is reverted
            logger.exception("loading %s failed", staged.source.name)
            return f"{staged.source.name}: {type(error).__name__}: {error}"
        self._previous, self._current, self.mixed = self._current, loaded, False
        self._replaced = staged
        return None

    def revert(self) -> None:
        """Stage and place again what the model held before the last `apply`. Raises whatever the loader
        raises, or SnapshotError when the old checkpoint is no longer what it was; the model is then mixed for
        good and the process must end."""
        target = self._current if self.mixed else self._previous
        self.mixed, self._replaced = True, None
        self._current = self._previous = _place(_stage(target))
        self.mixed = False

    def revert_or_end(self) -> None:
        """`revert`, or end this process with status MIXED_EXIT: it must not serve mixed weights."""
        try:
            self.revert()
        except Exception:
            logger.critical("the old weights cannot be loaded again: this replica ends", exc_info=True)
            logging.shutdown()
            os._exit(MIXED_EXIT)

    def settle(self) -> None:
        """Forget what was held before the last `apply`, with its memory: it cannot be reverted any more."""
        self._previous, self._replaced = self._current, None


def _stage(source: Source) -> _Staged:
    digests: dict[str, str] = {}
    staged = _Staged(source, source.stage(digesting(source.read(), digests)), digests)
    if digests:
        _check(staged)
    return staged


def _place(staged: _Staged) -> Source:
    staged.place()
    _check(staged)
    return replace(staged.source, digests=staged.digests)


def _check(staged: _Staged) -> None:
    """Raise SnapshotError when other bytes were read than recorded."""
    digests, recorded = staged.digests, staged.source.digests
    if recorded is not None and digests != recorded:
        changed = sorted(k for k in digests.keys() | recorded if digests.get(k) != recorded.get(k))
        raise SnapshotError(
            f"{staged.source.name} gave other bytes than recorded in {changed[:3]}: it was altered"
        )
