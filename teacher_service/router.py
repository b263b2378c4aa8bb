"""Which teacher scores a sample, by its data source; and what it sees instead of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any

from sync.base.errors import ConfigError
from sync.base.own_code import load_function, own_code
from teacher_service.config import TeacherConfig


class Router:
    """Data source → name of a teacher: by `route`, then by `route_by`, then the teacher that has neither."""

    def __init__(self, teachers: Mapping[str, TeacherConfig]) -> None:
        """Raises ConfigError when two teachers claim the same source, or two take all the rest."""
        self._by_source: dict[str, str] = {}
        self._takers: dict[str, Callable[[str], bool]] = {}
        self._default: str | None = None
        self._none = not teachers
        for name, config in teachers.items():
            if config.route_by is not None:
                field, remedy = f"teachers.{name}.route_by", "return whether it takes the source"
                self._takers[name] = _named(config.route_by, field, bool, remedy)
            elif not config.route and self._default is None:
                self._default = name
            elif not config.route:
                raise ConfigError(
                    f"teachers {self._default!r} and {name!r} both have no `route`: only one may take the "
                    "rest, name the other's data sources"
                )
            for source in config.route:
                if (other := self._by_source.setdefault(source, name)) != name:
                    raise ConfigError(
                        f"route: source {source!r} goes to {other!r} and to {name!r}: name it once"
                    )

    def route(self, source: str) -> str:
        """Name of the teacher for samples of `source`; empty: there are no teachers.

        Raises ConfigError when there is none, DataError when a function of the user's raises.
        """
        if self._none:
            return ""
        if (named := self._by_source.get(source)) is not None:
            return named
        takers = [name for name, takes in self._takers.items() if takes(source)]
        if len(takers) > 1:
            both = " and ".join(takers)
            raise ConfigError(f"route_by: source {source!r} is taken by {both}: let one take it")
        if (name := takers[0] if takers else self._default) is None:
            raise ConfigError(
                f"no teacher for data source {source!r}: routes name {', '.join(sorted(self._by_source))}; "
                "add it to a teacher's `route`, or give one teacher no `route`"
            )
        return name


def load_transforms(teachers: Mapping[str, TeacherConfig]) -> dict[str, Callable[..., Sequence[int]]]:
    """Teacher's name → its prompt transform, for those that have one. Raises ConfigError.

    A transform raises DataError for a prompt that the user's function gives no token ids for.
    """
    remedy = "return the token ids that it is to see"
    return {
        name: _named(teacher.prompt_transform, f"teachers.{name}.prompt_transform", _token_ids, remedy)
        for name, teacher in teachers.items()
        if teacher.prompt_transform is not None
    }


def _token_ids(values: Iterable[Any]) -> list[int]:
    ids = [index(token) for token in values]
    if wrong := [id for id in ids if not 0 <= id < 1 << 31]:
        raise ValueError(f"{wrong[0]} is no token id")
    return ids


def _named(name: str, field: str, result: Callable[[Any], Any], remedy: str) -> Callable[..., Any]:
    """The named function with `result` of what it returns; DataError when either raises."""
    function = load_function(name, field)

    def call(asked: Any) -> Any:
        about = f"data source {asked!r}" if isinstance(asked, str) else f"prompt {asked.id}"
        with own_code(f"{field} {name!r}", about, remedy):
            return result(function(asked))

    return call
