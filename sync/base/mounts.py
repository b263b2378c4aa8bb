"""Which folders are on a file system of another machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mounts")
_NETWORK: Final = re.compile(
    r"nfs4?|lustre|cifs|smb\w*|beegfs\w*|gpfs|ceph|afs|9p|glusterfs|panfs|pvfs2|orangefs|wekafs|"
    r"fuse\.(?!fuse-overlayfs$).*"
)
"""Types of file systems that lie, or may lie, on another machine."""


def network_mount(folder: Path) -> str | None:
    """Type and place of the network file system that a folder, which may not exist yet, is on; None: none."""
    path = folder.resolve()
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()] if MOUNTS.exists() else []
    holds = [(Path(re.sub(r"\\040", " ", mount[1])), mount[2]) for mount in mounts]
    holding = [(at, kind) for at, kind in holds if path.is_relative_to(at)]
    at, kind = max(reversed(holding), key=lambda mount: len(mount[0].parts), default=(path, ""))
    return f"{kind} at {at}" if _NETWORK.fullmatch(kind) else None
