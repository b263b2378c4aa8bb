"""Keeping secrets out of files and trackers."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

SECRET_NAME = re.compile(r"token$|key$|secret|password|credential", re.IGNORECASE)
HIDDEN = "(hidden)"
FREE_FORM = ("env", "options")
"""Tables whose keys are the user's, so that any of them may name a secret."""


def without_secrets(value: Any, tables: Collection[str] = FREE_FORM, inside: bool = False) -> Any:
    """A JSON-like value in which every secret-looking entry of the free-form `tables` is hidden."""
    if isinstance(value, dict):
        return {
            name: HIDDEN
            if inside and SECRET_NAME.search(name)
            else without_secrets(item, tables, inside=name in tables)
            for name, item in value.items()
        }
    return [without_secrets(item, tables) for item in value] if isinstance(value, list) else value
