"""The pages of the site that are written from the code: `python tests/support/reference.py FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import typer.main
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from distill.cli.main import app
from distill.config import RunConfig
from distill.config.loading import sections
from distill.metrics.names import FIGURES
from distill.record.audit import VIOLATIONS
from sync.base.settings import Settings

_HEAD: Final = """# Configuration

One TOML file describes a run; `configs/` holds files to start from. Unknown keys are refused with the nearest
known one, every value is checked before anything is started, and `--set section.key=value` on the command
line overrides the file. Relative paths start at the working directory. Secrets belong in the environment:
`DISTILL_TOKEN` (or a path in `DISTILL_TOKEN_FILE`), `HF_TOKEN`, `WANDB_API_KEY` and `TEACHER_API_KEY`, for
teachers behind an `engine_url` ([secrets](clusters.md#secrets)).

Options of DeepSpeed and vLLM that are not listed here go through `trainer.deepspeed`, `trainer.overrides` and
`student.engine_args` unchanged.
"""
_COMMANDS: Final = """# Commands

`distill COMMAND --help` prints the same. Exit status: 0 done; 1 failed, or a guarantee was broken; 2 a
setting or data that cannot be used; 130 stopped.
"""
_FIGURES: Final = """# Figures and violations

One name for each figure, in `metrics.jsonl`, Weights & Biases, TensorBoard and `summary.json`; for
`/metrics` see [Prometheus](clusters.md#prometheus). Words in capitals stand for names. `step` and `time`
(seconds since the epoch) are the axes of `metrics.jsonl`, where every line has the trainer's `lineage`: a
step that a resume or a rollback did again stands there once for each, and once, the newest, in reports,
plans and `load_run`; a step whose trainer died between its checkpoint and its report counts as trained and
has no line. Counts, tokens and seconds without "of the step" or "now" are sums over all starts of the run;
bytes and seconds of `sync/` are medians over the newest versions and updates, except for those of the newest.
"""


def figures() -> str:
    """What a run measures, and what `distill audit` may find."""
    rows = [f"| `{figure.name}` | {figure.unit} | {figure.meaning} |" for figure in FIGURES]
    found = [f"| `{name}` | {meaning} |" for name, meaning in VIOLATIONS.items()]
    parts = [_FIGURES, "| name | unit | meaning |", "| --- | --- | --- |", *rows, "", "## Violations", ""]
    return "\n".join([*parts, "| violation | entries |", "| --- | --- |", *found, ""])


def configuration() -> str:
    """Every key of a configuration."""
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
    if get_origin(field.annotation) is dict:
        parts = [f"## [{name}.NAME]", "", f"One such section per {name.removesuffix('s')}.", ""]
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


def commands() -> str:
    """Every command with its options."""
    parts = [_COMMANDS]
    for name, command in every_command(typer.main.get_command(app), "distill"):
        context = command.make_context(name, [], resilient_parsing=True)
        text, _, example = (command.help or "").partition("Example: ")
        parts += [f"## {name}", "", " ".join(text.split()), ""]
        parts += [f"    {' '.join(example.split())}", ""] if example else []
        parts += ["| argument, option | meaning |", "| --- | --- |"]
        rows = filter(None, (parameter.get_help_record(context) for parameter in command.params))
        parts += [*(f"| `{_cell(given)}` | {_cell(meaning)} |" for given, meaning in rows), ""]
    return "\n".join(parts).rstrip() + "\n"


def every_command(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(name, click command) of every command below `command`, itself when it is no group."""
    group = getattr(command, "commands", None)
    if group is None:
        yield name, command
    for word, inner in (group or {}).items():
        yield from every_command(inner, f"{name} {word}")


def parsed(words: list[str]) -> dict[str, Any]:
    """The arguments of a command line, "distill" first. Raises click's UsageError for one that is wrong."""
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    arguments: dict[str, Any] = command.make_context(command.name, rest).params
    return arguments


PAGES: Final = {"configuration.md": configuration, "commands.md": commands, "figures.md": figures}

if __name__ == "__main__":
    for name, written in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(written())
