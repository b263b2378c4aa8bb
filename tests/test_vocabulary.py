"""Retired words stay retired: one term for each thing, as docs/glossary.md has it."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("distill", "teacher_service", "student_trainer", "sync")
SOURCES = sorted(path for name in (*PACKAGES, "tests") for path in (ROOT / name).rglob("*.py"))
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/glossary.md"})

IDENTIFIERS = re.compile(
    "awake|books|composed|composer|desk|feeder|fleets?|hung|judges?|marks|rehearsal|rehearse|roads?|scribe|"
    "seats?|stuck"
)
"""Words that no identifier and no module name contains."""
PHRASES = re.compile(
    r"\b(asked again|asks again|desks?|feeders?|fleets?|judges?|put aside|rehears\w*|roads?|scribes?|seats?|"
    r"(?:buffer|rollouts|seconds|staleness|tokens)/(?:late|max|mean|outstanding|train|trained\w*|generated\w*|wait)|"
    r"the student writes|the teacher marks|whom the trainer waits)\b",
    re.IGNORECASE,
)
"""What neither documents nor docstrings and comments say."""
PRONOUNS = frozenset({"found", "given", "held", "most", "one", "own", "wanted"})
"""What no variable or parameter of a package is called: its name says what it is."""


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def _tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(path.read_text()).readline)


def _odd_names(path: Path) -> list[str]:
    names = {token.string for token in _tokens(path) if token.type == tokenize.NAME} | {path.stem}
    names.discard("marks")  # pytest's own keyword
    return sorted(name for name in names if any(map(IDENTIFIERS.fullmatch, _words(name))))


def _odd_prose(path: Path) -> list[str]:
    """Comments and docstrings; other strings are data."""
    prose = [
        token.string
        for token in _tokens(path)
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and '"""' in token.string[:5])
    ]
    return [found.group() for text in prose for found in PHRASES.finditer(text)]


def test_no_identifier_holds_a_retired_word() -> None:
    odd = {str(path.relative_to(ROOT)): found for path in SOURCES if (found := _odd_names(path))}
    assert not odd


def _pronouns(path: Path) -> list[str]:
    """Lines that bind a pronoun; a field of a class is no variable."""
    tree = ast.parse(path.read_text())
    fields = {
        id(line.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
    }
    bound = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in fields]
    names = [(node.lineno, node.id) for node in bound if isinstance(node.ctx, ast.Store)]
    names += [(node.lineno, node.arg) for node in ast.walk(tree) if isinstance(node, ast.arg)]
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in names if name in PRONOUNS]


def test_a_variable_names_the_thing() -> None:
    packages = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES]
    assert not [line for path in packages if "bench" not in path.parts for line in _pronouns(path)]


def test_no_docstring_or_comment_holds_a_retired_word() -> None:
    here = Path(__file__)
    odd = {str(p.relative_to(ROOT)): found for p in SOURCES if p != here and (found := _odd_prose(p))}
    assert not odd


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_holds_a_retired_word(page: Path) -> None:
    assert not [found.group() for found in PHRASES.finditer(page.read_text())]
