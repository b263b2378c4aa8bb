"""Read a TOML file and `--set` overrides into a RunConfig; one message for all that must change."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from distill.config import RunConfig
from distill.config.laws import sections, within
from sync.base import secrets
from sync.base.errors import ConfigError
from sync.base.formats import check_format
from sync.base.own_code import OWN, typed
from sync.base.settings import Holds, Settings

log = logging.getLogger(__name__)
PUT_BACK: Final = "the file was altered: put it back, or start a new run under another run.name"

CONFIG_FORMAT: Final = 1  # of config.json in a run's folder; the key "format" has it


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a TOML file, or of a run's folder, with overrides such as "run.steps=10" over it.

    An override that gives a section another `type` drops the keys which only the old type knows, and logs
    them. `evaluation = false` and `teachers = false` leave these out. Relative paths are taken from the
    working directory and come back absolute, with `~` and variables of the environment filled in;
    `run.code_folder` is the file's folder unless it is set. Raises ConfigError.
    """
    return located(read(path, overrides), path)


def with_settings(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A configuration with overrides such as `load` takes. Raises ConfigError."""
    raw: dict[str, Any] = config.model_dump()
    for override in overrides:
        raw = merge(raw, parse_override(override))
    return validate(raw, "a configuration")


def located(raw: Mapping[str, Any], path: Path) -> RunConfig:
    """What `read` found in `path`, checked. Raises ConfigError."""
    if isinstance(run := raw.get("run"), Mapping):
        raw = {**raw, "run": {"code_folder": path.parent, **run}}
    return validate(raw, str(path))


def read(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a file with overrides over it, not checked. Raises ConfigError."""
    try:
        raw = _of_run_dir(path) if path.is_dir() else tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"configuration {path} cannot be read ({error.strerror}): name an existing TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not TOML: {error}") from None
    for override in overrides:
        over = parse_override(override)
        raw, lines = retyped(raw, over)
        for line in lines:
            log.warning("--set %s: %s", secrets.redact(override), line)
        raw = merge(raw, over)
    return raw


def load_run_dir(run_dir: Path) -> RunConfig:
    """The configuration that a run's folder was made with, without variables of `env` that it hides: whoever
    starts a role has them in the environment. Raises ConfigError when it holds none."""
    return validate(_of_run_dir(run_dir), str(run_dir / "config.json"))


def _of_run_dir(run_dir: Path) -> dict[str, Any]:
    raw = _inherited(secrets.filled(recorded(run_dir)))  # with those of a role that a launcher started
    raw["run"]["folder"] = str(run_dir.absolute().parent)
    raw.pop("content", None)
    raw.pop("format", None)
    return raw


def _inherited(raw: dict[str, Any], annotation: Any = RunConfig) -> dict[str, Any]:
    """`raw`, which stands where `annotation` does, without variables of `env` that hide a secret."""
    for key, value in raw.items():
        field, inner = within(annotation, key)
        if isinstance(value, dict) and key == "env" and field is not None:
            raw[key] = {name: text for name, text in value.items() if secrets.HIDDEN not in str(text)}
        elif isinstance(value, dict):
            _inherited(value, inner)
    return raw


def recorded(run_dir: Path) -> dict[str, Any]:
    """What config.json in a run's folder holds, secrets hidden: the tables of a configuration, "content" and
    "format".

    Raises ConfigError when there is none, or another file in its place, DataError for another format.
    """
    path = run_dir / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name the folder of a run") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}): {PUT_BACK}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("run"), dict):
        raise ConfigError(f"{path} has no table 'run', which every run writes: {PUT_BACK}")
    check_format(path, raw.get("format", CONFIG_FORMAT), CONFIG_FORMAT)
    if isinstance(evaluation := raw.get("evaluation"), dict) and "threads" in evaluation:
        place = evaluation.get("placement") or {}  # beside which an earlier release wrote them
        evaluation["placement"] = {**place, "threads": evaluation.pop("threads")}
    return raw


def validate(raw: Mapping[str, Any], source: str) -> RunConfig:
    """`raw` as a RunConfig. Raises ConfigError with a line for every key that cannot be used."""
    secrets.found(raw)  # so that no message shows one
    if raw.get("evaluation") is False:
        raw = {**raw, "evaluation": None}
    if raw.get("teachers") is False:
        raw = {**raw, "teachers": {}}
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        lines = [f"{source}: {_explain(detail)}" for detail in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    return _absolute(config)


_OF_PYTHON: Final = ("True", "False", "None", "null")


def parse_override(text: str) -> dict[str, Any]:
    """The nested table that "a.b=value" stands for; a value that is no TOML is a string."""
    key, equals, value = text.partition("=")
    if value.strip() in _OF_PYTHON:
        raise ConfigError(
            f"--set {text!r}: TOML writes true and false, and has no value for none: write it so, leave the "
            "key out, or give a text in quotes"
        )
    problem: Exception | None = None
    for literal in (value, json.dumps(value)) if equals else ():
        try:
            return tomllib.loads(f"{key} = {literal}")
        except tomllib.TOMLDecodeError as error:
            problem = error
    raise ConfigError(f"--set {text!r}: the form is section.key=value" + (f" ({problem})" if problem else ""))


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `under`, table by table."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return result


def retyped(
    under: Mapping[str, Any], over: Mapping[str, Any], annotation: Any = RunConfig, place: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """`under` as far as it fits the types that `over` gives its sections, and a line for each that lost keys.

    `annotation`: what may stand at `place`. A key that no type knows stays, so that it is refused; `options`
    are those of one type, or of one function of the user's.
    """
    kept, lines = dict(under), list[str]()
    kinds = [] if get_origin(annotation) is dict else sections(annotation)
    if len(kinds) > 1 and "type" in over and (new := _of_type(over, kinds)):
        known = {name for kind in new for name in kind.model_fields}
        before = {name for kind in _of_type(under, kinds) or kinds for name in kind.model_fields}
        if under.get("type", over["type"]) != over["type"]:
            known -= {"options"}
        if gone := [key for key in under if key in before - known]:
            kept = {key: value for key, value in under.items() if key not in gone}
            lines.append(f"{place} of type {over['type']!r} has no {', '.join(gone)}, which is left out")
    for key, value in over.items():
        below = kept.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            _, inner = within(annotation, key)
            kept[key], more = retyped(below, value, inner, f"{place}.{key}".lstrip("."))
            lines += more
    return kept, lines


def _of_type(table: Mapping[str, Any], kinds: Sequence[type[Settings]]) -> list[type[Settings]]:
    """The class that a section's `type` names; none when it has no type, or an unknown one."""
    name = typed(kinds, dict(table)).get("type")
    return [kind for kind in kinds if name in get_args(kind.model_fields["type"].annotation)]


def _explain(detail: ErrorDetails) -> str:
    """One problem: the key as it stands in the file, the value, and the rule."""
    *place, last = map(str, detail["loc"] or ("",))
    keys, kinds = _walk(place)
    key = ".".join([*keys, last])
    if detail["type"] == "extra_forbidden" and len(kinds) == 1:
        return f"{key} is not a known key: {_nearest(last, kinds[0])}"
    if detail["type"] == "union_tag_not_found":
        tags = [get_args(kind.model_fields["type"].annotation) for kind in _walk([*place, last])[1]]
        types = ", ".join(OWN if tag == "own" else tag for tag in chain.from_iterable(tags))
        return f"{key}.type is missing: set it too, to one of {types}"
    if detail["type"] == "missing":
        return f"{key} is missing: it has no default"
    value = repr(secrets.hide(detail["input"], "" if secrets.FREE_FORM.isdisjoint(place) else last))
    rule = detail["msg"].removeprefix("Value error, ")
    key = f"a name in {'.'.join(keys[:-1])}" if last == "[key]" else key
    return f"{key} = {value:.120}: {rule[0].lower()}{rule[1:]}"


def _nearest(key: str, section: type[Settings]) -> str:
    known = sorted(section.model_fields)
    last = key.rpartition("_")[2]  # such as prompt_field of prompts.field
    close = [last] if last in known else difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    tags = get_args(section.model_fields["type"].annotation) if "type" in known else ()
    where = f"of type {tags[0]!r}" if len(tags) == 1 else "here"
    return f"did you mean {close[0]!r}?" if close else f"known {where} are {', '.join(known)}"


def _walk(place: Sequence[str]) -> tuple[list[str], list[type[Settings]]]:
    """The keys of a pydantic location, without its tags of unions, and what section they lead to: several of
    a union without its tag, none for a plain value or a table of sections by name."""
    here: Any = RunConfig
    keys, kinds = list[str](), sections(here)
    for part in place:
        if len(kinds) > 1:
            here = next(
                (kind for kind in kinds if part in get_args(kind.model_fields["type"].annotation)), None
            )
        else:
            keys.append(part)
            _, here = within(here, part)
        kinds = [] if get_origin(here) is dict else sections(here)
    return keys, kinds


def paths(
    section: Settings, place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Holds | None, Path | str]]:
    """Every path below a section: the keys that lead there, what it holds (None: a folder), and itself."""
    for name, field in type(section).model_fields.items():
        here, value = (*place, name), getattr(section, name)
        holds = next((item for item in field.metadata if isinstance(item, Holds)), None)
        if isinstance(value, Settings):
            yield from paths(value, here)
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, Settings):
                    yield from paths(item, (*here, key))
        elif isinstance(value, Path) or (holds and value is not None):
            yield here, holds, value


def _absolute(config: RunConfig) -> RunConfig:
    """With every path absolute, `~` and variables of the environment filled in; those too that may be an id
    of the Hub and are here. Raises ConfigError where that fails."""
    changes: dict[str, Any] = {}
    for (*keys, name), _, path in paths(config):
        table, text = changes, os.path.expanduser(os.path.expandvars(path))
        if text.startswith("~") or re.search(r"\$(\w|\{)", text):
            raise ConfigError(
                f"{name} = {str(path)!r:.80} names a variable or user that is not known here: write it out"
            )
        for key in keys:
            table = table.setdefault(key, {})
        if isinstance(path, Path):
            table[name] = Path(text).absolute()
        else:
            table[name] = os.path.abspath(text) if os.path.exists(text) else text
    return config.with_(**changes)
