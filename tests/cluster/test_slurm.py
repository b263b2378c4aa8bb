"""Jobs and steps of a real Slurm: four slurmd on this machine, two pretended GPUs each.

`make test-cluster` runs it where Debian's slurm-wlm and munge are installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from local_slurm import REQUEUE_SECONDS, LocalSlurm, local_slurm, missing
from run_on_letters import NAME, command
from small_config import make_config
from waiting import until
from whole_run import ROOT, ended_well, steps_of

from distill.launch.slurm import job

REASON = missing()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(900),
]
NODES, GPUS, CPUS = 4, 2, 8
IN_A_JOB = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from distill.config.cluster import SlurmCluster
from distill.preflight_checks.placement import place
from distill.topology import Process
from distill.launch.cluster import Slurm
engine = Slurm(SlurmCluster(type="slurm", nodes={nodes}, gpus_per_node={gpus}, cpus_per_node={cpus}))
def client(need, nodes, *role):
    argv = engine.client(need, nodes, [sys.executable, "-c", *role], {{}})
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
"""
"""A program inside a job: what `distill run` does with the engine."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSlurm]:
    with local_slurm(tmp_path_factory.mktemp("slurm"), NODES, GPUS, CPUS) as up:
        yield up


@pytest.fixture
def in_a_job(cluster: LocalSlurm, tmp_path: Path) -> Callable[[str], dict]:
    """Runs a program as a job of all machines; what it writes to `told`."""

    def run(program: str) -> dict:
        header = IN_A_JOB.format(nodes=NODES, gpus=GPUS, cpus=CPUS)
        (tmp_path / "program.py").write_text(f"{header}told = Path({str(tmp_path / 'told')!r})\n{program}")
        script = tmp_path / "job.sh"
        script.write_text(f"#!/bin/bash\nexec {sys.executable} {tmp_path}/program.py\n")
        options = [f"--nodes={NODES}", "--ntasks-per-node=1", f"--cpus-per-task={CPUS}", "--mem=0"]
        options += [f"--gres=gpu:{GPUS}", f"--output={tmp_path}/job.log"]
        job = submitted(cluster, script, *options)
        wait(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), 500, cluster, job)
        log = (tmp_path / "job.log").read_text()
        assert cluster.state(job) == "COMPLETED", log
        return json.loads((tmp_path / "told").read_text())

    return run


def called(cluster: LocalSlurm, *words: str) -> str:
    """What a command says that submits a job of ours."""
    env = cluster.environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, env=env, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def submitted(cluster: LocalSlurm, script: Path, *options: str) -> str:
    return called(cluster, "sbatch", "--parsable", *options, str(script)).strip()


def rival(cluster: LocalSlurm, folder: Path, nodes: int) -> None:
    """A short job that takes so many machines from those of the spare partition."""
    script = folder / "rival.sh"
    script.write_text("#!/bin/bash\nsleep 3\n")
    submitted(cluster, script, f"--nodes={nodes}", f"--cpus-per-task={CPUS}", "--output=/dev/null")


def wait(condition: Callable[[], object], seconds: float, cluster: LocalSlurm, job: str) -> float:
    """Seconds until it holds."""
    return until(condition, seconds, lambda: cluster.call("scontrol", "show", "job", job), poll_seconds=0.2)


def test_processes_are_where_they_were_placed_and_share_no_gpu(in_a_job) -> None:
    told = in_a_job(
        """
wanted = [Process("trainer", 2, 2), *(Process(f"student-{i}", 1) for i in range(3)), Process("evaluator")]
placed = place(wanted, engine.nodes)
role = '''
import json, os, sys, time
place = os.environ["SLURMD_NODENAME"], os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["SLURM_PROCID"]
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([os.environ["SLURM_JOB_NAME"], *place]) + "\\\\n")
while len(open(sys.argv[1]).readlines()) < 6:
    time.sleep(.1)                  # until all are there: nobody waits for another's CPUs, memory or GPUs
'''
running = [client(need, placed[need.name], role, str(told) + ".lines") for need in wanted]
told.write_text(json.dumps({
    "statuses": [one.wait() for one in running],
    "placed": {name: sorted(node.name for node in nodes) for name, nodes in placed.items()},
    "found": [json.loads(line) for line in Path(str(told) + ".lines").read_text().splitlines()],
}))
"""
    )
    assert told["statuses"] == [0] * 5
    where: dict[str, list[str]] = {}
    for name, node, _, _ in told["found"]:
        where.setdefault(name, []).append(node)
    assert {name: sorted(nodes) for name, nodes in where.items()} == told["placed"]
    gpus = [(node, gpu) for _, node, devices, _ in told["found"] for gpu in (devices or "").split(",") if gpu]
    assert len(gpus) == len(set(gpus)) == 2 * 2 + 3
    assert sorted(index for name, _, _, index in told["found"] if name == "trainer") == ["0", "1"]


ENDLESS = """'''
import signal, subprocess, sys, time
def leave(*_):
    open(sys.argv[1] + ".term", "w")
    sys.exit(7)
signal.signal(signal.SIGTERM, leave)
below = [subprocess.Popen(["sleep", "600"], start_new_session=new).pid for new in (False, True)]
open(sys.argv[1], "w").write(" ".join(map(str, below)))
time.sleep(600)
'''"""


def test_a_step_ends_with_its_client_however_that_ends(in_a_job, tmp_path: Path) -> None:
    """TERM reaches the role; a client that is killed with all of srun leaves nothing, and its GPU is free."""
    told = in_a_job(
        f"""
import psutil
pids, node, endless = str(told) + ".pids", engine.nodes[1], {ENDLESS}
def started(need=Process("student-0", 2), nodes=(node,)):
    Path(pids).unlink(missing_ok=True)
    began, running = time.monotonic(), client(need, nodes, endless, pids)
    while not Path(pids).exists() or not Path(pids).read_text():
        time.sleep(.01)
    return running, [int(word) for word in Path(pids).read_text().split()], time.monotonic() - began
def gone(below):
    began = time.monotonic()
    while any(map(psutil.pid_exists, below)):
        time.sleep(.01)
    return time.monotonic() - began
seconds = {{}}
running, below, _ = started()
running.terminate()
status = running.wait()
seconds["term"] = gone(below)
termed = Path(pids + ".term").exists()
running, below, seconds["again"] = started()
processes = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
for one in processes:
    one.kill()
seconds["kill"] = gone(below)
running, below, seconds["after kill"] = started()        # waits for both GPUs
running.kill()
gone(below)
told.write_text(json.dumps({{"status": status, "termed": termed, "killed": len(processes), **seconds}}))
"""
    )
    sys.stdout.write(f"{told}\n")
    assert (told["status"], told["termed"]) == (7, True)
    assert told["killed"] == 3, "the client, srun, and the helper that it forks"
    assert max(told["term"], told["kill"], told["after kill"]) < 120, "by itself it ends after 600 s"


def test_a_gang_ends_as_one(in_a_job) -> None:
    told = in_a_job(
        """
role = '''
import os, sys, time
time.sleep(0 if os.environ["SLURM_PROCID"] == sys.argv[1] else 600)
sys.exit(int(sys.argv[2]))
'''
statuses, seconds = [], []
for status in (3, 0):
    began = time.monotonic()
    statuses.append(client(Process("trainer", 1, 2), engine.nodes[1:3], role, "1", str(status)).wait())
    seconds.append(time.monotonic() - began)
told.write_text(json.dumps({"statuses": statuses, "seconds": seconds}))
"""
    )
    failed, well = told["statuses"]
    assert failed != 0
    assert well != 0, "the other was ended, not done"
    assert max(told["seconds"]) < 300, "by itself the other one ends after 600 s"


STAND_IN = """
import signal, sys, time
from distill.launch.slurm import job
job.DISTILL = (sys.executable, {role!r})
sys.exit(job.main(sys.argv[1:]))
"""
ROLE = """
import os, pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
def note(word):
    with open(folder / "notes", "a") as file:
        file.write(f"{{time.time():.1f}} {{word}} {{' '.join(sys.argv[1:])}}\\n")
def leave(*_):
    note("stopped")
    sys.exit(130)
signal.signal(signal.SIGTERM, leave)
note("started")
(folder / "run.db").touch()
(folder / "controller.json").write_text("{{}}")
while not (folder / "enough").exists():
    time.sleep(.1)
note("complete")
"""


def stand_in(cluster: LocalSlurm, folder: Path, **keys: object) -> tuple[Path, Callable[[str], int]]:
    """The script of a job whose `distill` only notes when it starts and stops; how often it noted a word."""
    role, program = folder / "role.py", folder / "program.py"
    on = {"type": "slurm", "nodes": 1, "cpus_per_node": CPUS, **keys}
    run = {"name": "run", "folder": folder, "steps": 1, "grace_seconds": 1.0}
    config = make_config(run=run, cluster=on, student={"path": "s", "replicas": 2})
    run_dir = config.run_dir
    script, _ = job.write(config, Path("run.toml"), [])
    role.write_text(ROLE.format(folder=str(run_dir)))
    program.write_text(STAND_IN.format(role=str(role)))
    for path in script.parent.glob("*.sh"):
        path.write_text(path.read_text().replace("-m distill.launch.slurm.job", str(program)))

    def noted(words: str) -> int:
        path = run_dir / "notes"
        return sum(words in line for line in path.read_text().splitlines()) if path.exists() else 0

    return script, noted


def test_a_preempted_job_stops_in_order_comes_back_and_goes_on(cluster: LocalSlurm, tmp_path: Path) -> None:
    script, noted = stand_in(cluster, tmp_path, nodes=NODES)
    job = submitted(cluster, script, "--partition=spare")
    wait(lambda: noted("started run"), 300, cluster, job)
    rival(cluster, tmp_path, NODES)
    wait(lambda: noted("stopped run"), 300, cluster, job)
    seconds = wait(lambda: noted("started run") == 2, 120, cluster, job)
    sys.stdout.write(f"back {seconds:.1f} s after the end, of which Slurm keeps it {REQUEUE_SECONDS} s\n")
    (tmp_path / "run/enough").touch()
    wait(lambda: cluster.state(job) == "COMPLETED", 300, cluster, job)
    assert (noted("started run"), noted("--resume"), noted("complete run")) == (2, 2, 1)
    assert (tmp_path / "run/slurm/token").stat().st_mode & 0o777 == 0o600


def test_replicas_come_and_go_and_end_with_the_run(cluster: LocalSlurm, tmp_path: Path) -> None:
    script, noted = stand_in(cluster, tmp_path, nodes=1, replica_partition="spare")
    job = submitted(cluster, script)
    wait(lambda: noted("started student") == 2, 300, cluster, job)
    rival(cluster, tmp_path, NODES - 1)
    wait(lambda: noted("stopped student") >= 1, 300, cluster, job)
    stopped = noted("stopped student")
    wait(lambda: noted("started student") == 2 + stopped, 120, cluster, job)
    assert noted("started run") == 1, "the run itself was not touched"
    cluster.call("scancel", "--batch", "--signal=TERM", job)
    wait(lambda: not cluster.call("squeue", "--noheader"), 300, cluster, job)
    assert (noted("stopped run"), noted("stopped student")) == (1, stopped + 2)
    assert cluster.state(job) == "FAILED"


def test_a_run_that_is_warned_in_the_middle_is_requeued_and_completes(
    cluster: LocalSlurm, tmp_path: Path
) -> None:
    """`distill slurm --submit`: vLLM, teacher and a ZeRO-3 rank on each of two machines, real all of them."""
    steps = 24
    over = ["trainer.nodes=2", "trainer.ranks=1"]
    over += [f'cluster={{type="slurm", nodes={NODES}, cpus_per_node={CPUS}, time="1:00:00"}}']
    _, _, _, _, *words = command(tmp_path, steps, *over)
    said = called(cluster, sys.executable, "-m", "distill.cli.main", "slurm", *words, "--submit")
    job = next(text.split()[1] for text in said.splitlines() if text.startswith("job "))
    run_dir = tmp_path / NAME

    def log() -> str:
        return (run_dir / f"slurm/job-{job}.log").read_text()

    def left(state: Sequence[str]) -> bool:
        assert cluster.state(job) != "FAILED", log()
        return cluster.state(job) not in state

    wait(lambda: left(()) and steps_of(run_dir) >= 6, 300, cluster, job)
    assert cluster.steps(job) == ["student-0", "teacher-only", "trainer"]
    before = steps_of(run_dir)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    wait(lambda: left(["RUNNING"]), 120, cluster, job)
    assert steps_of(run_dir) < steps
    wait(lambda: left(["PENDING", "COMPLETING"]), 300, cluster, job)
    wait(lambda: steps_of(run_dir) > before + 1, 300, cluster, job)
    wait(lambda: left(["RUNNING", "COMPLETING"]), 300, cluster, job)
    assert cluster.state(job) == "COMPLETED", log()
    ended_well(run_dir, steps)
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])]
