"""What a key of a configuration may do after a run has begun: the law that stands in its annotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from sync.base.settings import FIXED, LIVE, Law, Reason, Settings


def sections(annotation: Any) -> list[type[Settings]]:
    """The sections that an annotation admits: several for a union, none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


def _law(field: FieldInfo) -> Law | None:
    return next((item for item in field.metadata if isinstance(item, Law)), None)


def check_laws(kind: type[Settings], place: str = "") -> None:
    """Raise TypeError for a key below `kind` for which neither it nor a section around it has a law."""
    for name, field in kind.model_fields.items():
        if _law(field) in (LIVE, FIXED):
            continue
        inner = sections(field.annotation)
        if not inner and _law(field) is None:
            raise TypeError(f"{place}{name} has no law: write Live[…], Content[…] or Fixed[…] round its type")
        for section in inner:
            check_laws(section, f"{place}{name}.")


def decide(kind: type[Settings], path: Sequence[str]) -> str:
    """What a resume does with a change of the key at `path` below `kind`, in words.

    The innermost law decides, except below LIVE.
    """
    here, named, law, reason = [kind], False, FIXED, "the run's records depend on it"
    for part in path:
        if named:  # such as a teacher's name
            named = False
            continue
        field = next((section.model_fields[part] for section in here if part in section.model_fields), None)
        if field is None:
            break
        law = _law(field) or law
        reason = next((str(item) for item in field.metadata if isinstance(item, Reason)), reason)
        if law == LIVE:
            break
        here, named = sections(field.annotation), get_origin(field.annotation) is dict
    return f"refused: {reason}" if law == FIXED else law.words
