"""Write docs/configuration.md from the configuration classes: `python tests/support/reference.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from distill.config import RunConfig
from distill.config.loading import sections
from sync.settings import Settings

PAGE: Final = Path(__file__).parents[2] / "docs" / "configuration.md"
_HEAD: Final = """# Configuration

One TOML file describes a run; `configs/` holds files to start from. Unknown keys are refused with the nearest
known one, every value is checked before anything is started, and `--set section.key=value` on the command
line overrides the file. Relative paths start at the working directory. Secrets belong in the environment:
`DISTILL_TOKEN` (or a path in `DISTILL_TOKEN_FILE`), `HF_TOKEN`, `WANDB_API_KEY` and `TEACHER_API_KEY`, for
teachers behind an `engine_url` ([operations](operations.md#secrets)).

Options of DeepSpeed and vLLM that are not listed here go through `trainer.deepspeed`, `trainer.overrides` and
`student.engine_args` unchanged.

This page is written by `python tests/support/reference.py` from the classes that check the file.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, field in RunConfig.model_fields.items():
        parts += _section(name, field)
    return "\n".join(parts).rstrip() + "\n"


def summary(section: type[Settings]) -> str:
    """What a section is for: its docstring without the leading "[name]: "."""
    text = " ".join((section.__doc__ or "").split())
    said = text.split(": ", 1)[1] if text.startswith("[") and ": " in text else text
    return said[0].upper() + said[1:]


def _section(name: str, field: FieldInfo) -> list[str]:
    choices = sections(field.annotation)
    parts = [f"## [{name}]", ""]
    if name == "teachers":
        parts = ["## [teachers.NAME]", "", "One such section per teacher.", ""]
    if len(choices) > 1:
        left_out = "Required" if field.is_required() else f"Left out: {_default(field)}"
        parts += [f"One of {len(choices)} kinds, named by `type`. {left_out}.", ""]
    shown: set[type[Settings]] = set()
    for choice in choices:
        kind = choice.model_fields.get("type")
        if kind is not None and len(choices) > 1:
            parts += [f"### type = {_literal(kind)}", ""]
        parts += [summary(choice), "", *_table(choice, name, shown), ""]
    return parts


def _table(section: type[Settings], prefix: str, shown: set[type[Settings]]) -> list[str]:
    """Rows of `section`, then those of the sections inside it that are not `shown` yet."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    nested: list[str] = []
    for name, field in section.model_fields.items():
        if name == "type":
            continue
        inner = sections(field.annotation)
        place = f"{prefix}.{name}" + (".NAME" if inner and get_origin(field.annotation) is dict else "")
        kind = " or ".join(f"`[{place}]`" for _ in inner[:1]) or f"`{_type(field.annotation)}`"
        rows.append(f"| `{name}` | {kind} | {_default(field)} | {_cell(field.description or '')} |")
        for choice in inner:
            if choice in shown:
                continue
            shown.add(choice)
            tag = choice.model_fields.get("type")
            suffix = f", type = {_literal(tag)}" if tag is not None else ""
            table = _table(choice, place, shown)
            nested += ["", f"### [{place}]{suffix}", "", summary(choice), "", *table]
    return rows + nested


def _type(annotation: Any) -> str:
    parts = [part for part in get_args(annotation) if part is not type(None)]
    match get_origin(annotation):
        case None:
            name: str = annotation.__name__
            return {"str": "string", "Path": "path", "bool": "true / false"}.get(name, name)
        case origin if origin is Literal:
            return " / ".join(map(json.dumps, parts))
        case origin if origin is dict:
            return "table"
        case origin if origin in (list, tuple):
            return f"list of {_type(parts[0])}"
        case origin if origin is Annotated:
            return _type(parts[0])
        case _:
            return " or ".join(map(_type, parts))


def _literal(field: FieldInfo) -> str:
    return f'"{get_args(field.annotation)[0]}"'


def _default(field: FieldInfo) -> str:
    match field.default:
        case default if default is PydanticUndefined:
            return "required"
        case None:
            return "none"
        case Settings() as default:
            kind = getattr(default, "type", None)
            return f'type = "{kind}"' if kind else "its defaults"
        case default:
            return f"`{json.dumps(default, default=str)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
