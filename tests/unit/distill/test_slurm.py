"""Command lines of steps, scripts of jobs, and how a job ends; Slurm's commands are fakes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ports import free_port
from reference import parsed
from small_config import make_config
from waiting import until

from distill import guardian
from distill.config import RunConfig
from distill.config.cluster import SlurmCluster
from distill.launch.cluster import GANG_WAIT_SECONDS, Slurm, cpus_of
from distill.launch.slurm import job, step
from distill.preflight_checks.placement import Node
from distill.topology import Process
from sync.base.address import CONTROLLER_FILE
from sync.base.errors import ConfigError, RemoteError

ROOT = Path(__file__).parents[3]
FOUR = SlurmCluster(type="slurm", nodes=4, gpus_per_node=8, cpus_per_node=64)
JOB = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "gpu[1-4]",
    "SLURM_JOB_CPUS_PER_NODE": "64(x4)",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURMD_NODENAME": "gpu1",
}
RECORD = """#!{python}
import json, os, pathlib, sys
said = {{"argv": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]], "environment": dict(os.environ)}}
with open("{folder}/calls", "a") as file:
    file.write(json.dumps(said) + "\\n")
{rest}
"""
ANSWERS = {
    "scontrol": 'print("gpu1 gpu2 gpu3 gpu4" if "hostnames" in sys.argv else "NodeAddr=127.0.0.1")',
    "sbatch": 'print("4711;cluster")',
    "scancel": "",
}
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
"$@" &
wait
"""
"""A task outlives it when it is killed, as Slurm's own do."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Puts Slurm's commands on PATH, and this process into JOB; returns the command lines so far."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, rest in ANSWERS.items():
        write_program(programs / name, RECORD.format(python=sys.executable, folder=tmp_path, rest=rest))
    write_program(programs / "srun", SRUN)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "DISTILL_"))]:
        monkeypatch.delenv(name)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    return lambda: [one["argv"] for one in calls(tmp_path)]


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def calls(folder: Path) -> list[dict[str, Any]]:
    path = folder / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("process", "names", "gpus_per_node", "words"),
    [
        (Process("student-0", 2), "gpu3", 8, "--exact --gres=gpu:2 --cpus-per-task=16"),
        (Process("evaluator"), "gpu1", 8, "--overlap --cpus-per-task=64 --gres=none"),
        (Process("evaluator"), "gpu1", 0, "--overlap --cpus-per-task=64"),
        (Process("trainer", 8, 2), "gpu2,gpu3", 8, "--exact --gres=gpu:8 --cpus-per-task=64"),
    ],
    ids=["GPUs and their share of CPUs", "no GPU and all CPUs", "a cluster without gres", "two machines"],
)
def test_a_process_is_a_step_that_takes_what_it_needs(
    slurm, process: Process, names: str, gpus_per_node: int, words: str
) -> None:
    engine = Slurm(FOUR.model_copy(update={"gpus_per_node": gpus_per_node}))
    nodes = [node for node in engine.nodes if node.name in names]
    ours = [sys.executable, "-P", "-m", step.MODULE]
    assert engine.client(process, nodes, ["distill", "student"], {"DISTILL_HIDDEN": "s3cret"}) == [
        *(*ours, step.LAUNCH, "srun", f"--job-name={process.name}", f"--nodelist={names}"),
        *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", *words.split()),
        *("--mem=0", "--mpi=none", "--export=ALL", "--input=none", "--unbuffered", "--kill-on-bad-exit=1"),
        *(f"--wait={GANG_WAIT_SECONDS}", *ours, step.GUARD, "distill", "student"),
    ]


def test_the_machine_of_the_controller_comes_first(slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Slurm(FOUR).nodes[0] == Node("gpu1", 8, 64)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu3")
    assert [node.name for node in Slurm(FOUR).nodes] == ["gpu3", "gpu1", "gpu2", "gpu4"]


def test_cpus_are_read_as_slurm_writes_them() -> None:
    assert cpus_of("64(x3),32,8(x2)") == [64, 64, 64, 32, 8, 8]


@pytest.mark.parametrize(
    ("nodes", "variable", "value", "words"),
    [
        (4, "SLURM_JOB_NODELIST", "", "in no Slurm job"),
        (4, "SLURM_GPUS_ON_NODE", "4", "cluster.gpus_per_node = 8, and the job has 4"),
        (5, "SLURM_GPUS_ON_NODE", "8", r"cluster.nodes = 5, and the job has 4 \(gpu\[1-4\]\)"),
    ],
)
def test_a_job_that_cannot_hold_the_run_is_refused(
    slurm, monkeypatch: pytest.MonkeyPatch, nodes: int, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=words):
        Slurm(FOUR.model_copy(update={"nodes": nodes}))


# --- both ends of a step

TASK = """
import pathlib, signal, subprocess, sys, time
def leave(*_):
    print("told", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, leave)
below = [subprocess.Popen(["sleep", "600"], start_new_session=new).pid for new in (False, True)]
print("up", *below, flush=True)
time.sleep(600)
"""


def launched(engine: Slurm, role: list[str]) -> tuple[subprocess.Popen[str], list[int]]:
    """A step that runs `role`, and the processes below it, as its first line says."""
    line = engine.client(Process("student-0", 1), [engine.nodes[0]], role, {})
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment)
    return running, [int(word) for word in running.stdout.readline().split()[1:]]


def test_term_reaches_the_command_and_its_status_comes_back(slurm) -> None:
    """srun itself would kill it. Who connects without the step's word is told nothing; the step goes on."""
    running, below = launched(Slurm(FOUR), [sys.executable, "-c", TASK])
    with running:
        (port,) = {one.laddr.port for one in psutil.Process(running.pid).net_connections() if not one.raddr}
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"x" * 32)
            stranger.settimeout(600)
            assert stranger.recv(1) == b""
        running.terminate()
        assert running.wait(600) == 0  # the fake srun's; see the integration tests for Slurm's
        assert running.stdout.read() == "told\n"
    until(lambda: not any(map(psutil.pid_exists, below)))


def test_nothing_below_a_step_outlives_its_client(slurm) -> None:
    """Both are killed at once, the client and srun; the task, which nothing else would end, notices."""
    running, below = launched(Slurm(FOUR), [sys.executable, "-c", TASK])
    with running:
        assert all(map(psutil.pid_exists, below))
        for process in [psutil.Process(running.pid), *psutil.Process(running.pid).children()]:
            process.kill()
        until(lambda: not any(map(psutil.pid_exists, below)))


def test_a_guard_without_its_client_runs_nothing(tmp_path: Path) -> None:
    line = [sys.executable, "-P", "-m", step.MODULE, step.GUARD, "touch", str(tmp_path / "ran")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), step.LINK_VARIABLE: f"{free_port()}:word"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, (tmp_path / "ran").exists()) == (1, False)
    assert "must reach each other's ports" in done.stderr


def test_a_guard_that_is_told_to_end_as_it_joins_ends_its_command() -> None:
    """As on the machine of several that was slow to start."""
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        line = [sys.executable, "-P", "-m", step.MODULE, step.GUARD, "sleep", "600"]
        link = {step.LINK_VARIABLE: f"{launcher.getsockname()[1]}:word"}
        guard = subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(ROOT), **link})
        with launcher.accept()[0] as joined:
            joined.sendall(guardian.ASK)
            assert guard.wait(600) == 128 + signal.SIGTERM


# --- what a job does ----------------------------------------------------------------------------------------

ROLE = """
import os, signal, sys, time
asked = []
def ask(*_):
    asked.append(1)
    open("{folder}/told", "w")
signal.signal(signal.SIGTERM, ask)
open("{folder}/started", "a").write(" ".join(sys.argv[1:]) + "\\n")
deadline = time.monotonic() + {seconds}
while not asked and time.monotonic() < deadline:
    time.sleep(0.02)
stopped = bool(asked)
open("{folder}/over", "w")
time.sleep(0.5)  # a second signal would come now
while {held} and not os.path.exists("{folder}/let go"):
    time.sleep(0.02)
open("{folder}/asked", "a").write(f"{{len(asked)}}\\n")
sys.exit(130 if stopped else {status})
"""


@pytest.fixture
def started(slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts a job's program with a stand-in for `distill`; returns when the stand-in runs.

    `held`: the stand-in ends when there is a file `let go`, not before.
    """

    def start(
        *words: str, seconds: float = 600.0, status: int = 0, held: bool = False
    ) -> subprocess.Popen[bytes]:
        role = tmp_path / "role.py"
        role.write_text(ROLE.format(folder=tmp_path, seconds=seconds, status=status, held=held))
        program = (
            "import sys; from distill.launch.slurm import job\n"
            f"job.DISTILL = (sys.executable, {str(role)!r})\n"
            "sys.exit(job.main(sys.argv[1:]))"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_MEM_PER_NODE": "9"}
        running = subprocess.Popen([sys.executable, "-c", program, *words], env=environment)
        until((tmp_path / "started").exists)
        return running

    return start


def test_a_warned_run_is_stopped_once_and_requeued(slurm, started, tmp_path: Path) -> None:
    running = started(job.RUN, str(tmp_path), "--", "run.toml")
    running.send_signal(signal.SIGUSR1)
    running.send_signal(signal.SIGUSR1)  # it may come twice, and `distill run` ends at once at the second
    assert running.wait(600) == 130
    assert (tmp_path / "asked").read_text() == "1\n"
    assert slurm() == [["scontrol", "requeue", "17"]]


@pytest.mark.parametrize(
    ("number", "seconds", "left", "status"),
    [(signal.SIGTERM, 600, 0, 130), (signal.SIGUSR1, 0, 0, 0), (None, 0, 2, 2)],
    ids=["stopped for good", "complete", "failed"],
)
def test_a_run_that_is_stopped_for_good_complete_or_failed_is_not_requeued(
    slurm, started, tmp_path: Path, number: signal.Signals | None, seconds: float, left: int, status: int
) -> None:
    running = started(job.RUN, str(tmp_path), "--", "run.toml", seconds=seconds, status=left, held=True)
    until(lambda: seconds or (tmp_path / "over").exists())
    if number is not None:
        running.send_signal(number)
        until((tmp_path / "told").exists)  # a stand-in that is leaving would be killed by it
    (tmp_path / "let go").touch()
    assert running.wait(600) == status
    assert slurm() == []


def test_a_run_goes_on_where_its_folder_holds_one(slurm, started, tmp_path: Path) -> None:
    assert started(job.RUN, str(tmp_path), "--", "run.toml", seconds=0).wait(600) == 0
    (tmp_path / "run.db").touch()
    assert started(job.RUN, str(tmp_path), "--", "run.toml", "--set", "a=1", seconds=0).wait(600) == 0
    lines = (tmp_path / "started").read_text().splitlines()
    assert lines == ["run run.toml", "run run.toml --set a=1 --resume"]


def test_the_array_of_replicas_lives_as_long_as_the_run(slurm, started, tmp_path: Path) -> None:
    array = ["--array", "distill-x-replicas", "replicas.sh"]
    (tmp_path / CONTROLLER_FILE).touch()  # of an earlier start: replicas would read its configuration
    running = started(job.RUN, str(tmp_path), *array, "--", "run.toml", held=True)
    cancel = ["scancel", "--name=distill-x-replicas"]
    assert slurm() == [cancel, ["sbatch", "replicas.sh"]]
    assert not (tmp_path / CONTROLLER_FILE).exists()
    assert not [name for name in calls(tmp_path)[1]["environment"] if name.startswith("SLURM_")]
    running.terminate()
    until(lambda: slurm()[2:] == [cancel])  # before the run has ended, which may be killed for its time
    (tmp_path / "let go").touch()
    assert running.wait(600) == 130


def test_an_array_that_is_refused_ends_the_job(slurm, tmp_path: Path, monkeypatch, capfd) -> None:
    write_program(tmp_path / "bin/sbatch", "#!/bin/sh\necho 'Invalid partition' >&2; exit 1\n")
    assert job.main([job.RUN, str(tmp_path), "--array", "name", "replicas.sh", "--", "run.toml"]) == 1
    said = capfd.readouterr().err
    assert "Invalid partition" in said
    assert "the array of replicas cannot be submitted" in said


def test_a_replica_waits_for_its_run_and_is_requeued_until_the_run_ends(slurm, started, tmp_path) -> None:
    (tmp_path / CONTROLLER_FILE).write_text('{"url": "http://127.0.0.1:1"}')
    running = started(job.REPLICA, str(tmp_path), "--", "--index", "3")
    running.send_signal(signal.SIGUSR1)  # preempted
    assert running.wait(600) == 130
    assert started(job.REPLICA, str(tmp_path), "--", "--index", "3", seconds=0, status=9).wait(600) == 9
    assert slurm() == [["scontrol", "requeue", "17"]] * 2
    ended = started(job.REPLICA, str(tmp_path), "--", "--index", "3")
    until(lambda: len((tmp_path / "started").read_text().splitlines()) == 3)
    ended.terminate()  # scancel
    assert ended.wait(600) == 130
    replaced = started(job.REPLICA, str(tmp_path), "--", "--index", "3", seconds=0, status=3)
    assert replaced.wait(600) == 3
    assert len(slurm()) == 2
    assert {*(tmp_path / "started").read_text().splitlines()} == {f"student {tmp_path} --index 3"}


# --- scripts ------------------------------------------------------------------------------------------------


def on_slurm(folder: Path, cluster: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    run = {"name": "run", "steps": 6, "folder": folder, "grace_seconds": 100.5, **sections.pop("run", {})}
    of_four = {"type": "slurm", "nodes": 4, "gpus_per_node": 8, "cpus_per_node": 64}
    return make_config(run=run, cluster={**of_four, **cluster}, **sections)


def options(script: Path) -> list[str]:
    lines = script.read_text().splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def last_line(script: Path) -> list[str]:
    subprocess.run(["bash", "-n", str(script)], check=True)
    return shlex.split(script.read_text().splitlines()[-1])


def test_the_script_of_a_job_says_what_the_configuration_says(slurm, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    further = {"partition": "long", "account": "acme", "sbatch": ["--constraint=h100"]}
    config = on_slurm(tmp_path / "runs", {**further, "setup": "module load cuda", "time": "2-12"})
    written, _ = job.write(config, Path("run.toml"), ["run.steps=7"])
    folder = tmp_path / "runs/run/slurm"
    assert written == folder / "job.sh"
    assert options(written) == [
        *("--job-name=distill-run", "--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=64"),
        *("--gres=gpu:8", "--mem=0", f"--output={folder}/job-%j.log", "--partition=long", "--time=2-12"),
        *("--account=acme", f"--chdir={tmp_path}", "--requeue", "--signal=B:USR1@131"),
        *("--open-mode=append", "--constraint=h100"),
    ]
    command = [str(tmp_path / "run.toml"), "--set", "run.steps=7"]
    assert last_line(written) == [
        *("exec", sys.executable, "-P", "-m", job.MODULE, job.RUN, str(tmp_path / "runs/run"), "--", *command)
    ]
    assert parsed(["distill", "run", *command])["overrides"] == ["run.steps=7"]
    text = written.read_text()
    assert text.index("trap '' USR1") < text.index("module load cuda") < text.index("exec ")
    token = folder / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert f"export DISTILL_TOKEN_FILE={token}\n" in text
    assert token.read_text().strip() not in text
    before = token.read_text()
    job.write(config, Path("run.toml"), [])
    assert token.read_text() == before, "servers of a run that is submitted again have this one"


def test_a_token_that_is_set_is_kept(slurm, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine").write_text("mine\n")
    monkeypatch.setenv("DISTILL_TOKEN_FILE", str(tmp_path / "mine"))
    text = job.write(on_slurm(tmp_path, {}), Path("run.toml"), [], out=tmp_path / "out")[0].read_text()
    assert f"export DISTILL_TOKEN_FILE={tmp_path}/mine\n" in text
    assert not (tmp_path / "out/token").exists()
    monkeypatch.delenv("DISTILL_TOKEN_FILE")
    monkeypatch.setenv("DISTILL_TOKEN", "in the environment, which sbatch keeps")
    text = job.write(on_slurm(tmp_path, {}), Path("run.toml"), [], out=tmp_path / "out")[0].read_text()
    assert "DISTILL_TOKEN" not in text
    assert not (tmp_path / "out/token").exists()


def test_replicas_on_a_partition_of_their_own_are_an_array(slurm, tmp_path: Path) -> None:
    student = {"path": "student", "replicas": 6, "engine_args": {"tensor-parallel-size": 2}}
    config = on_slurm(tmp_path, {"nodes": 1, "replica_partition": "spare"}, student=student)
    written, lines = job.write(config, Path("run.toml"), [])
    first = "machine 0: evaluator (1 GPU), teacher-t (1 GPU), trainer (2 GPUs)"
    assert lines == [first, "partition spare: 6 replicas"]
    replicas = written.with_name("replicas.sh")
    name, *rest = options(replicas)
    assert rest[:6] == [
        *("--array=0-5", "--nodes=1", "--ntasks=1", "--cpus-per-task=16", "--gres=gpu:2"),
        f"--output={tmp_path}/run/slurm/replica-%a.log",
    ]
    assert {"--partition=spare", "--requeue", "--signal=B:USR1@131"} <= {*rest}
    assert last_line(replicas)[5:-1] == [job.REPLICA, str(tmp_path / "run"), "--", "--index"]
    assert last_line(replicas)[-1] == "$SLURM_ARRAY_TASK_ID"
    array = last_line(written)[7:10]
    assert array == ["--array", name.removeprefix("--job-name="), str(replicas)]
    other, _ = job.write(on_slurm(tmp_path / "b", {"replica_partition": "spare"}), Path("run.toml"), [])
    assert last_line(other)[8] != array[1], "another run of the same name is not cancelled with it"


SPARE = {"replica_partition": "spare"}


@pytest.mark.parametrize(
    ("cluster", "sections", "overrides", "words"),
    [
        ({"nodes": 1, "gpus_per_node": 2}, {}, [], "student-0 needs 1 GPU, and the machines have left"),
        (SPARE, {"student": {"path": "s", "gpus": 9}}, [], "needs 9 GPUs, and .* left: a machine of spare 8"),
        ({}, {"student": {"path": "s", "devices": ["0"]}}, [], r"student.devices = \['0'\]: on a cluster"),
        ({}, {"trainer": {"devices": "0,1", "deepspeed": "x"}}, [], "leave it out, trainer.ranks is"),
        ({"time": "2"}, {}, [], "cluster.time = '2' is 120 s, and the job is told to end 131 s"),
        ({"time": "a day"}, {}, [], "cluster.time = 'a day' is no time limit"),
        ({"sbatch": ["--gpus-per-node=8"]}, {}, [], "cluster.sbatch has --gpus-per-node=8: leave it out"),
        ({}, {}, ["weights.store.options.secret_key=abcdefgh"], "holds a secret"),
        ({}, {"teachers": {"a": {"path": "a"}, "b": {"path": "b"}}}, [], "name the other's data sources"),
        (SPARE, {"student": {"path": "s", "urls": ["http://a:1"]}}, [], "urls names replicas that run"),
    ],
)
def test_what_cannot_work_is_refused(
    slurm, tmp_path: Path, cluster: dict[str, Any], sections: dict[str, Any], overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        job.write(on_slurm(tmp_path, cluster, **sections), Path("run.toml"), overrides)
    assert "abcdefgh" not in str(refused.value)
    assert not (tmp_path / "run/slurm/job.sh").exists()


def test_another_cluster_and_a_run_that_is_there_are_refused(slurm, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'cluster\.type = "local"'):
        job.write(make_config(), Path("run.toml"), [])
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.db").touch()
    with pytest.raises(ConfigError, match="holds a run already: go on with --resume"):
        job.write(on_slurm(tmp_path, {}), Path("run.toml"), [])
    assert job.write(on_slurm(tmp_path, {}), Path("run.toml"), [], resume=True)[0].is_file()


def test_submitting_says_which_job_it_is(slurm, tmp_path: Path, monkeypatch) -> None:
    assert job.submit(tmp_path / "job.sh") == "4711"
    assert slurm() == [["sbatch", "--parsable", str(tmp_path / "job.sh")]]
    write_program(tmp_path / "bin/sbatch", "#!/bin/sh\necho 'sbatch: error: Invalid account' >&2; exit 1\n")
    with pytest.raises(RemoteError, match="Invalid account"):
        job.submit(tmp_path / "job.sh")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"sbatch is not on this machine, for `sbatch .*job\.sh`"):
        job.submit(tmp_path / "job.sh")


@pytest.mark.parametrize(
    ("text", "seconds"),
    {"90": 5400, "1:30": 90, "24:00:00": 86400, "2-12": 216000, "1-0:30": 88200, "1-1:1:1": 90061}.items(),
)
def test_a_time_limit_is_read_as_slurm_reads_it(text: str, seconds: float) -> None:
    assert job.seconds_of(text) == seconds
