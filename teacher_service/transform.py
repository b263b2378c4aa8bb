"""Functions named in a configuration, and a teacher that sees another prompt than the student did."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from sync.errors import ConfigError, DataError
from sync.wire import ScoreSequence, pack, unpack
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


def with_prompt(sequence: ScoreSequence, prompt_ids: Sequence[int]) -> ScoreSequence:
    """`sequence` with another prompt before the same completion; marks keep their positions.

    Raises DataError for an empty prompt: the first completion token needs a token before it.
    """
    if not len(prompt_ids):
        raise DataError(f"the teacher's prompt of {sequence.id!r} is empty: give at least one token")
    completion = unpack(sequence.token_ids)[sequence.start :]
    token_ids = np.concatenate([np.asarray(prompt_ids, np.int32), completion])
    return msgspec.structs.replace(sequence, token_ids=pack(token_ids, "i4"), start=len(prompt_ids))
