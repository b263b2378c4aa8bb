"""Secrets stay out of files, logs, trackers and command lines; every way out goes through here.

    by name    in a table whose keys are the user's: secret_access_key = "…"; behind a flag: --api-key …
    by shape   user and password in a URL, NAME=VALUE with such a name, well-known kinds of tokens
    by value   what was found so in a configuration or the environment, wherever it turns up again

A file holds HIDDEN in a secret's place. The process that is started with the file gets the secrets beside it,
in one environment variable (`environment`), and puts them back when it reads the file (`filled`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, Final

from setproctitle import setproctitle

HIDDEN: Final = "(hidden)"
VARIABLE: Final = "DISTILL_HIDDEN"
"""Environment variable with the secrets of a role's file: JSON, place → value."""
FREE_FORM: Final = frozenset(
    {"chat_template_kwargs", "deepspeed", "engine_args", "env", "options", "overrides"}
)
"""Tables of a configuration whose keys are the user's, so that any of them may name a secret."""
_SECRET_NAME: Final = re.compile(
    r"(token|key|[_-]pwd|(api|access|auth|hub)[_-]?(token|key)s|(^|[_-])(auth|authorization|pass|sas|sig))$"
    r"|secret|passw|passphrase|credential|signature|cookie|webhook",
    re.IGNORECASE,
)
_SHAPES: Final = re.compile(
    r"(?<=://)(?P<user>[^/\s?#\"']+)(?=@)"
    r"|[?&]sig=(?P<sas>[^\s\"'&]+)"
    r"|(?:token|secret|passw(?:or)?d|credentials?|signature|(?:[_-]|api|access|account|private)key)"
    r"(?:\s*=\s*|[\"']\s*[:=]\s*(?=[\"']))"
    r"(?:[\"'](?P<quoted>[^\"']+)[\"']|(?!\(hidden)(?P<value>[^\s\"',;&}\])]+))"
    r"|Bearer\s+(?P<bearer>[\w.~+/=-]{8,})"
    r"|authorization[\"']?\s*[:=]\s*[\"']?Basic\s+(?P<basic>[\w+/=-]+)"
    r"|--[\w-]*(?:token|key|secret|password)\s+(?!\(hidden)(?P<flag>[^\s-]\S{5,})"
    r"|(?:passw(?:or)?d|passphrase|secret|(?:api|access)[_-]?key)\s*:\s+(?!\(hidden)(?P<said>[^\s\"',;)}\]]+)"
    r"|\b(?P<token>(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|AKIA|ASIA|AIza)[\w-]{14,})"
    r"|\b(?P<jwt>eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
    r"|(?P<pem>-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*)",
    re.IGNORECASE,
)
_SHORTEST: Final = 6
"""Characters of a value that is looked for everywhere: a shorter one would be found in other words."""
_known: set[str] = set()


def is_secret(name: str) -> bool:
    """Whether a key, flag or variable of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


def hide(tree: Any, name: str = "") -> Any:
    """A JSON-like value without its secrets, known from now on; `name`: its key in a free-form table."""
    return _hide(tree, "", {}, bool(name), is_secret(name))


def found(tree: Any) -> dict[str, Any]:
    """Place ("/weights/store/options/secret_key") → value of every secret; known from now on."""
    places: dict[str, Any] = {}
    _hide(tree, "", places)
    return places


def environment(tree: Any) -> dict[str, str]:
    """The variable with which a process can read what `hide` left of `tree`; empty: it has no secret."""
    places = found(tree)
    return {VARIABLE: json.dumps(places)} if places else {}


def filled(tree: Any) -> Any:
    """`tree` with the secrets that this process was given put back."""
    places = json.loads(os.environ.get(VARIABLE, "{}"))
    _learn(*map(str, places.values()))

    def fill(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {key: fill(item, f"{place}/{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item, f"{place}/{index}") for index, item in enumerate(value)]
        return places.get(place, value)

    return fill(tree, "")


def unfilled(tree: Any, place: str = "") -> Iterator[str]:
    """Key ("teachers.t.engine_url") of every value that still hides a secret; `place`: of `tree`."""
    if isinstance(tree, dict | list):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from unfilled(item, f"{place}.{key}".lstrip("."))
    elif isinstance(tree, str) and HIDDEN in tree:
        yield place


def redact(text: str) -> str:
    """`text` without what is known or looks like a secret."""
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _SHAPES.sub(_hidden, text)


def redact_process() -> None:
    """Have all that this process logs pass `redact`, and its command line; for the start of a process."""
    _learn(*(value for name, value in os.environ.items() if is_secret(name)))
    words = [redact(word) for word in sys.argv]
    if words != sys.argv:
        sys.argv[:] = words
        setproctitle(" ".join([sys.executable, *words]))
    make = logging.getLogRecordFactory()
    if getattr(make, "func", None) is not _redacted:
        logging.setLogRecordFactory(partial(_redacted, make))
        sys.excepthook = lambda *error: sys.stderr.write(redact("".join(traceback.format_exception(*error))))


def _redacted(make: Any, *args: Any, **kwargs: Any) -> logging.LogRecord:
    """What `make` makes, a log record, with its text passed through `redact`."""
    record: logging.LogRecord = make(*args, **kwargs)
    if isinstance(record.args, tuple):  # one by one: some formatters want their number
        record.args = tuple(a if redact(str(a)) == str(a) else redact(str(a)) for a in record.args)
    try:
        text = record.getMessage()
    except (TypeError, ValueError):  # logging reports a wrong number of arguments itself
        return record
    if redact(text) != text:
        record.msg, record.args = redact(text), ()
    if record.exc_info and record.exc_info[0]:
        record.exc_text = redact("".join(traceback.format_exception(*record.exc_info))).rstrip("\n")
    return record


def _hide(value: Any, place: str, places: dict[str, Any], free: bool = False, named: bool = False) -> Any:
    """`free`: inside a free-form table. `named`: below a secret's name there. Fills `places`."""
    if isinstance(value, dict):
        return {
            key: _hide(
                item, f"{place}/{key}", places, free or key in FREE_FORM, named or (free and is_secret(key))
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            _hide(item, f"{place}/{index}", places, free, named or _is_flag(before))
            for index, (before, item) in enumerate(pairwise(["", *value]))
        ]
    if named and isinstance(value, int | float) and not isinstance(value, bool):
        _learn(str(value))
        places[place] = value
        return HIDDEN
    if not isinstance(value, str):
        return value
    shown = HIDDEN if named and value else _SHAPES.sub(_hidden, value)
    if shown != value:
        parts = [part for match in _SHAPES.finditer(value) for part in match.groups() if part]
        _learn(value if named else "", *parts, *(part.partition(":")[2] for part in parts))
        places[place] = value
    return shown


def _is_flag(word: Any) -> bool:
    """Whether the next word of a command line is a secret."""
    return isinstance(word, str) and word.startswith("-") and "=" not in word and is_secret(word)


def _hidden(match: re.Match[str]) -> str:
    """A match of `_SHAPES` with its one group hidden."""
    start, end = next(match.span(name) for name, part in match.groupdict().items() if part)
    whole, begin = match[0], match.start()
    return f"{whole[: start - begin]}{HIDDEN}{whole[end - begin :]}"


def _learn(*values: str) -> None:
    _known.update(value for value in values if len(value) >= _SHORTEST and value != HIDDEN)
