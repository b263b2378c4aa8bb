"""What the documents say is what the code does."""

import re
from pathlib import Path

import pytest

from distill import reference

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def test_the_configuration_page_is_written_from_the_classes() -> None:
    assert reference.PAGE.read_text() == reference.page(), "run: python -m distill.reference"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text())
    assert not [target for target in targets if not (path.parent / target).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(path: Path) -> None:
    pattern = r"`((?:configs|docs|tests|distill|sync|teacher_service|student_trainer)/[\w./-]+\.\w+)`"
    named = re.findall(pattern, path.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]
