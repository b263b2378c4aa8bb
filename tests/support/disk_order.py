"""What is forced to disk and what is renamed, in order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


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
