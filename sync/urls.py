"""Addresses of servers, as people write them."""

from __future__ import annotations

from typing import Annotated

import httpx
from pydantic import AfterValidator

from sync.errors import ConfigError


def url_problem(url: str) -> str | None:
    """What keeps HTTP from reaching a server at `url`, and the remedy; None: nothing."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        return f"not a server's URL ({error}): write http://host:port"
    if parts.scheme not in ("http", "https") or not parts.host or parts.port not in (None, *range(1, 65536)):
        return "not a server's URL: write http://host:port"
    return None


def checked_url(url: str, name: str = "URL") -> str:
    """`url` as it is. Raises ConfigError that says `name` when no server can be there."""
    if problem := url_problem(url):
        raise ConfigError(f"{name} {url!r} is {problem}")
    return url


def _in_settings(url: str) -> str:
    if problem := url_problem(url):
        raise ValueError(problem)
    return url


Url = Annotated[str, AfterValidator(_in_settings)]
"""A field of a configuration that names a server."""
