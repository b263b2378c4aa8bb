"""Command lines of the benchmarks; the benchmarks themselves are started by hand."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sync.base.errors import ConfigError, DistillError
from tests import benchmarks
from tests.benchmarks.chaos import INJECT, targets
from tests.benchmarks.figures import chosen, comparison, with_json

NAMES = re.findall(r"^    (\w+)   ", str(benchmarks.__doc__), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_says_what_it_takes_and_refuses_what_it_does_not_know(name: str) -> None:
    module, app = importlib.import_module(f"tests.benchmarks.{name}"), typer.Typer()
    app.command()(with_json(module.run, module.table))
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0, shown.output
    assert "--json" in shown.output
    refused = CliRunner().invoke(app, ["--no-such-option"])
    assert refused.exit_code == 2
    assert "--no-such-option" in refused.output


def test_a_benchmark_prints_a_table_and_writes_its_figures(tmp_path: Path) -> None:
    def run(count: int = 1) -> dict[str, int]:
        return {"count": count}

    app = typer.Typer()
    app.command()(with_json(run, lambda figures: f"{figures['count']} of them"))
    shown = CliRunner().invoke(app, ["--count", "3", "--json", str(tmp_path / "x.json")])
    assert shown.output == "3 of them\n"
    assert json.loads((tmp_path / "x.json").read_text()) == {"count": 3}


def test_figures_with_a_problem_are_written_before_the_benchmark_fails(tmp_path: Path) -> None:
    app, file = typer.Typer(), tmp_path / "x.json"
    app.command()(
        with_json(lambda: {"lost": 1}, lambda _: "a table", lambda figures: f"{figures['lost']} lost")
    )
    failed = CliRunner().invoke(app, ["--json", str(file)])
    assert isinstance(failed.exception, DistillError)
    assert str(failed.exception) == "1 lost"
    assert json.loads(file.read_text()) == {"lost": 1}


def test_a_name_that_is_none_is_refused_with_those_there_are() -> None:
    assert chosen("--only", "", ["a", "b"]) == ["a", "b"]
    assert chosen("--only", "b, a", ["a", "b"]) == ["b", "a"]
    with pytest.raises(ConfigError, match="--only has 'c': choose of a,b"):
        chosen("--only", "a,c", ["a", "b"])


def test_a_ratio_above_one_is_in_favour_of_the_new_variant() -> None:
    variants = {"old": {"ms": 30.0, "rate": 2.0, "age": None}, "new": {"ms": 20.0, "rate": 3.0, "age": None}}
    rows = {"ms": ("ms", -1), "rate": ("rate", 1), "age": ("age", 0)}
    lines = comparison("old", "new", variants, rows)
    assert lines[2:] == ["| ms | 30 | 20 | 1.50 |", "| rate | 2 | 3 | 1.50 |"]


def test_twelve_faults_are_of_all_six_kinds() -> None:
    kinds = [*INJECT]
    roles = ["student-0", "teacher-t", "trainer", "evaluator"]
    for seed in range(5):
        pairs = list(
            itertools.islice(targets(random.Random(seed), kinds, roles, ["engine of student-0"]), 12)
        )
        assert sorted(kind for kind, _ in pairs) == sorted(2 * kinds)
