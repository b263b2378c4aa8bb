"""What the documents say is what the code does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
import typer

from distill.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def test_the_reference_pages_are_written_from_the_code() -> None:
    for path, written in reference.PAGES.items():
        assert path.read_text() == written(), "run: python tests/support/reference.py"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text())
    assert not [target for target in targets if not (path.parent / target).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(path: Path) -> None:
    pattern = r"`((?:configs|docs|tests|distill|sync|teacher_service|student_trainer)/[\w./-]+\.\w+)`"
    named = re.findall(pattern, path.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_readme_names_every_command() -> None:
    group = typer.main.get_command(app)
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `distill")]
    named = set(re.findall(r"`(?:distill )?([a-z ]+)`", "\n".join(row.split("|")[1] for row in rows)))
    commands = group.commands  # type: ignore[attr-defined]
    single = {name for name, command in commands.items() if not hasattr(command, "commands")}
    assert single <= named
    for name in commands.keys() - single:
        (row,) = (row for row in rows if f"`distill {name} " in row)
        assert all(
            f"`{word}`" in row or f"`distill {name} {word}`" in row for word in commands[name].commands
        )


def test_the_architecture_page_names_every_route() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    told = set(re.findall(r"`(?:GET|POST) (/[^`\[]+)", page))
    sources = [path for name in ("distill", "teacher_service") for path in (ROOT / name).rglob("*.py")]
    routes = {route for path in sources for route in re.findall(r'Route\("([^"]+)"', path.read_text())}
    replica = (ROOT / "sync/replica/middleware.py").read_text()
    routes |= {f"/distill/v1/{name}" for name in re.findall(r'\("(?:GET|POST)", "(\w+)"\): self', replica)}
    assert told == routes


def _definitions(tree: ast.Module) -> Iterator[str]:
    """Functions and classes of a module, methods as Class.method."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner}" for inner in _definitions(ast.Module(node.body, [])))


def test_every_function_on_the_path_of_a_rollout_exists() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    path = re.findall(r"`([\w/]+\.py):([\w.]+)`", page)
    assert len(path) >= 15
    missing = [
        f"{file}:{name}"
        for file, name in path
        if name not in set(_definitions(ast.parse((ROOT / file).read_text())))
    ]
    assert not missing


def test_the_drawing_of_a_rollout_names_types_and_folders_that_exist() -> None:
    words = re.findall(r">([^<]+)<", (ROOT / "docs/images/rollout.svg").read_text())
    types = {word for word in words if re.fullmatch(r"[A-Z]\w+", word)}
    folders = {name for word in words for name in re.findall(r"[a-z_]+(?:/[a-z_]+)*/(?![a-z])", word)}
    source = "\n".join(
        path.read_text() for name in ("distill", "sync") for path in (ROOT / name).rglob("*.py")
    )
    assert len(types) >= 7
    assert not [name for name in types if f"class {name}(" not in source and f"class {name}:" not in source]
    assert not [
        name for name in folders if not ((ROOT / name).is_dir() or (ROOT / "distill" / name).is_dir())
    ]
