"""What stands around a trainer's loop, in memory: a controller, a student."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

from plain_step import ALONE

from student_trainer.engine import after
from sync.wire import Message, Stop, TrainBatch, Version, Wait


class RecordedClient:
    """A ControllerClient without a controller: batches from a list, then Stop; keeps events in `reported`."""

    def __init__(self, batches: Sequence[TrainBatch] = (), checkpoint: bool = False) -> None:
        self.reported: list[Message] = []
        self.stopping = threading.Event()
        self._batches = {batch.version: batch for batch in batches}
        self._stop = Stop(reason="all batches were trained on", checkpoint=checkpoint)

    def does(self, what: str, who: str = "trainer") -> None:
        """Nobody is told."""

    def expect(self, version: Version) -> None:
        """Nothing to fetch."""

    def poll(self, version: Version) -> TrainBatch | Wait | Stop:
        return Wait() if self.stopping.is_set() else self._batches.get(version, self._stop)

    def report(self, event: Message) -> None:
        self.reported.append(event)

    def confirm(self, version: Version) -> None:
        """Nobody was rolled back."""

    def close(self, seconds: float | None = None) -> None:
        """Nothing to wait for."""


class RecordedLearner:
    """A Learner without a model: notes every step and checkpoint in `lines`."""

    def __init__(self, adapters: bool = False) -> None:
        self.lines: list[str] = []
        self.version, self.ranks = Version(0, 0), ALONE
        self.weights = SimpleNamespace(
            adapters=adapters,
            snapshot=dict,
            checksum=lambda: "weights",
            digests=lambda: {"a": "digest"},
        )
        self.on_step: Callable[[TrainBatch], None] = lambda batch: None
        self.parts = {"forward": 0.5}

    def train(self, batch: TrainBatch) -> dict[str, float]:
        self.lines.append(f"step {batch.version.step}")
        self.on_step(batch)
        self.version = after(self.version)
        return {"loss": 1.0}

    def save(self) -> Path:
        self.lines.append(f"save {self.version.step}")
        return Path("there")

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)
