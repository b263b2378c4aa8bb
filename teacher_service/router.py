"""Several teachers: which one marks a sample, by the sample's data source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sync.errors import ConfigError
from teacher_service.config import TeacherConfig
from teacher_service.transform import load_function, own_code


class Router:
    """Data source → name of a teacher: by `route`, then by `route_by`, then the teacher that has neither."""

    def __init__(self, teachers: Mapping[str, TeacherConfig]) -> None:
        """Raises ConfigError when two teachers claim the same source, or two take all the rest."""
        self._by_source: dict[str, str] = {}
        self._takers: dict[str, Callable[[str], bool]] = {}
        self._default: str | None = None
        for name, config in teachers.items():
            if config.route_by is not None:
                self._takers[name] = _taker(config.route_by, f"teachers.{name}.route_by")
            elif not config.route:
                self._claim_rest(name)
            for source in config.route:
                self._claim(source, name)

    def _claim(self, source: str, name: str) -> None:
        if (other := self._by_source.setdefault(source, name)) != name:
            raise ConfigError(f"route: source {source!r} goes to {other!r} and to {name!r}: name it once")

    def _claim_rest(self, name: str) -> None:
        if self._default is not None:
            raise ConfigError(
                f"teachers {self._default!r} and {name!r} both have no `route`: only one may take the rest, "
                "name the other's data sources"
            )
        self._default = name

    def route(self, source: str) -> str:
        """Name of the teacher for samples of `source`.

        Raises ConfigError when there is none, DataError when a function of the user's raises.
        """
        if (named := self._by_source.get(source)) is not None:
            return named
        takers = [name for name, takes in self._takers.items() if takes(source)]
        if len(takers) > 1:
            raise ConfigError(
                f"route_by: source {source!r} is taken by {' and '.join(takers)}: let one take it"
            )
        name = takers[0] if takers else self._default
        if name is None:
            raise ConfigError(
                f"no teacher for data source {source!r}: routes name {', '.join(sorted(self._by_source))}; "
                "add it to a teacher's `route`, or give one teacher no `route`"
            )
        return name

    def check(self, sources: Iterable[str]) -> None:
        """Raise ConfigError unless every source has a teacher; call it before the run starts."""
        for source in sources:
            self.route(source)


def _taker(name: str, field: str) -> Callable[[str], bool]:
    function = load_function(name, field)

    def takes(source: str) -> bool:
        with own_code(f"{field} {name!r}", f"data source {source!r}", "return whether it takes the source"):
            return bool(function(source))

    return takes
