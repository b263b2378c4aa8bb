"""JSONL files are read back by whole lines; what a crash tore is left out, anything else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sync.base.errors import DataError
from sync.base.jsonl import read_lines


@pytest.mark.parametrize("torn", ["", '{"b": "', '{"b": "é"}', '{"b": "é"}\n', "{", "[1]"], ids=repr)
def test_what_a_crash_tore_is_left_out(tmp_path: Path, torn: str) -> None:
    """A file may end within a character; separators of Unicode are no ends of lines."""
    path, lines = tmp_path / "x.jsonl", '{"a": "\u2028\x85é"}\n{}\n'
    whole = [{"a": "\u2028\x85é"}, {}]
    for cut in range(len(torn.encode()) + 1):
        path.write_bytes(lines.encode() + torn.encode()[:cut])
        found = read_lines(path)
        assert found[:2] == whole
        assert found[2:] in ([], [{"b": "é"}])


def test_a_missing_or_empty_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert read_lines(tmp_path / "empty") == read_lines(tmp_path / "missing") == []


@pytest.mark.parametrize("line", [b"", b"\xff\xfe", b"3", b"null", b"{", b"[" * 100_000, b'{"a": 1} {}'])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n" + line + b"\n{}\n")
    with pytest.raises(DataError, match=r"x\.jsonl:2: .*; the file was altered"):
        read_lines(path)
