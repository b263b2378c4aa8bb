"""Swapping a live model's weights so that it always ends on one whole, known checkpoint.

    WHOLE ── apply: all tensors loaded ──▶ WHOLE (new)
      ▲ └─── apply: failed on the way ───▶ MIXED
      └──────────── revert ───────────────┘        revert that fails: the process must end

Several workers may hold one model: when one of them ends MIXED, all revert, those that succeeded too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from sync.errors import SnapshotError
from sync.snapshots.checkpoint import NamedTensors, digesting

logger = logging.getLogger(__name__)
MIXED_EXIT: Final = 70
"""Exit status of a process whose model cannot be brought back to whole weights."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be read as often as needed."""

    name: str
    """For messages."""
    read: Callable[[], NamedTensors]
    digests: dict[str, str] | None = None
    """What reading must give, checkpoint tensor name → BLAKE3 hex; None: not known beforehand."""
    load: Callable[[NamedTensors], None] | None = None
    """How its tensors get into the model; None: as all of this swap's do."""


class Swap:
    """The checkpoint that one worker's model holds.

    `load(tensors)` must put every parameter of the model from `tensors`, or raise; it may raise halfway,
    and must work again afterwards. `initial` is what the model holds now.
    """

    def __init__(self, load: Callable[[NamedTensors], None], initial: Source) -> None:
        self._load = load
        self._current = self._previous = initial
        self.error: str | None = None
        """Why the last `apply` failed; None: it did not."""
        self.mixed = False
        """Whether the model holds parts of two checkpoints; only `revert` may follow."""

    @property
    def digests(self) -> dict[str, str] | None:
        """Digests of the bytes last given to the loader; None before the first `apply`."""
        return self._current.digests

    def apply(self, source: Source) -> None:
        """Load `source`. On failure `error` says why, and the caller must `revert`. Raises nothing else."""
        if self.mixed:
            raise SnapshotError("an update failed before and was not reverted: revert it, or restart")
        self.mixed, self.error = True, None
        try:
            loaded = self._loaded(source)
        except Exception as error:  # the loader runs any model's code: whatever it raises is reverted
            logger.exception("loading %s failed", source.name)
            self.error = f"{source.name}: {type(error).__name__}: {error}"
            return
        self._previous, self._current, self.mixed = self._current, loaded, False

    def revert(self) -> None:
        """Load again what the model held before the last `apply`.

        Raises whatever the loader raises, or SnapshotError when the old checkpoint is no longer what it was;
        the model is then mixed for good and the process must end.
        """
        target = self._current if self.mixed else self._previous
        self.mixed = True
        self._current = self._previous = self._loaded(target)
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
        self._previous = self._current

    def _loaded(self, source: Source) -> Source:
        digests: dict[str, str] = {}
        (source.load or self._load)(digesting(source.read(), digests))
        if source.digests is not None and digests != source.digests:
            changed = sorted(
                k for k in digests.keys() | source.digests if digests.get(k) != source.digests.get(k)
            )
            raise SnapshotError(
                f"{source.name} gave other bytes than recorded in {changed[:3]}: it was altered"
            )
        return replace(source, digests=digests)
