"""Memory of this machine: what a process may still take, and how a role's allocator keeps it."""

from __future__ import annotations

import ctypes
import os
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil

CGROUP = Path("/sys/fs/cgroup")
PLENTY: Final = 4
"""Freed memory is kept while one part in so many of the machine's is left."""
ALLOCATOR: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}
"""glibc gives large blocks back to the kernel as they are freed, and the kernel zeroes every page when one is
taken again: with temporaries of a vocabulary's size, nearly half of a step. With the first two it keeps them,
and since they are of all sizes, more of them with every step: `give_back` bounds that.
oneDNN keeps the code of 1,024 products, a megabyte or more for each shape: where rows vary in length every
batch has new ones, and a process grows by gigabytes for code that it never runs again."""


def allocator() -> dict[str, str]:
    """The variables of ALLOCATOR for a role; empty on GPUs, whose temporaries are not the host's. This
    process's own values of them win."""
    if not metadata.version("torch").endswith("+cpu"):
        return {}
    return {name: os.environ.get(name, value) for name, value in ALLOCATOR.items()}


def give_back() -> None:
    """Give what glibc's heap keeps of freed memory back to the kernel, where the machine runs short of it.

    For a process of ALLOCATOR between two pieces of its work, of which the next takes the pages again.
    Elsewhere, and without glibc, it does nothing.
    """
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    keeps = trim and os.environ.get("MALLOC_MMAP_MAX_") == "0"
    if keeps and available_memory() < psutil.virtual_memory().total / PLENTY:
        trim(0)


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that the machine, and the container this process is in, have left."""
    left = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:  # the root of all groups, or version 1
        return left
    return left if limit == "max" else max(0, min(left, int(limit) - int(used)))
