"""A configuration as the text of a TOML file: the way back from what `tomllib` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(table: Mapping[str, Any]) -> str:
    """Text that `tomllib.loads` reads as `table`: strings, numbers, booleans, lists and tables of them."""
    return "\n".join(_table(table, ())).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], place: tuple[str, ...]) -> Iterator[str]:
    """Its own keys first: behind the header of a table inside it they would belong to that one."""
    own = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if place and (own or not table):
        yield f"\n[{'.'.join(map(_key, place))}]"
    for key, value in own.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _table(value, (*place, key))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    match value:
        case str():  # a TOML string is a JSON one, and has no raw DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case Mapping():
            return f"{{{', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())}}}"
        case list():
            return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"{type(value).__name__} {value!r} has no place in a configuration")
