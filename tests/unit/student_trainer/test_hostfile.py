"""Hostfiles: what is refused before the launcher would go wrong, and what reaches the other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from student_trainer.launch import check_reach, read_hosts, write_environment
from sync.base.address import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, token_from_environment
from sync.base.errors import ConfigError

LOOPBACK, REACHED = "http://127.0.0.1:8000", "http://10.0.0.1:8000"


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_text(text)
    return path


def test_the_machines_of_a_hostfile_are_read(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# two machines\n\nnode-1 slots=8\n  node-2   slots=4  # half of it\n")
    assert read_hosts(path) == {"node-1", "node-2"}


def test_a_missing_hostfile_is_refused_and_not_taken_for_this_machine_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_hosts(tmp_path / "none")


def test_other_machines_cannot_use_a_loopback_address_or_a_token_of_this_process(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "node-1 slots=8\nnode-2 slots=8\n")
    with pytest.raises(ConfigError, match=r"this machine's loopback: set controller\.host"):
        check_reach(path, LOOPBACK, {})
    with pytest.raises(ConfigError, match=f"set {TOKEN_FILE_VARIABLE} to its path"):
        check_reach(path, REACHED, {TOKEN_VARIABLE: "secret"})
    check_reach(path, REACHED, {TOKEN_FILE_VARIABLE: "/shared/token"})
    check_reach(hostfile(tmp_path, "localhost slots=8\n"), LOOPBACK, {TOKEN_VARIABLE: "secret"})


def test_settings_travel_and_secrets_do_not(tmp_path: Path) -> None:
    told = {"TOKENIZERS_PARALLELISM": "false", "KEYS_FILE": "x", TOKEN_FILE_VARIABLE: "/shared/token"}
    path = write_environment(tmp_path / "trainer.env", told)
    assert path.read_text() == (
        f"TOKENIZERS_PARALLELISM=false\nKEYS_FILE=x\n{TOKEN_FILE_VARIABLE}=/shared/token\n"
    )
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "password"):
        with pytest.raises(ConfigError, match=f"trainer.env.{name} looks like a secret"):
            write_environment(tmp_path / "refused.env", {name: "x"})
    with pytest.raises(ConfigError, match="line break"):
        write_environment(tmp_path / "refused.env", {"A": "1\nB=2"})
    assert not (tmp_path / "refused.env").exists()


def test_the_token_is_read_from_a_file_when_the_variable_is_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text("of the file\n")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))
    assert token_from_environment() == "of the file"
    monkeypatch.setenv(TOKEN_VARIABLE, "of the process")
    assert token_from_environment() == "of the process"
    monkeypatch.delenv(TOKEN_VARIABLE)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        token_from_environment()
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        token_from_environment()


@pytest.mark.parametrize("secret", [b"of the \x00 process", "schlüssel".encode(), b"\xff\xfe", b"two\nlines"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: bytes
) -> None:
    path = tmp_path / "token"
    path.write_bytes(secret)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))
    with pytest.raises(ConfigError, match="has characters other than printable ASCII") as refused:
        token_from_environment()
    assert secret.decode("utf-8", "replace") not in str(refused.value)
    monkeypatch.setenv(TOKEN_VARIABLE, " of the process\n")
    assert token_from_environment() == "of the process"
