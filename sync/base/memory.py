"""How much memory of this machine a process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that the machine, and the container this process is in, have left."""
    left = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:  # the root of all groups, or version 1
        return left
    return left if limit == "max" else max(0, min(left, int(limit) - int(used)))
