"""Functions that a configuration names, such as what a teacher sees instead of the student's prompt."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any

from sync.errors import ConfigError, DataError
from teacher_service.config import TeacherConfig


def load_function(name: str, field: str, others: Sequence[str] = ()) -> Callable[..., Any]:
    """The function that "module:function" names.

    Raises ConfigError that names `field` when there is none; `others`: what else may stand in the field.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
        if not callable(function):
            raise TypeError(f"{attribute} is a {type(function).__name__} and cannot be called")
    except Exception as error:  # importing runs the user's own code
        either = f"{', '.join(others)}, or " if others else ""
        raise ConfigError(
            f"{field} = {name!r} cannot be loaded ({type(error).__name__}: {error}): say {either}"
            '"package.module:function" of a module that can be imported here'
        ) from error
    return function


@contextmanager
def own_code(name: str, about: str, remedy: str) -> Iterator[None]:
    """Around a call of the user's own code: DataError with function, input and exception when it raises."""
    try:
        yield
    except Exception as error:
        raise DataError(f"{name} raised {type(error).__name__} ({error}) for {about}: {remedy}") from error


def load_transforms(teachers: Mapping[str, TeacherConfig]) -> dict[str, Callable[..., Sequence[int]]]:
    """Teacher's name → its prompt transform, for those that have one. Raises ConfigError.

    A transform raises DataError for a prompt that the user's function gives no token ids for.
    """
    return {
        name: _transform(teacher.prompt_transform, f"teachers.{name}.prompt_transform")
        for name, teacher in teachers.items()
        if teacher.prompt_transform is not None
    }


def _transform(name: str, field: str) -> Callable[..., Sequence[int]]:
    function = load_function(name, field)

    def transform(prompt: Any) -> Sequence[int]:
        with own_code(f"{field} {name!r}", f"prompt {prompt.id}", "return the token ids that it is to see"):
            return [index(token) for token in function(prompt)]

    return transform
