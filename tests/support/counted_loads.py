"""Table teachers that are loaded and closed again, counted."""

from __future__ import annotations

from pathlib import Path

from table_engine import TableEngine, random_table


class Loads:
    """Loads engines whose scores depend on the folder, which is named after a number."""

    def __init__(self) -> None:
        self.folders: list[str | None] = []
        self.closed = 0

    @property
    def loaded(self) -> int:
        return len(self.folders)

    def __call__(self, folder: Path | None = None) -> TableEngine:
        self.folders.append(None if folder is None else folder.name)
        loads = self

        class Counted(TableEngine):
            def close(self) -> None:
                loads.closed += 1

        return Counted(random_table(11, seed=0 if folder is None else int(folder.name)))
