"""Fresh copies of modules from their sources, one of them with a piece of its text changed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

Mutant = tuple[str, str, str]
"""Module, text that is in it once, text that replaces it."""


@contextmanager
def fresh(
    package: str,
    order: Sequence[str],
    mutant: Mutant | None = None,
    stand_ins: Mapping[str, ModuleType] | None = None,
) -> Iterator[dict[str, ModuleType]]:
    """The modules `order` (below `package`, what is imported first comes first), executed anew from source.

    Inside of the block imports find the fresh modules, and `stand_ins` by their full names, also in functions
    that import when they are called; after it they find the imported ones, which were never touched.
    """
    root = Path(str(importlib.import_module(package).__file__)).parent
    names = {short: f"{package}.{short}" for short in order}
    instead = [*names.values(), *(stand_ins or {})]
    saved = {full: sys.modules.pop(full) for full in instead if full in sys.modules}
    parents = {full: importlib.import_module(full.rpartition(".")[0]) for full in names.values()}
    attributes = {full: vars(parents[full]).get(full.rpartition(".")[2]) for full in names.values()}
    made: dict[str, ModuleType] = {}
    try:
        sys.modules.update(stand_ins or {})
        for short, full in names.items():
            text = (root / (short.replace(".", "/") + ".py")).read_text()
            if mutant is not None and mutant[0] == short:
                assert text.count(mutant[1]) == 1, f"{mutant[1]!r} is not once in {short}"
                text = text.replace(mutant[1], mutant[2])
            made[short] = sys.modules[full] = ModuleType(full)
            setattr(parents[full], full.rpartition(".")[2], made[short])
            exec(compile(text, f"{short}.py", "exec"), made[short].__dict__)
        yield made
    finally:
        for full in instead:
            sys.modules.pop(full, None)
        sys.modules |= saved
        for full, attribute in attributes.items():
            if attribute is None:
                delattr(parents[full], full.rpartition(".")[2])
            else:
                setattr(parents[full], full.rpartition(".")[2], attribute)


def fails(check: Callable[[Any], None], library: Any, *wrong: type[Exception]) -> bool:
    """Whether the check notices: it does not hold, or what it calls raises one of `wrong`."""
    try:
        check(library)
    except (AssertionError, *wrong):
        return True
    return False


def name(mutant: Mutant) -> str:
    """For pytest's ids."""
    return f"{mutant[0]}: {mutant[1][:30]} -> {mutant[2][:30]}"
