"""What a role takes of a machine that it shares with others: threads, and memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil

THREADS: Final = "OMP_NUM_THREADS"
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


def threads_in(environment: Mapping[str, str]) -> int | None:
    """The threads that variables set, of a list the first level's; None: they set none."""
    number = environment.get(THREADS, "").partition(",")[0].strip()
    return int(number) or None if number.isdigit() else None


def sharing(threads: int | None) -> dict[str, str]:
    """The variables of a role: `threads` that compute, which wait without spinning (None: as many as its
    library takes), and, unless on GPUs, ALLOCATOR. Of all but the number this process's own values win."""
    variables = {"OMP_WAIT_POLICY": "PASSIVE"}
    if metadata.version("torch").endswith("+cpu"):  # temporaries of GPUs are not the host's
        variables |= ALLOCATOR
    ours = {} if threads is None else {THREADS: str(threads)}
    return {name: os.environ.get(name, value) for name, value in variables.items()} | ours


def give_back() -> None:
    """Give what glibc's heap keeps of freed memory back to the kernel, where the machine runs short of it.

    For a process of ALLOCATOR between two pieces of its work, of which the next takes the pages again.
    Elsewhere, and without glibc, it does nothing.
    """
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim and os.environ.get("MALLOC_MMAP_MAX_") == "0":
        left, total = memory()
        if left < total / PLENTY:
            trim(0)


def memory(cgroup: Path = CGROUP) -> tuple[int, int]:
    """(bytes left, bytes in all) of the machine, or of the container this process is in, the less of both."""
    machine = psutil.virtual_memory()
    left, total = int(machine.available), int(machine.total)
    try:
        limit, used, stat = ((cgroup / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
    except OSError:  # the root of all groups, or version 1
        return left, total
    if limit.strip() == "max":
        return left, total
    figures = dict(line.split() for line in stat.splitlines())
    used_for_good = int(used) - int(figures["inactive_file"])  # the kernel takes cached files back
    return max(0, min(left, int(limit) - used_for_good)), min(total, int(limit))
