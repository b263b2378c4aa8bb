"""All parts of `distill bench sync`, one after the other; what is finished is kept in the folder.

    codec      bytes and speed of every format on a real trajectory          toy, large
    roads      publish and stage over every store                            toy, large
    swaps      pause, apply and lost engine time of a real replica           toy, large
    whole_run  what all of it costs a run that trains                        toy

`large` has 101 M parameters and comes with `full`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from distill.bench.sync import codec, replica, whole_run
from distill.bench.sync import transports as transports
from distill.bench.sync.picture import draw
from distill.bench.sync.report import table
from sync.durable import write_json
from sync.errors import ConfigError

__all__ = ["PARTS", "run", "table"]

log = logging.getLogger(__name__)
SIZES: Final = ("toy", "large")
PARTS: Final[dict[str, Callable[[bool, Path], dict[str, Any]]]] = {
    "codec": lambda full, _: codec.run(full),
    "roads": transports.run,
    "swaps": replica.run,
    "whole_run": lambda _, folder: whole_run.run(folder),
}


def run(
    folder: Path = Path("runs/bench-sync"), *, full: bool = False, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Size → part → figures, of what is missing in `folder` and what was kept; draws sync.png there.

    `only`: names of parts; empty: all. Raises ConfigError for another name, DistillError when an engine
    fails.
    """
    unknown = set(only) - set(PARTS)
    if unknown:
        raise ConfigError(f"--only names {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    for size in SIZES if full else SIZES[:1]:
        figures[size] = {
            name: _kept(folder, size, name)
            for name in PARTS
            if (not only or name in only) and (size, name) != ("large", "whole_run")
        }
    draw(figures, folder / "sync.png")
    return figures


def _kept(folder: Path, size: str, name: str) -> dict[str, Any]:
    path = folder / f"{name}-{size}.json"
    if not path.is_file():
        log.info("measuring %s of %s", name, size)
        write_json(path, PARTS[name](size == "large", folder))
    return json.loads(path.read_text())
