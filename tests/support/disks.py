"""Small disks that can be filled, what is written to a disk in which order, and what a power cut leaves.

A small disk is a file system in memory.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sync.base.errors import ConfigError

BALLAST = ".ballast"
PAGE = 4096


def mount(folder: Path, kibibytes: int) -> None:
    """Put an empty tmpfs of that size at `folder`. Raises ConfigError where none may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    line = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"a disk to fill needs the command mount: {error}") from None
    if done.returncode != 0:
        raise ConfigError(f"a disk to fill cannot be mounted, which takes root: {done.stderr.strip()}")


def unmount(folder: Path) -> None:
    """Remove it with its files, once no process has one of them open."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def keep(folder: Path) -> None:
    """Remove it, and leave its files in its place."""
    copy = folder.with_name(f".{folder.name}.copy")
    shutil.copytree(folder, copy, symlinks=True)
    unmount(folder)
    folder.rmdir()
    copy.rename(folder)


def fill(folder: Path) -> None:
    """Take all the space there is."""
    with (folder / BALLAST).open("wb", buffering=0) as file:
        for block in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(block)):
                    pass


def free(folder: Path) -> None:
    """Give it back."""
    os.unlink(folder / BALLAST)


@contextlib.contextmanager
def mounted(folder: Path, kibibytes: int) -> Iterator[Path]:
    """A disk of that size at `folder`; where none may be mounted, the test is skipped."""
    try:
        mount(folder, kibibytes)
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        yield folder
    finally:
        unmount(folder)


def noted(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines "force PATH" and "rename PATH" below `root`, from now on."""
    order: list[str] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(what: Any, *more: Any) -> Any:
            path = what if isinstance(what, Path) else Path(os.readlink(f"/proc/self/fd/{what}"))
            order.append(f"{name} {path.relative_to(root)}")
            return real(what, *more)

        return call

    monkeypatch.setattr(os, "fsync", noting("force", os.fsync))
    monkeypatch.setattr(Path, "rename", noting("rename", Path.rename))
    return order


def power_cut(data: bytes, durable: int, rng: random.Random) -> bytes:
    """`data` whose bytes from `durable` on are kept, blanked or gone, page by page, and its size anything."""
    size = rng.randint(durable, len(data)) if rng.random() < 0.5 else len(data)
    left = bytearray(data[:size])
    for page in range(durable // PAGE, -(-size // PAGE)):
        begin, end = max(durable, page * PAGE), min(size, (page + 1) * PAGE)
        if rng.random() < 0.4:
            left[begin:end] = bytes(end - begin)
    return bytes(left)
