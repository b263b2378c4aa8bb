"""A small file system in memory that can be filled and freed: the disk of a run that is to have no room."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from sync.errors import ConfigError

BALLAST = ".ballast"


def mount(folder: Path, kibibytes: int) -> None:
    """Put an empty file system of that size at `folder`. Raises ConfigError where none may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    line = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"a disk to fill needs the command mount: {error}") from None
    if done.returncode != 0:
        raise ConfigError(f"a disk to fill cannot be mounted, which takes root: {done.stderr.strip()}")


def unmount(folder: Path) -> None:
    """Take it away with all that is on it, once nobody has a file of it open."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def keep(folder: Path) -> None:
    """Take it away, and leave what is on it in its place."""
    copy = folder.with_name(f".{folder.name}.copy")
    shutil.copytree(folder, copy, symlinks=True)
    unmount(folder)
    folder.rmdir()
    copy.rename(folder)


def fill(folder: Path) -> None:
    """Take all the room there is."""
    with (folder / BALLAST).open("wb", buffering=0) as file:
        for block in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(block)):
                    pass
            except OSError:
                continue


def free(folder: Path) -> None:
    """Give it back."""
    os.unlink(folder / BALLAST)
