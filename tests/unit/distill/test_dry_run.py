"""`distill run --dry-run`: what would be started, without secrets, and nothing is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from command import left
from whole_run import over

from distill.hardware import Device
from distill.launch import supervise
from distill.preflight_checks import machine
from sync.base.address import TOKEN_VARIABLE

ROOT = Path(__file__).parents[3]
SECRETS = ("sesame-street", "hf_0123456789abcdefgh", "abc12")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run whose models nobody needs to read: the objective and the tolerance are given."""
    path = tmp_path / "run.toml"
    path.write_text(
        f'[run]\nname = "dry"\nfolder = "{tmp_path / "runs"}"\nsteps = 3\n'
        f'[student]\npath = "none"\nreplicas = 2\nport = 8100\n[student.env]\nHF_TOKEN = "{SECRETS[1]}"\n'
        'FORMAT = "{host}:%p"\nOPEN = "{"\nSETTINGS = "{\\"api_token\\": \\"abc\\"}"\n'
        '[teachers.t]\npath = "other"\n[prompts]\ntype = "jsonl"\npath = "rows.jsonl"\n'
        '[objective]\ntype = "sampled"\n[preflight]\nmismatch_tolerance = 0.02\n[rollout]\nmax_tokens = 8\n'
        f'[trainer]\nranks = 2\ndeepspeed = "{ROOT / "configs/deepspeed/zero3_cpu.json"}"\n'
        f'[weights.store]\ntype = "object"\nurl = "s3://b/p"\noptions = {{secret_key = "{SECRETS[2]}"}}\n'
    )
    return path


def test_configuration_and_commands_are_printed_and_nothing_is_started(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(supervise.Supervisor, "start", refuse)
    monkeypatch.setenv(TOKEN_VARIABLE, SECRETS[0])
    figures, cores = file.parent / "dry.json", Device("cpu", 100.0, 1.0, 0.0, 128, 0.4, 0.5, single=80.0)
    monkeypatch.setattr(machine, "core", lambda: cores)
    monkeypatch.setattr(machine, "installed_for_cpu", lambda: True)
    words = over("rollout.batch=32", "run.precision=fastest", "teachers.t.dtype=bfloat16")
    assert left("run", str(file), "--dry-run", "--json", str(figures), *words) == 0
    shown = capsys.readouterr().out
    assert not (file.parent / "runs").exists()
    found = json.loads(figures.read_text())
    assert found["config"]["rollout"]["batch"] == 32
    assert found["config"]["student"]["dtype"] == found["config"]["teachers"]["t"]["dtype"] == "float32"
    assert json.loads(shown[: shown.index("\n}\n") + 2]) == found["config"]
    names = ["student-0", "student-1", "teacher-t", "evaluator", "trainer"]
    assert [command["name"] for command in found["commands"]] == names
    first, second, teacher, _, trainer = found["commands"]
    assert {"--port=8100", "--model=none", "--dtype=float32"} <= {*first["argv"]}
    assert "--port=8101" in second["argv"]
    role = file.parent / "runs/dry/roles/teacher-t.json"
    assert teacher["argv"][1:5] == ["-m", "teacher_service", "--config", str(role)]
    assert trainer["argv"][-1] == str(file.parent / "runs/dry/roles/trainer.json")
    assert str(file.parent / "runs/dry/mirrors/student-0") in first["env"]["DISTILL_REPLICA"]
    own = [first["env"][name] for name in ("FORMAT", "OPEN", "SETTINGS")]  # which need not be JSON
    assert own == ["{host}:%p", "{", '{"api_token": "(hidden)"}']
    for secret in SECRETS:
        assert secret not in shown
        assert secret not in figures.read_text()


@pytest.mark.parametrize(
    ("cluster", "replicas"),
    [('type="ray"', 2), ('type="slurm", cpus_per_node=8, replica_partition="spare"', 0)],
)
def test_on_a_cluster_the_commands_are_those_of_its_machines(
    file: Path, capsys: pytest.CaptureFixture[str], cluster: str, replicas: int
) -> None:
    """Replicas on a partition of their own are in jobs that Slurm starts."""
    assert left("run", str(file), "--dry-run", "--set", f"cluster={{{cluster}}}") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("distill ")]
    folder = file.parent / "runs/dry"
    assert lines == [
        *(f"distill student {folder} --index {index}" for index in range(replicas)),
        f"distill teacher {folder} --name t --index 0",
        f"distill evaluator {folder}",
        f"distill train {folder}",
    ]
