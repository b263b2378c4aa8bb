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


def within(annotation: Any, key: str) -> tuple[FieldInfo | None, Any]:
    """The field `key` of the sections that an annotation admits, and the annotation of what stands there.

    None and None where there is no such key; in a table of sections every name is one, and no field.
    """
    if get_origin(annotation) is dict:  # such as teachers, by name
        return None, get_args(annotation)[1]
    field = next((kind.model_fields[key] for kind in sections(annotation) if key in kind.model_fields), None)
    return field, field.annotation if field else None


def law_of(field: FieldInfo) -> Law | None:
    """The law in a field's annotation."""
    return next((item for item in field.metadata if isinstance(item, Law)), None)


def decide(kind: type[Settings], path: Sequence[str]) -> str:
    """What a resume does with a change of the key at `path` below `kind`, in words.

    The innermost law decides, except below LIVE.
    """
    here: Any = kind
    law, reason = FIXED, "the run's records depend on it"
    for part in path:
        field, here = within(here, part)
        if field is not None:
            law = law_of(field) or law
            reason = next((str(item) for item in field.metadata if isinstance(item, Reason)), reason)
            if law == LIVE:
                break
    return f"refused: {reason}" if law == FIXED else law.words
