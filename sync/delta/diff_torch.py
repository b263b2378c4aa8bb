"""`sync.delta.codec.Scanner` answered by torch operations on the device where a shard lies.

Same bytes as the compiled loops give: whole streams are compared in the tests. Tensors hold bits as integers
of their width (int16, int32, …). Work goes CHUNK elements at a time, so that it needs little device memory;
what comes to the host are the streams alone. Letters: c changed elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sync.delta.kernels import ESCAPE

CHUNK: Final = 1 << 24
"""Elements looked at together: whole blocks of the entropy coder, whole bytes of a bitmap."""
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def same(old: Tensor, new: Tensor) -> bool:
    """See `codec.Scanner`."""
    return torch.equal(old, new)


def gaps(old: Tensor, new: Tensor, room: int) -> list[np.ndarray] | None:
    """See `codec.Scanner`."""
    total = sum(int((a != b).sum()) for _, a, b in _chunks(old, new))
    if total > room:
        return None
    places, codes = [], []
    for start, a, b in _chunks(old, new):
        at_c = torch.nonzero(a != b).flatten()
        places.append(at_c + start)
        codes.append(_zigzag(a[at_c], b[at_c]))
    at_c, code_c = torch.cat(places), torch.cat(codes)
    if _overflows(at_c, old, room):
        return None
    distance_c = torch.diff(at_c, prepend=at_c.new_tensor([-1])) - 1
    return [*_escaped(distance_c, 8), *_escaped(code_c - 1, new.itemsize)]


def bitmap(old: Tensor, new: Tensor) -> list[np.ndarray]:
    """See `codec.Scanner`."""
    weight = torch.tensor([1 << bit for bit in range(8)], device=new.device)
    bits, steps, wide = [], [], []
    for _, a, b in _chunks(old, new):
        differ = a != b
        padded = torch.nn.functional.pad(differ, (0, -len(differ) % 8))
        bits.append((padded.view(-1, 8) * weight).sum(1).to(torch.uint8).cpu().numpy())
        narrow_c, wide_c = _escaped(_zigzag(a[differ], b[differ]) - 1, new.itemsize)
        steps.append(narrow_c)
        wide.append(wide_c)
    return [np.concatenate(parts) for parts in (bits, steps, wide)]


def planes(old: Tensor, new: Tensor) -> list[np.ndarray]:
    """See `codec.Scanner`."""
    out = np.empty((new.itemsize, len(new)), np.uint8)
    for start, a, b in _chunks(old, new):
        code = _zigzag(a, b)
        for byte in range(new.itemsize):
            out[byte, start : start + len(a)] = (code >> 8 * byte & 255).to(torch.uint8).cpu().numpy()
    return list(out)


def classes(old: Tensor, new: Tensor, mantissa: int) -> np.ndarray | None:
    """See `codec.Scanner`. The device orders the changes by exponent, the host codes them."""
    from sync.delta import entropy

    listed = [_by_exponent(a, b, mantissa, entropy.BLOCK) for _, a, b in _chunks(old, new)]
    counts, distances, codes = (np.concatenate(parts) for parts in zip(*listed, strict=True))
    out = np.empty(new.nbytes + 512, np.uint8)
    length = entropy.encode_listed(counts, distances, codes, *entropy.fresh(), out)
    return None if length < 0 else out[:length]


def host(bits: Tensor) -> np.ndarray:
    """See `codec.Scanner`."""
    return bits.cpu().numpy().view(_UNSIGNED[bits.itemsize])


def _chunks(old: Tensor, new: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first element, old, new) of each chunk; one of length 0 for empty tensors."""
    for start in range(0, max(1, len(new)), CHUNK):
        yield start, old[start : start + CHUNK], new[start : start + CHUNK]


def _zigzag(old: Tensor, new: Tensor) -> Tensor:
    """`kernels.zigzag` of every element, int64."""
    width = 8 * new.itemsize
    top, mask = 1 << (width - 1), (1 << width) - 1
    step = ((_ordered(new, top, mask) - _ordered(old, top, mask) + top) & mask) - top
    return (step << 1) ^ (step >> 63)


def _ordered(bits: Tensor, top: int, mask: int) -> Tensor:
    wide = bits.long() & mask
    return torch.where(wide & top != 0, ~wide & mask, wide | top)


def _escaped(value_c: Tensor, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(a byte each, ESCAPE for the values that do not fit; those values in `width` bytes)"""
    narrow_c = value_c.clamp(max=ESCAPE).to(torch.uint8)
    wide = value_c[value_c >= ESCAPE]
    return narrow_c.cpu().numpy(), wide.cpu().numpy().astype(_UNSIGNED[width])


def _overflows(at_c: Tensor, old: Tensor, room: int) -> bool:
    """Whether the compiled loop runs out of `room`: it asks before each word of 64 bits that has a change,
    and element by element after the last whole word."""
    lanes = 8 // old.itemsize
    in_words = int((at_c < len(old) // lanes * lanes).sum())
    if in_words < len(at_c) and len(at_c) - 1 >= room:
        return True
    if in_words == 0:
        return False
    last_word = int(at_c[in_words - 1]) // lanes
    return int((at_c < last_word * lanes).sum()) > room - lanes


def _by_exponent(
    old: Tensor, new: Tensor, mantissa: int, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Changes by block, then exponent, then position: counts [blocks, exponents] and, of each change, its
    distance from the last one of its block and exponent, counted within those, and its difference."""
    blocks, exponents = -(-len(old) // block), 256
    exponent = (old.long() & ((1 << 8 * old.itemsize) - 1)) >> mantissa & (exponents - 1)
    group = torch.arange(len(old), device=old.device) // block * exponents + exponent
    order = torch.sort(group, stable=True).indices
    members = torch.bincount(group, minlength=blocks * exponents)
    place_c = torch.nonzero((old != new)[order]).flatten()
    at_c = order[place_c]
    group_c = group[at_c]
    seen_c = place_c - (members.cumsum(0) - members)[group_c]
    before_c = torch.full_like(seen_c, -1)
    follows = group_c[1:] == group_c[:-1]
    before_c[1:][follows] = seen_c[:-1][follows]
    counts = torch.bincount(group_c, minlength=blocks * exponents).view(blocks, exponents)
    code_c = _zigzag(old[at_c], new[at_c])
    return (
        counts.cpu().numpy(),
        (seen_c - before_c - 1).cpu().numpy().astype(np.uint32),
        code_c.cpu().numpy().astype(np.uint32),
    )
