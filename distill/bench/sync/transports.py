"""Seconds and bytes of publishing and staging: full, delta and LoRA over every store, by one rank."""

from __future__ import annotations

import logging
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from distill.bench.sync.models import LARGE, RUN, TOY, Kind, Versions, make, make_adapter
from distill.bench.sync.stores import STORES, Skipped
from sync.stores import Store
from sync.subscribe import Mirror

log = logging.getLogger(__name__)
COUNT: Final = {"toy": 7, "large": 3}
"""Versions of each kind; medians are taken."""


@dataclass(frozen=True)
class WeightTransport:
    """Medians over the versions of one kind through one store."""

    store: str
    kind: Kind
    bytes: float
    """Of a version."""
    read: float
    """Bytes that the mirror read for it."""
    publish_seconds: float
    stage_seconds: float
    """Reading, decoding, verifying, until it can be swapped in."""


def run(full: bool, folder: Path) -> dict[str, Any]:
    """Every road, and why a store was left out; `full`: 101 M parameters instead of the toy."""
    shape = LARGE if full else TOY
    model = make(shape, folder / f"model-{shape.name}")
    adapter = make_adapter(shape, model, folder / f"adapter-{shape.name}")
    transports: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name, opened in STORES.items():
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{name}-") as work:
            try:
                for part in ("weights", "adapters"):
                    own = Path(work) / part
                    shutil.copytree(adapter if part == "adapters" else model, own / "folder")
                    plan: list[Kind] = ["lora"] if part == "adapters" else ["full", "delta"]
                    with opened(own) as store:
                        transports += map(asdict, _measure(name, store, own, plan, COUNT[shape.name]))
            except Skipped as reason:
                skipped[name] = str(reason)
        log.info("%s: %s", name, skipped.get(name, "done"))
    return {"roads": transports, "skipped": skipped}


def _measure(name: str, store: Store, work: Path, plan: list[Kind], count: int) -> list[WeightTransport]:
    versions = Versions(work / "folder", store)
    found = []
    with Mirror(work / "mirror", store, RUN) as mirror:
        for kind in plan:
            taken = []
            for _ in range(count):
                report = versions.publish(kind)
                staged = mirror.stage(report.version)
                mirror.promote(staged)
                taken.append((report.bytes, staged.bytes_read, report.seconds, staged.seconds))
            found.append(
                WeightTransport(name, kind, *(median(column) for column in zip(*taken, strict=True)))
            )
    return found
