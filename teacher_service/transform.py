"""Functions that a configuration names, such as what a teacher sees instead of the student's prompt."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sync.errors import ConfigError
from teacher_service.config import TeacherConfig


def load_function(name: str, field: str) -> Callable[..., Any]:
    """The function that "module:function" names. Raises ConfigError that names `field` when there is none."""
    module_name, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{field} = {name!r} cannot be loaded ({error}): write it as module:function"
        ) from error
    if not callable(function):
        raise ConfigError(f"{field} = {name!r} is a {type(function).__name__}: name a function")
    return function


def load_transforms(teachers: Mapping[str, TeacherConfig]) -> dict[str, Callable[..., Sequence[int]]]:
    """Teacher's name → its prompt transform, for those that have one. Raises ConfigError."""
    return {
        name: load_function(teacher.prompt_transform, f"teachers.{name}.prompt_transform")
        for name, teacher in teachers.items()
        if teacher.prompt_transform is not None
    }
