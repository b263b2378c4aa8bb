"""The lock and the records of a run's folder, and the ports that a launcher hands out."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from small_config import LEAST

from distill.config.loading import merge, validate
from distill.evaluation.service import keep_best
from distill.launch.roles import Ports
from distill.launch.run_folder import RunFolder
from distill.quickstart import make_room
from student_trainer.checkpoint_files import latest, saved
from sync.base.errors import ConfigError
from sync.wire import Version
from sync.wire.server import join_port


def config(tmp_path: Path, **more: Any):
    return validate(merge(LEAST, {"run": {"folder": str(tmp_path)}} | more), "x")


def test_a_second_run_in_the_same_folder_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}")
    with RunFolder.open(config(tmp_path), resume=False), refused:
        RunFolder.open(config(tmp_path), resume=False)
    RunFolder.open(config(tmp_path), resume=False).close()


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("distill.launch.run_folder.fcntl.flock", flock)
    said = r"x cannot be locked \(Function not implemented\): mount .* with locks.* or set run\.folder"
    with pytest.raises(ConfigError, match=said):
        RunFolder.open(config(tmp_path), resume=False)


def test_a_folder_with_a_run_is_only_entered_to_resume_it(tmp_path: Path) -> None:
    with RunFolder.open(config(tmp_path), resume=False) as folder:
        (folder.path / "run.db").touch()
    with pytest.raises(ConfigError, match="go on with --resume"):
        RunFolder.open(config(tmp_path), resume=False)
    RunFolder.open(config(tmp_path), resume=True).close()


def test_an_earlier_quickstart_makes_room_unless_it_never_began(tmp_path: Path) -> None:
    settings = config(tmp_path)
    (tmp_path / "x").mkdir(exist_ok=True)
    make_room(settings)
    assert (tmp_path / "x").is_dir()
    (tmp_path / "x" / "run.db").write_text("x")
    make_room(settings)
    assert [path.name for path in tmp_path.iterdir()] == ["x.1"]


def test_there_is_nothing_to_resume_in_a_new_folder_and_one_that_cannot_be_made_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        RunFolder.open(config(tmp_path), resume=True)
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made \(Not a directory\)"):
        RunFolder.open(config(tmp_path / "file"), resume=False)


def test_a_port_in_use_and_an_address_of_another_machine_are_named_with_their_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Ports() as ports:
        number = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"student\.port: port {number} of 127.0.0.1 is in use"):
            ports.take("127.0.0.1", number, "student.port")
        with pytest.raises(ConfigError, match=r"student\.port: cannot listen on 203\.0\.113\.1"):
            ports.take("203.0.113.1", 0, "student.port")


def test_no_port_is_handed_out_twice_and_all_can_be_bound_afterwards() -> None:
    with Ports() as ports:
        numbers = [ports.take("127.0.0.1", 0, "x") for _ in range(50)]
    assert len(set(numbers)) == 50
    with socket.socket() as server:
        server.bind(("127.0.0.1", numbers[0]))


def test_nobody_takes_a_port_between_its_choice_and_its_server_nor_while_that_is_started_again() -> None:
    with Ports() as ports:
        number = ports.take("127.0.0.1", 0, "x")
        for _ in range(2):
            assert not any(taken(number, option) for option in ([], [socket.SO_REUSEADDR]))
            with join_port("127.0.0.1", number) as server:
                server.listen()
                assert not any(taken(number, option) for option in ([], [socket.SO_REUSEADDR]))
                with socket.create_connection(("127.0.0.1", number)) as client:
                    server.accept()[0].close()  # leaves a connection that lingers on the server's side
                    assert client.recv(1) == b""
                with pytest.raises(ConfigError, match="another server answers there"):
                    join_port("127.0.0.1", number)
    with Ports() as ports:
        assert ports.take("127.0.0.1", number, "x") == number


def taken(number: int, options: list[int]) -> bool:
    """Whether another program could listen on a port."""
    with socket.socket() as thief:
        for option in options:
            thief.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            thief.bind(("127.0.0.1", number))
        except OSError:
            return False
        return True


def test_the_best_model_is_replaced_whole(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    (tmp_path / "one" / "more").write_text("")
    keep_best(tmp_path / "one", tmp_path / "best")
    keep_best(tmp_path / "two", tmp_path / "best")
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["weights"]
    assert (tmp_path / "best" / "weights").read_text() == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "one", "two"]


def test_the_best_model_outlives_two_crashes_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".best.old").mkdir()  # the first crash was between the two renames
    (tmp_path / ".best.new").mkdir()
    monkeypatch.setattr(shutil, "copytree", lambda *_: sys.exit("killed"))
    with pytest.raises(SystemExit, match="killed"):
        keep_best(tmp_path / "two", tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("to", [Version(0, 4), None])
def test_a_rollback_never_leaves_latest_naming_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Version | None
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for version in (Version(0, 2), Version(0, 4), Version(1, 3), Version(1, 5)):
        (checkpoints / str(version)).mkdir(parents=True)
    (checkpoints / "latest").write_text(f"{Version(1, 5)}\n")
    named: list[str] = []

    def removing(path: Path) -> None:
        named.append(latest(checkpoints))
        path.rmdir()

    monkeypatch.setattr(shutil, "rmtree", removing)
    with (tmp_path / "lock").open("w") as lock:
        RunFolder(tmp_path, lock).set_back(to)
    assert set(named) == {str(to) if to else ""}
    assert [path.name for path in saved(checkpoints)] == (["L000-v00000002", "L000-v00000004"] if to else [])
