"""Which teacher scores a sample, and functions named in a configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sync.base.errors import ConfigError, DataError
from sync.base.own_code import load_function
from teacher_service.config import TeacherConfig
from teacher_service.router import Router, load_transforms


def teacher(*route: str) -> TeacherConfig:
    return TeacherConfig(path="m", route=list(route))


def test_sources_go_to_the_teacher_that_names_them_and_the_rest_to_the_one_that_names_none() -> None:
    teachers = {"maths": teacher("gsm", "aime"), "code": teacher("mbpp")}
    for rest in ({}, {"any": teacher()}):
        router = Router(teachers | rest)
        assert [router.route(source) for source in ("gsm", "aime", "mbpp")] == ["maths", "maths", "code"]
    assert router.route("poems") == "any"


def test_a_source_without_a_teacher_and_ambiguous_routes_are_refused() -> None:
    with pytest.raises(ConfigError, match="no teacher for data source 'poems'"):
        Router({"maths": teacher("gsm")}).route("poems")
    with pytest.raises(ConfigError, match="goes to 'a' and to 'b'"):
        Router({"a": teacher("gsm"), "b": teacher("gsm")})
    with pytest.raises(ConfigError, match="'a' and 'b' both have no `route`"):
        Router({"a": teacher(), "b": teacher()})


def test_a_function_may_choose_after_the_names_and_before_the_rest() -> None:
    by_function = TeacherConfig(path="m", route_by="operator:not_")
    router = Router({"empty": by_function, "named": teacher("", "a"), "rest": teacher()})
    assert [router.route(source) for source in ("", "a", "b")] == ["named", "named", "rest"]
    assert Router({"empty": by_function, "rest": teacher()}).route("") == "empty"
    with pytest.raises(ConfigError, match="taken by one and two"):
        Router({"one": by_function, "two": by_function}).route("")


def forgets(prompt: Any) -> None:
    """Returns nothing."""


def counts_wrong(prompt: Any) -> list[int]:
    return [3, 1 << 31]


def fails(prompt: Any) -> list[int]:
    raise KeyError("solution")


def test_named_functions_are_loaded_or_refused_with_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_function("math:sqrt", "prompt_transform")(9) == 3
    for name in ("math:nothing", "no_such_module:f", "math", "math:pi", ":"):
        with pytest.raises(ConfigError, match="prompt_transform"):
            load_function(name, "prompt_transform")
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no key is set')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(RuntimeError: no key is set\)"):
        load_function("raises_at_import:f", "prompt_transform")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("fails", r"KeyError \('solution'\)"),
        ("forgets", r"TypeError \('NoneType'"),
        ("counts_wrong", r"ValueError \(2147483648 is no token id"),
    ],
)
def test_a_transform_that_fails_names_itself_and_the_prompt(function: str, problem: str) -> None:
    config = TeacherConfig(path="m", prompt_transform=f"{__name__}:{function}")
    transform = load_transforms({"t": config})["t"]
    with pytest.raises(
        DataError, match=rf"t\.prompt_transform '.*:{function}' raised {problem}.* for prompt 3:1:0"
    ):
        transform(SimpleNamespace(id="3:1:0"))


def test_a_route_that_fails_names_itself_and_the_source() -> None:
    router = Router({"t": TeacherConfig(path="m", route_by="math:sqrt")})
    with pytest.raises(DataError, match=r"t\.route_by 'math:sqrt' raised TypeError .* for data source 'a'"):
        router.route("a")
