"""Keeping secrets out of files and trackers."""

from __future__ import annotations

import re
from typing import Any

SECRET_NAME = re.compile(r"token$|key$|secret|password|credential", re.IGNORECASE)
HIDDEN = "(hidden)"
FREE_FORM = ("env", "options")
"""Tables whose keys are the user's, so that any of them may name a secret."""


def without_secrets(value: Any, free_form: bool = False) -> Any:
    """A JSON-like value in which every secret-looking entry of a free-form table is hidden."""
    if isinstance(value, dict):
        return {
            name: HIDDEN
            if free_form and SECRET_NAME.search(name)
            else without_secrets(item, free_form=name in FREE_FORM)
            for name, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value
