"""Which rows share a micro-batch, and which rank computes it; from the rows' lengths alone.

    end_to_end    rows lie one after the other: micro-batches of about as many tokens, about as few as can be
    rectangles    rows are padded to the longest: neighbours in length share, as many as fit

Ranks run in lockstep under ZeRO-3: micro-batches that they compute at the same time should cost the same.
Rows of unlike kinds never share one. Both functions return each rank's micro-batches, as places in `lengths`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import groupby
from typing import Any

Split = list[list[list[int]]]
"""Of each rank, its micro-batches; a rank may have fewer than another."""


def end_to_end(lengths: Sequence[int], kinds: Sequence[Any], ranks: int, tokens: int) -> Split:
    """Micro-batches of at most `tokens`, a longer row alone; as many for every rank while there are rows.

    Those of equal attention, Σ length², are computed at the same time, the most expensive first.
    """
    groups: dict[Any, list[int]] = {}
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        groups.setdefault(kinds[place], []).append(place)
    sizes = {kind: [lengths[place] for place in places] for kind, places in groups.items()}
    counts = {kind: _fewest(size, tokens) for kind, size in sizes.items()}
    while sum(counts.values()) % ranks:
        divisible = [kind for kind in counts if counts[kind] < len(sizes[kind])]
        if not divisible:
            break
        counts[max(divisible, key=lambda kind: sum(sizes[kind]) / counts[kind])] += 1
    micro: list[list[int]] = []
    for kind, places in groups.items():
        parts = _spread(sizes[kind], counts[kind], tokens)
        assert parts is not None, "more micro-batches than needed are enough"
        micro += [[places[index] for index in part] for part in parts]
    micro.sort(key=lambda part: -sum(lengths[place] ** 2 for place in part))
    return [micro[rank::ranks] for rank in range(ranks)]


def _fewest(sizes: Sequence[int], tokens: int) -> int:
    """The fewest micro-batches that `_spread` fills. With more it succeeds too, so bisection finds them."""
    no_pair = sum(2 * size > tokens for size in sizes)
    low = max(1, no_pair, -(-sum(min(size, tokens) for size in sizes) // tokens))
    return low + bisect_left(
        range(low, len(sizes)), True, key=lambda n: _spread(sizes, n, tokens) is not None
    )


def _spread(sizes: Sequence[int], count: int, tokens: int) -> list[list[int]] | None:
    """Indices of `sizes`, longest first, each put where the fewest tokens are; None: they do not fit."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    heapify(loads)
    for index, size in enumerate(sizes):
        load, number = loads[0]
        if load and load + size > tokens:
            return None
        parts[number].append(index)
        heapreplace(loads, (load + size, number))
    return parts


def rectangles(lengths: Sequence[int], kinds: Sequence[Any], ranks: int, tokens: int) -> Split:
    """Micro-batches of at most `tokens`, rows × longest, a longer row alone.

    Rows go to ranks by length, longest first, to and fro (0 1 2 2 1 0 …): every rank gets the same lengths.
    """
    ordered = sorted(range(len(lengths)), key=lambda place: (kinds[place], -lengths[place]))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, row in enumerate(ordered):
        lap, rank = divmod(place, ranks)
        shares[rank if lap % 2 == 0 else ranks - 1 - rank].append(row)
    return [_neighbours(share, lengths, kinds, tokens) for share in shares]


def _neighbours(
    share: Sequence[int], lengths: Sequence[int], kinds: Sequence[Any], tokens: int
) -> list[list[int]]:
    micro: list[list[int]] = []
    for _, same in groupby(share, key=lambda place: kinds[place]):
        room = 0
        for place in same:
            if room < 1:
                micro.append([])
                room = max(1, tokens // lengths[place])
            micro[-1].append(place)
            room -= 1
    return micro
