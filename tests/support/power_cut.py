"""What a power cut leaves of a file whose beginning was forced to disk."""

from __future__ import annotations

import random

PAGE = 4096


def power_cut(data: bytes, durable: int, rng: random.Random) -> bytes:
    """`data` whose bytes from `durable` on are kept, blanked or gone, page by page, and its size anything."""
    size = rng.randint(durable, len(data)) if rng.random() < 0.5 else len(data)
    left = bytearray(data[:size])
    for page in range(durable // PAGE, -(-size // PAGE)):
        begin, end = max(durable, page * PAGE), min(size, (page + 1) * PAGE)
        if rng.random() < 0.4:
            left[begin:end] = bytes(end - begin)
    return bytes(left)
