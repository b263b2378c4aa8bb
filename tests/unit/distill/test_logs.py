"""`distill logs`: the last lines of every role's log, then those that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill.cli.main import main, role_lines
from distill.launch.supervise import last_lines


def test_lines_of_all_roles_or_of_one_stand_behind_the_roles_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "trainer.log").write_text("one\ntwo\nthree\n")
    (folder / "student-0.log").write_text("up\n")
    for words, expected in (
        ([], ["student-0    up", "trainer      two", "trainer      three"]),
        (["trainer"], ["trainer      two", "trainer      three"]),
    ):
        with pytest.raises(SystemExit, match="0"):
            main(["logs", str(tmp_path), *words, "-n", "2"])
        assert capsys.readouterr().out.splitlines() == expected
    with pytest.raises(SystemExit, match="2"):
        main(["logs", str(tmp_path), "teacher"])
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("logs holds no log of teacher: roles with a log are student-0, trainer")


def test_as_many_lines_as_are_asked_for_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("".join(f"{number} {'x' * 100}\n\n" for number in range(3000)))
    for count in (1, 150, 2999, 3000, 5000):
        numbers = [int(line.split()[0]) for line in last_lines(path, count)]
        assert numbers == [*range(3000)][-count:]
    assert last_lines(tmp_path / "none.log") == []


def test_whole_lines_follow_and_those_of_a_role_that_starts_later(tmp_path: Path) -> None:
    trainer = tmp_path / "trainer.log"
    trainer.write_text("one\nhal")
    lines = role_lines(tmp_path, "", 1, follow=True)
    assert next(lines) == "trainer      hal"
    with trainer.open("a") as file:
        file.write("f\nthree\nfo")
    (tmp_path / "student-0.log").write_text("up\n")
    assert [next(lines) for _ in range(3)] == ["student-0    up", "trainer      f", "trainer      three"]
    with trainer.open("a") as file:
        file.write("ur\n")
    assert next(lines) == "trainer      four"
