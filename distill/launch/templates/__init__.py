"""Files that are written for other programs, as templates that one can read."""

from __future__ import annotations

import json
import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_environment = Environment(loader=PackageLoader(__name__, "."), undefined=StrictUndefined, autoescape=False)
_environment.keep_trailing_newline = True
_environment.filters |= {"json": lambda value: json.dumps(value, ensure_ascii=False), "quoted": shlex.quote}


def filled(template: str, **values: Any) -> str:
    """A template with these values; each that it names must be there."""
    return _environment.get_template(template).render(values)
