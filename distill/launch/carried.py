"""What a configuration names on this machine and pods must find: small files travel, the rest is refused.

DeepSpeed's JSON, chat templates, JSONL prompts, a module of one file   →  beside the configuration
below the run's volume; absolute, and not on this machine               →  in the pods: left as it is
a model or dataset in a folder of this machine                          →  refused
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from distill.config import RunConfig
from distill.config.prompts import DatasetPrompts, JsonlPrompts
from sync.base import secrets
from sync.base.settings import ModelSource, Settings

CONFIG_FOLDER: Final = "/config"
"""Where pods find the configuration and the files that travel with it."""
MOST_BYTES: Final = 1_000_000
"""A ConfigMap holds 1 MiB."""
_OWN: Final = re.compile(r"(?P<package>[A-Za-z_]\w*)[\w.]*:[A-Za-z_]\w*")
_MOVE: Final = "put it on the run's volume, or into the image, and give its path there"


def carried(
    raw: Mapping[str, Any], config: RunConfig, folder: PurePosixPath
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """A configuration with the paths that pods see; name → text of what lies in CONFIG_FOLDER; problems.

    `config`: what `raw` says, with absolute paths; `folder`: the run's volume in the pods.
    """
    within, files = copy.deepcopy(dict(raw)), dict[str, str]()
    problems = [
        f"{place.strip('/').replace('/', '.')} holds a secret, and a ConfigMap lies open: leave it out, and "
        "give its client's variable (AWS_SECRET_ACCESS_KEY, HF_TOKEN, …) by --secret"
        for place in secrets.found(raw)
    ]
    for place, kind in _named(config):
        table: Any = within
        for key in place[:-1]:
            table = table.get(key, {})
        if (value := table.get(place[-1])) is None:
            continue
        key, path = ".".join(place), Path(value)
        if path.is_absolute() and PurePosixPath(value).is_relative_to(folder):
            continue
        if kind == "file" and path.is_file():
            name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{key}{path.suffix}")
            problems += _read(path, key, name, files)
            table[place[-1]] = f"{CONFIG_FOLDER}/{name}"
        elif problem := _problem(value, path, kind, folder):
            problems.append(f"{key} = {value!r} {problem}")
    problems += _modules(within, config, files)
    size = sum(len(text.encode()) for text in files.values())
    if size > MOST_BYTES:
        problems.append(
            f"{', '.join(files)} have {size:,} bytes together, and a ConfigMap takes {MOST_BYTES:,}: put the "
            f"largest on the run's volume, such as {folder}/data, and give its path there"
        )
    return within, files, problems


def _named(settings: Settings, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Place of every path in a configuration, and what is there: file, model, store or folder."""
    for name in type(settings).model_fields:
        here, value = (*place, name), getattr(settings, name)
        if here in (("run",), ("cluster",), ("trainer", "hostfile")):
            continue
        if isinstance(value, Settings):
            yield from _named(value, here)
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, Settings):
                    yield from _named(item, (*here, key))
        elif name in ("deepspeed", "chat_template") or (
            isinstance(settings, JsonlPrompts) and name == "path"
        ):
            yield here, "file"
        elif isinstance(settings, ModelSource | DatasetPrompts) and name == "path":
            yield here, "model"
        elif isinstance(value, Path):
            yield here, "store" if here == ("weights", "store", "path") else "folder"


def _problem(text: str, path: Path, kind: str, folder: PurePosixPath) -> str | None:
    """What keeps pods from finding it; None: nothing that is known here."""
    if kind == "store":
        return f"is shared by trainer and replicas: leave it out, or name a folder below {folder}"
    if kind == "model" and path.exists():
        return f"is a folder of this machine: {_MOVE} (or a Hub id)"
    if kind == "model" and not path.is_absolute() and text[0] != ".":
        return None  # a Hub id
    if not path.is_absolute():
        return "is not on this machine: correct it" if kind == "file" else f"is relative: {_MOVE}"
    return None


def _read(path: Path, key: str, name: str, files: dict[str, str]) -> Iterator[str]:
    """Add a file to `files`; yields what keeps it from travelling."""
    try:
        files[name] = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield f"{key} = '{path}' cannot be read as text ({error}): {_MOVE}"
        return
    if secrets.redact(files[name]) != files[name]:
        yield f"{key} = '{path}' holds a secret, and would lie open in a ConfigMap: take it out"


def _modules(within: dict[str, Any], config: RunConfig, files: dict[str, str]) -> Iterator[str]:
    """Modules of the user's that lie in run.code_folder: those of one file travel."""
    folder = config.run.code_folder
    if folder is None or not folder.is_dir():
        return
    within["run"].pop("code_folder", None)
    for name in sorted({match["package"] for text in texts(within) if (match := _OWN.fullmatch(text))}):
        if (folder / name).is_dir():
            yield f"{folder / name} is a package that the configuration names: install it in the image"
        elif (path := folder / f"{name}.py").is_file():
            yield from _read(path, f"module {name}", path.name, files)


def texts(tree: Any) -> Iterator[str]:
    """Every string in tables and lists, keys left out."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping | list):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from texts(item)
