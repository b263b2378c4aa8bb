"""The checkpoints' folder as files: which there are, whether one is whole, and which go. No engine, no torch.

    checkpoints/L000-v00000012/checkpoint.json    version, ranks, model, size and BLAKE3 of every file
    checkpoints/latest                            name of the newest one

Newer is the later lineage, and of one lineage the later step: the order in which a run saves them, whatever
the clocks.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Final

from sync.wire import Version

log = logging.getLogger(__name__)
INDEX: Final = "checkpoint.json"


def latest(folder: Path) -> str:
    """What `latest` names; empty: there is none."""
    path = folder / "latest"
    return path.read_text(errors="replace").strip() if path.exists() else ""


def saved(folder: Path) -> list[Path]:
    """Folders of checkpoints, oldest first."""
    found = {}
    for path in folder.glob("L*-v*"):
        try:
            found[Version.parse(path.name)] = path
        except ValueError:  # not ours
            continue
    return [path for _, path in sorted(found.items())]


def index(path: Path) -> tuple[dict[str, str], str | None]:
    """Digests of a checkpoint's files by name, and what is wrong with index or sizes; None: nothing."""
    try:
        index = json.loads((path / INDEX).read_text())
        Version.parse(str(index["version"])), int(index["world_size"]), str(index["fingerprint"])
        digests = {}
        for name, entry in dict(index["files"]).items():
            file = path / name
            if not file.is_file() or file.stat().st_size != entry["size"]:
                return {}, f"{name} is missing or cut short"
            digests[name] = str(entry["blake3"])
    except (FileNotFoundError, NotADirectoryError):
        return {}, f"it has no {INDEX}"
    except (ValueError, KeyError, TypeError):  # no JSON or text at all, or other fields
        return {}, f"its {INDEX} is damaged"
    return digests, None


def retain(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and what `latest` names, and what broken saves left."""
    named = latest(folder)
    for path in [*saved(folder)[:-keep], *folder.glob(".partial-L*")]:
        if path.name != named:
            shutil.rmtree(path)
            log.info("removed checkpoint %s", path.name)
