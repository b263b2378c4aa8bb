"""Whether a completion sorts its prompt's letters from both ends, as `distill.tasks.sort_letters` has it."""

from __future__ import annotations


def passes(doc: dict[str, str], results: list[str]) -> dict[str, float]:
    """Figures of one prompt, `kdzmb>`, and its completion without the token that ends it, `bzdmk`."""
    left = sorted(doc["prompt"].removesuffix(">"))
    for letter in results[0]:
        if not left or letter not in (left[0], left[-1]):
            return {"pass_rate": 0.0}
        left.remove(letter)
    return {"pass_rate": float(not left)}
