"""The user's own code: what a configuration names as "package.module:name", found and called in one way.

Modules are looked for where Python looks, and after that in one folder of the run (`run.code_folder`), which
the processes of the run learn from an environment variable. It comes last, so that no file in it hides an
installed package, and only in processes that load something by name. An installed package may register a
short name for its own as an entry point; one that is built in comes first.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any, Final, get_args

from sync.base.errors import ConfigError, DataError, DistillError

CODE_VARIABLE: Final = "DISTILL_CODE_FOLDER"
"""Environment variable with the folder."""
OWN: Final = '"package.module:name"'
_MISSING: Final = "of a module that is installed, or in run.code_folder (default: beside the configuration)"
_appended: list[str] = []


def use_folder(folder: Path | None) -> None:
    """Look for modules in `folder` too, here and in processes started from now on; None: in no other place.
    One folder at a time: the one before is forgotten. A module that was imported stays imported."""
    while _appended:
        with suppress(ValueError):
            sys.path.remove(_appended.pop())
    os.environ.pop(CODE_VARIABLE, None)
    if folder is not None:
        os.environ[CODE_VARIABLE] = str(folder.absolute())


def is_own(kind: object) -> bool:
    """Whether a value names the user's own code."""
    return isinstance(kind, str) and ":" in kind


def registered(name: str, group: str) -> str:
    """The "package.module:name" that an installed package registers as `name`; without one, `name` itself.
    `group`: of entry points, such as "distill.objectives". Raises ConfigError when packages disagree."""
    values = sorted({entry.value for entry in _entry_points(group).select(name=name)})
    if len(values) > 1:
        raise ConfigError(
            f"{name!r} is an entry point of {group} in several packages ({', '.join(values)}): name the "
            f"one that is meant as {OWN}"
        )
    return values[0] if values else name


def typed(kinds: Sequence[Any], table: Any) -> Any:
    """A section whose `type` is the user's own code, as one of type "own" with its `name`. `kinds`: the
    classes of the section; the own one's `group` is that of its entry points."""
    tags = {tag: kind for kind in kinds for tag in get_args(kind.model_fields["type"].annotation)}
    named = table.get("type") if isinstance(table, dict) else None
    if "own" not in tags or not isinstance(named, str) or named in tags:
        return table
    name = registered(named, tags["own"].group)
    return {**table, "type": "own", "name": name} if is_own(name) else table


def resolve(name: str) -> Any:
    """What "package.module:name" names. Raises whatever importing it raises."""
    search_folder()
    return pkgutil.resolve_name(name)


def load_function(
    name: str, field: str, others: Sequence[str] = (), group: str | None = None
) -> Callable[..., Any]:
    """The function or class that "package.module:name", or an entry point of `group`, names. Raises
    ConfigError that names `field` when there is none; `others`: what else may stand in the field."""
    try:
        name = registered(name, group) if group else name
        function = resolve(name)
        if ":" not in name or not callable(function):
            attribute = name.rpartition(":")[2]
            raise TypeError(f"{attribute} is a {type(function).__name__} and cannot be called")
    except Exception as error:  # importing runs the user's own code
        either = f"{', '.join(others)}, or " if others else ""
        raise ConfigError(
            f"{field} = {name!r} cannot be loaded ({type(error).__name__}: {error}): say "
            f"{either}{OWN} {_MISSING}"
        ) from error
    return function


def check_module(name: str, field: str) -> None:
    """Raise ConfigError when the module of "package.module:name" cannot be found; it is not imported."""
    search_folder()
    module, _, attribute = name.partition(":")
    try:
        exists = importlib.util.find_spec(module) is not None and bool(attribute)
    except (ImportError, ValueError):  # of a package above it, or no name of a module
        exists = False
    if not exists:
        raise ConfigError(f"{field} = {name!r} names no module that can be found: say {OWN} {_MISSING}")


def make_own(
    name: str, field: str, fits: Callable[[Any], bool], expected: str, *arguments: Any, **options: Any
) -> Any:
    """What the named function makes of `arguments` and `options`; `expected`: what `fits` accepts, in words.
    Raises ConfigError that names `field` when it fails or makes something else."""
    make = load_function(name, field)
    try:
        made = make(*arguments, **options)
    except DistillError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{field} = {name!r} raised {type(error).__name__} ({error}) when it was called: give it the "
            "options that it takes, or mend it"
        ) from error
    if not fits(made):
        raise ConfigError(f"{field} = {name!r} made a {type(made).__name__}: it must return {expected}")
    return made


@contextmanager
def own_code(name: str, about: str, remedy: str) -> Iterator[None]:
    """Turn what the user's own code raises inside into a DataError with function, input and exception. A
    DistillError that passes through it names its remedy itself."""
    try:
        yield
    except DistillError as error:
        raise DataError(f"{name}, {about}: {error}") from error
    except Exception as error:
        raise DataError(f"{name} raised {type(error).__name__} ({error}) for {about}: {remedy}") from error


@cache
def _entry_points(group: str) -> EntryPoints:
    """The group's entry points of every installed package; reading them takes tens of milliseconds."""
    return entry_points(group=group)


def search_folder() -> None:
    """Look for modules in the folder too, in this process from now on: whoever imports by name calls it."""
    folder = os.environ.get(CODE_VARIABLE)
    if folder and folder not in sys.path:
        sys.path.append(folder)
        _appended.append(folder)
        importlib.invalidate_caches()
