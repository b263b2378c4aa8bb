"""What the documents say is what the code does."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any, get_origin

import pytest
import reference
import screens
import yaml
from rich.console import Console
from small_config import run_of_letters

from distill.config import RunConfig
from distill.config.laws import sections, within
from distill.config.loading import load

ROOT = Path(__file__).parent.parent
SITE = sorted((ROOT / "docs").rglob("*.md"))
WRITTEN = {ROOT / "docs" / name: page() for name, page in reference.PAGES.items()}
"""What `make docs` adds to the site."""
TEXTS = {path: path.read_text() for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *SITE)} | WRITTEN
PAGES = [*TEXTS]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""Language and content."""
FILE = re.compile(r"^```toml\n# (\w+\.toml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?: {4})?(distill [a-z].*)$", re.MULTILINE)
PACKAGES = ("distill", "teacher_service", "student_trainer", "sync")
SOURCES = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]


def test_the_site_has_every_page_once() -> None:
    nav = re.findall(r"[\w/-]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == sorted(str(path.relative_to(ROOT / "docs")) for path in {*SITE, *WRITTEN})


def _anchors(path: Path) -> set[str]:
    """Of headings, as both GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", TEXTS[path]), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_a_file_and_a_heading(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", BLOCK.sub("", TEXTS[path]))
    places = [((path.parent / file).resolve() if file else path, anchor) for file, anchor in links]
    assert not [place for place, _ in places if not (place.exists() or place in TEXTS)]
    assert not [f"{place}#{anchor}" for place, anchor in places if anchor and anchor not in _anchors(place)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_code_blocks_are_whole(path: Path) -> None:
    for language, text in BLOCK.findall(TEXTS[path]):
        if language == "python":
            compile(text, str(path), "exec")
        elif language == "toml":
            tomllib.loads(text)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_command_line_takes_what_a_page_types(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its overrides, over a file of configs/ or one that a tutorial has written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for page in SITE:
        for name, text in FILE.findall(page.read_text()):
            (tmp_path / name).write_text(text)
    for line in COMMAND.findall(TEXTS[path].replace("\\\n", "")):
        arguments = reference.parsed(shlex.split(line, comments=True))
        if (config := arguments.get("config")) is not None and config.is_file():
            load(config, arguments["overrides"])


def _is_key(key: str) -> bool:
    """Whether a configuration may hold it; what free-form tables and lists hold is not looked at."""
    annotation: Any = RunConfig
    for part in key.split("."):
        if not sections(annotation):
            return get_origin(annotation) is dict
        _, annotation = within(annotation, part)
    return annotation is not None


@pytest.mark.parametrize("path", [ROOT / "README.md", *SITE], ids=lambda path: path.name)
def test_the_keys_that_a_page_names_exist(path: Path) -> None:
    """In coming-from.md those of the last column, which are ours."""
    text = path.read_text()
    if path.name == "coming-from.md":
        text = "\n".join(line.split("|")[-2] for line in text.splitlines() if line.startswith("|"))
    named = re.findall(
        rf"`((?:{'|'.join(RunConfig.model_fields)})\.(?!(?:py|db)`)[a-z_][\w.]*)(?: = [^`]*)?`", text
    )
    assert not [key for key in named if not _is_key(key)]


def test_every_message_of_the_troubleshooting_page_is_in_the_source() -> None:
    nodes = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    said = "\n".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) >= 30
    assert not [message for message in messages for part in message.split("…") if part not in said]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(path: Path) -> None:
    pattern = r"`((?:configs|docs|tests|distill|sync|teacher_service|student_trainer)/[\w./-]+\.\w+)`"
    named = re.findall(pattern, TEXTS[path])
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_speeds_that_the_readme_claims_are_those_of_the_published_data() -> None:
    times = {}
    for size, report in json.loads((ROOT / "docs/data/peers_real.json").read_text()).items():
        speed = {side: figures["trained_per_second"] for side, figures in report["medians"].items()}
        times[size] = {side: f"{speed['ours'] / speed[side]:.1f}" for side in ("TRL", "loop")}
    large, real, text = times["large"], times["real"], " ".join(TEXTS[ROOT / "README.md"].split())
    assert f"{real['TRL']} times TRL's tokens per second at 113 M parameters, {large['TRL']} at 14 M" in text
    assert f"{real['loop']} and {large['loop']} times those of a plain loop of vLLM and PyTorch" in text


def test_the_architecture_page_names_every_route() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    told = set(re.findall(r"`(?:GET|POST) (/[^`\[]+)", page))
    routes = {route for path in SOURCES for route in re.findall(r'Route\("([^"]+)"', path.read_text())}
    replica = (ROOT / "sync/vllm/middleware.py").read_text()
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
    there = {file: set(_definitions(ast.parse((ROOT / file).read_text()))) for file, _ in path}
    assert not [f"{file}:{name}" for file, name in path if name not in there[file]]


def test_the_drawing_of_a_rollout_names_types_and_folders_that_exist() -> None:
    words = re.findall(r">([^<]+)<", (ROOT / "docs/images/rollout.svg").read_text())
    types = {word for word in words if re.fullmatch(r"[A-Z]\w+", word)}
    folders = {name for word in words for name in re.findall(r"[a-z_]+(?:/[a-z_]+)*/(?![a-z])", word)}
    classes = {name for path in SOURCES for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(), re.M)}
    assert len(types) >= 7
    assert types <= classes
    assert not [name for name in folders if not any((ROOT / at / name).is_dir() for at in ("", "distill"))]


def test_the_live_picture_shows_a_run_as_it_was_in_its_middle(tmp_path: Path) -> None:
    folder, console = run_of_letters(tmp_path).run_dir, Console(file=StringIO(), width=screens.COLUMNS)
    rows = [{"time": float(step), "step": step, "train/rows": 8.0} for step in range(1, 7)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text('{"seconds": {"total": 12.0, "distill": 8.0}}')
    console.print(screens.live(folder))
    assert "step 3 of 6, 0:00:00 ago, 0:00:03 left, 0:00:06 elapsed" in console.file.getvalue()
