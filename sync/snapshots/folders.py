"""What an anchor's folder may hold: weights as safetensors, settings and vocabularies. Nothing that could run
leaves a trainer through a store, and nothing that could is taken from one."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from sync.errors import SnapshotError, StoreError
from sync.stores.base import check_key

_ENDINGS: Final = frozenset(
    (".safetensors", ".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".md")
)
_MOST_SETTINGS: Final = 1 << 23
"""Bytes; a tokenizer with thousands of added tokens has one or two million."""
_CODE: Final = ("auto_map", "megatron_config")
"""Settings by which transformers and peft import code that a folder names."""


def refused(key: str) -> str | None:
    """Why no reader takes this file of an anchor; None: they do."""
    if not key.startswith("model/"):
        return "it is outside of model/"
    if PurePosixPath(key).suffix not in _ENDINGS or key.endswith(".bin.index.json"):
        return "a store holds safetensors and settings, never pickles or code"
    try:
        check_key(key)
    except StoreError as error:
        return str(error)
    return None


def without_code(path: Path) -> bytes | Path:
    """A file of a folder as it is published: a config file without the settings that name code."""
    if not path.name.endswith("config.json"):
        return path
    settings = _settings(path)
    kept = {name: value for name, value in settings.items() if name not in _CODE}
    return path if len(kept) == len(settings) else msgspec.json.format(msgspec.json.encode(kept), indent=2)


def check_no_code(folder: Path) -> None:
    """Raises SnapshotError when a config file names code."""
    for path in folder.rglob("*config.json"):
        settings = _settings(path)
        for name in (name for name in _CODE if bytes(settings.get(name, b"null")) != b"null"):
            raise SnapshotError(
                f"{path.name} from a store has {name!r}, by which a loader would run code: model code comes "
                "from student.path alone; the file was altered, or published by an older release"
            )


def _settings(path: Path) -> dict[str, msgspec.Raw]:
    """A config file's settings, undecoded. Raises SnapshotError when it has none."""
    try:
        if (size := path.stat().st_size) > _MOST_SETTINGS:
            raise SnapshotError(f"{path} has {size} bytes, settings take at most {_MOST_SETTINGS}")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"{path} is no file of settings: {error}; it was altered") from None
