"""`distill kubernetes` writes what a cluster takes and what the run needs; no cluster is asked."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import yaml
from command import left
from ports import free_port
from reference import parsed
from waiting import until

from distill.config.loading import load, validate
from distill.launch import single_role
from distill.launch.kubernetes import Target, render
from distill.launch.roles import Ports
from sync.base.errors import ConfigError

ROOT = Path(__file__).parents[3]
SCHEMA = yaml.safe_load((ROOT / "tests/support/kubernetes_schema.yaml").read_text())
TOKEN = "t0ken-of-this-test"
EVERY_ROLE = """
[run]
name = "Every.Role"
steps = 10
grace_seconds = 90.5
restarts = 3

[student]
path = "Qwen/Qwen3-1.7B"
replicas = 4
chat_template = "chat.jinja"
engine_args = {tensor-parallel-size = 2}

[teachers.big_one]
path = "/runs/models/big"
engine = "vllm"
replicas = 2
route = ["rows"]
engine_args = {tensor_parallel_size = 4}
[teachers.itself]
path = "Qwen/Qwen3-1.7B"
follow_student_every = 1

[environments.guess]
environment = "games:guess"
processes = 3

[prompts]
type = "mixture"
[prompts.parts.episodes]
type = "environment"
environment = "guess"
[prompts.parts.rows]
type = "jsonl"
path = "rows.jsonl"

[rollout]
max_tokens = 64

[trainer]
ranks = 8
nodes = 2
deepspeed = "zero3.json"

[evaluation]
replica = {}
"""
COUNTS = {
    "controller": (1, 0),
    "student": (4, 2),
    "teacher-big-one": (2, 4),
    "teacher-itself": (1, 1),
    "environment-guess": (3, 0),
    "evaluation-replica": (1, 2),
    "evaluator": (1, 1),
    "trainer": (2, 8),
}
"""Job → its pods, and the GPUs of each: one for every section that has processes."""


class Rendered(NamedTuple):
    text: str
    objects: dict[str, Any]
    """By kind."""
    jobs: dict[str, Any]
    """Name → spec."""
    pods: dict[str, Any]
    """Name → spec of its Job's pods."""
    files: dict[str, str]

    def container(self, name: str) -> dict[str, Any]:
        (one,) = self.pods[name]["containers"]
        return one

    def words(self, name: str) -> list[str]:
        """The command of its pod 1."""
        return [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in self.container(name)["args"]]

    def mounts(self, name: str) -> dict[str, str]:
        """Folder in a pod → kind of its volume."""
        kinds = {v["name"]: next(kind for kind in v if kind != "name") for v in self.pods[name]["volumes"]}
        found = {one["mountPath"]: kinds[one["name"]] for one in self.container(name)["volumeMounts"]}
        assert set(kinds) == {one["name"] for one in self.container(name)["volumeMounts"]}
        return found


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration of every role, and what it names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTILL_TOKEN", TOKEN)
    (tmp_path / "run.toml").write_text(EVERY_ROLE)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "é 😀"}\n')
    (tmp_path / "zero3.json").write_text((ROOT / "configs/deepspeed/zero3_gpu.json").read_text())
    (tmp_path / "games.py").write_text("async def guess(): ...\n")
    return tmp_path


def rendered(*overrides: str, target: Target = Target("image"), path: Path = Path("run.toml")) -> Rendered:
    text = render(path, overrides, target)
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    jobs = {one["name"]: one["template"]["spec"] for one in objects["JobSet"]["spec"]["replicatedJobs"]}
    pods = {name: job["template"]["spec"] for name, job in jobs.items()}
    return Rendered(text, objects, jobs, pods, objects["ConfigMap"]["data"])


def refused(*overrides: str, target: Target = Target("image")) -> str:
    with pytest.raises(ConfigError) as caught:
        render(Path("run.toml"), overrides, target)
    return str(caught.value)


def closed(schema: Any) -> Any:
    """A schema that admits no property which it does not name."""
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return inner | {"additionalProperties": False} if "properties" in inner and "type" in inner else inner


# --- what a cluster checks


@pytest.mark.parametrize(
    "target",
    [Target("image"), Target("image", "team", "claim", gpus=False, secret="keys")],
    ids=["plain", "every option"],
)
def test_every_object_fits_the_schemas_of_kubernetes_and_jobset(target: Target) -> None:
    found = rendered(target=target)
    objects, volumes = found.objects, [volume for pod in found.pods.values() for volume in pod["volumes"]]
    claims = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes if volume["name"] == "run"}
    assert claims == {target.volume or "every-role"}
    kept = set() if target.volume else {"PersistentVolumeClaim"}
    assert objects.keys() == {"Secret", "ConfigMap", "JobSet"} | kept
    for kind, one in objects.items():
        jsonschema.Draft7Validator(closed(SCHEMA[kind])).validate(one)
        assert one["metadata"].get("namespace", "") == target.namespace
    wrong = objects["JobSet"] | {"spec": {**objects["JobSet"]["spec"], "replicas": 1}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(closed(SCHEMA["JobSet"])).validate(wrong)


def test_names_are_labels_of_dns_with_what_kubernetes_adds_to_them() -> None:
    found = rendered()
    name = found.objects["JobSet"]["metadata"]["name"]
    assert name == "every-role"
    names = [f"{name}-{job}-0-{spec['completions'] - 1}-abcde" for job, spec in found.jobs.items()]
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", one) for one in names)
    assert "63" in refused(f"run.name={'n' * 45}")
    assert "begin with a letter" in refused("run.name='2026'")
    assert "teacher-big-one" in refused("teachers.Big-One={path = 'Qwen/Qwen3-8B', route = ['x']}")
    assert "name the other's data sources" in refused("teachers.third={path = 'Qwen/Qwen3-8B'}")


# --- what the run needs


def test_every_role_has_its_pods_and_their_gpus() -> None:
    found = rendered()
    limits = {
        name: found.container(name).get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
        for name in found.jobs
    }
    assert {name: (job["parallelism"], limits[name]) for name, job in found.jobs.items()} == COUNTS
    assert all(job["completions"] == job["parallelism"] for job in found.jobs.values())
    without = rendered(target=Target("image", gpus=False))
    assert "nvidia.com/gpu" not in without.text


def test_the_command_line_takes_every_command_of_a_pod() -> None:
    found = rendered()
    commands = {name: (found.words(name)[1], parsed(found.words(name))) for name in found.pods}
    assert {str(options["config"]) for _, options in commands.values()} == {"/config/run.toml"}
    served = {"controller": "control", "trainer": "train", "teacher-itself": "teacher"}
    served |= {"teacher-big-one": "teacher", "environment-guess": "environment"}
    served |= {"evaluation-replica": "student"}
    assert {name: it[0] for name, it in commands.items()} == {name: served.get(name, name) for name in COUNTS}
    assert commands["teacher-big-one"][1]["name"] == "big_one"
    evaluating = [name for name, (_, options) in commands.items() if options.get("evaluation")]
    assert evaluating == ["evaluation-replica"]
    assert commands["student"][1]["index"] == commands["trainer"][1]["node"] == 1
    url = "http://every-role-controller-0-0.every-role:8000"  # pod 0 of job 0, in the JobSet's subdomain
    assert {options.get("controller") for _, options in commands.values()} == {None, url}
    assert tomllib.loads(found.files["run.toml"])["controller"]["url"] == url


def test_servers_answer_health_where_kubernetes_asks() -> None:
    found = rendered("run.start_seconds=605", "run.health_timeout_seconds=45")
    for name in COUNTS.keys() - {"trainer"}:
        one = found.container(name)
        port = parsed(found.words(name)).get("port", 8000)  # the controller's is in its file
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert one[probe]["httpGet"] == {"path": "/health", "port": port}
        probes = {key: one[key] for key in one if "Probe" in key}
        times = {key: probe["failureThreshold"] * probe["periodSeconds"] for key, probe in probes.items()}
        assert times == {"startupProbe": 610, "readinessProbe": 10, "livenessProbe": 50}
    assert not [key for key in found.container("trainer") if "Probe" in key]
    assert "livenessProbe" not in rendered("run.health_timeout_seconds=0").text


def test_each_role_has_its_own_restarts_and_the_controller_ends_the_run() -> None:
    found = rendered()
    run = found.objects["JobSet"]["spec"]
    assert run["successPolicy"]["targetReplicatedJobs"] == ["controller"]
    assert {rule["action"] for rule in run["failurePolicy"]["rules"]} == {"FailJobSet"}  # no feature gate
    limits = {name: job["backoffLimit"] for name, job in found.jobs.items()}
    assert limits == {name: 6 if name == "trainer" else 3 for name in COUNTS}  # both machines restart
    for name, job in found.jobs.items():
        first, *rest = job["podFailurePolicy"]["rules"]
        assert (first["action"], first["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        ended = [rule["onExitCodes"]["values"] for rule in rest]
        assert ended == ([[1, 2, 130]] if name == "controller" else [])
        assert found.pods[name]["terminationGracePeriodSeconds"] == 91


def test_a_pod_that_is_told_to_end_is_not_done(tmp_path: Path) -> None:
    """A role that ends in order has status 0, which a Job would take for its last word."""
    command, begun = rendered().container("student")["command"], tmp_path / "begun"
    role = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); "
    role += f"open({str(begun)!r}, 'w').close(); time.sleep(60)"
    process = subprocess.Popen([*command, sys.executable, "-c", role])
    until(begun.exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert subprocess.run([*command, "sh", "-c", "exit 7"]).returncode == 7


def test_a_controller_that_has_begun_goes_on(tmp_path: Path) -> None:
    command = rendered(f"run.folder='{tmp_path}/a b'").container("controller")["command"]
    folder = tmp_path / "a b/Every.Role"
    for record, resumed in {"": "", "mirrors": "", "run.db": " --resume", "journal": " --resume"}.items():
        shutil.rmtree(folder, ignore_errors=True)
        if record:  # a journal is an earlier release's
            (folder / record).mkdir(parents=True)
        assert subprocess.check_output([*command, "echo", "x"], text=True) == f"x{resumed}\n"


# --- disk


KEEPING = {"controller", "trainer", "evaluator"}
FOLLOWING = {"student", "evaluator", "evaluation-replica", "teacher-itself"}


@pytest.mark.parametrize("store", ["directory", "object"])
def test_the_volume_is_mounted_where_the_run_s_folder_outlasts_a_pod_or_is_read(store: str) -> None:
    """What a pod writes for itself lies on its node; the model of teacher-big-one is on the volume."""
    wanted = ["weights.store={type = 'object', url = 's3://a/b'}"] if store == "object" else []
    found = rendered(*wanted)
    mounts = {name: found.mounts(name) for name in COUNTS}
    sharing = KEEPING | {"teacher-big-one"} | (FOLLOWING if store == "directory" else set())
    assert {name for name, one in mounts.items() if one["/runs"] == "persistentVolumeClaim"} == sharing
    of_the_node = {
        name: "".join(folder for folder, kind in one.items() if kind == "emptyDir" and folder != "/dev/shm")
        for name, one in mounts.items()
    }
    places = dict.fromkeys(COUNTS, "/runs") | {"controller": "", "trainer": ""}
    places |= dict.fromkeys(FOLLOWING & sharing, "/runs/Every.Role/mirrors")
    places["teacher-big-one"] = "/runs/Every.Role"
    assert of_the_node == places
    computing = {name for name, (_, gpus) in COUNTS.items() if gpus}
    assert {name for name, one in mounts.items() if "/dev/shm" in one} == computing


def test_without_a_volume_nothing_is_claimed_and_a_lost_record_ends_the_run() -> None:
    target = Target("image", keeps=False)
    store, model = "weights.store={type = 'bucket', bucket = 'a/b'}", "teachers.big_one.path='Qwen/Qwen3-8B'"
    assert "weights.store.type" in refused(model, target=target)
    assert "/runs/models/big would be on it" in refused(store, target=target)
    found = rendered(store, model, target=target)
    assert "persistentvolumeclaim" not in found.text.lower()
    assert found.jobs["controller"]["backoffLimit"] == 0


# --- the configuration


def test_pods_read_the_configuration_with_its_overrides_and_files() -> None:
    found = rendered("run.steps=77", "rollout.temperature=0.5", "run.precision=fastest")
    within = validate(tomllib.loads(found.files["run.toml"]), "run.toml")
    outside = load(Path("run.toml"), ["run.steps=77", "rollout.temperature=0.5"])
    assert (within.run.steps, within.run.precision, within.rollout) == (77, "as_set", outside.rollout)
    assert within.teachers == outside.teachers
    carried = {
        str(within.student.chat_template): "chat.jinja",
        str(within.trainer.deepspeed): "zero3.json",
        str(within.prompts.parts["rows"].path): "rows.jsonl",  # type: ignore[union-attr]
        "/config/games.py": "games.py",
    }
    for path, name in carried.items():
        assert path.startswith("/config/")
        assert found.files[path.removeprefix("/config/")] == Path(name).read_text()
    assert within.run.folder == Path("/runs")
    assert within.run.code_folder is None  # so it is the file's folder, /config
    found = rendered("teachers.itself.path='/models/of-the-image'", "run.folder='/mnt/team/runs'")
    within = tomllib.loads(found.files["run.toml"])
    assert within["teachers"]["itself"]["path"] == "/models/of-the-image", "a pod's own is left as it is"
    assert found.mounts("trainer")["/mnt/team/runs"] == "persistentVolumeClaim"


# --- secrets


def test_the_token_is_in_the_secret_alone_and_the_file_is_for_its_owner() -> None:
    arguments = ["kubernetes", "run.toml", "--image", "image", "--out", "out.yaml", "--secret", "keys"]
    assert left(*arguments) == 0
    text = Path("out.yaml").read_text()
    assert Path("out.yaml").stat().st_mode & 0o777 == 0o600
    assert text.count(TOKEN) == 1
    found = rendered(target=Target("image", secret="keys"))
    assert text == found.text.replace(" FILE", " out.yaml"), "a rendering is the same twice"
    assert found.objects["Secret"]["stringData"] == {"token": TOKEN}
    for name, pod in found.pods.items():
        (token,) = (one["secret"] for one in pod["volumes"] if "secret" in one)
        assert token == {"secretName": "every-role", "defaultMode": 0o400}
        container = found.container(name)
        assert container["env"] == [{"name": "DISTILL_TOKEN_FILE", "value": "/var/run/distill/token"}]
        assert found.mounts(name)["/var/run/distill"] == "secret"
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]


def test_a_token_is_made_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTILL_TOKEN")
    first, second = (rendered().objects["Secret"]["stringData"]["token"] for _ in range(2))
    assert len(first) >= 32
    assert first != second


def test_secrets_of_the_configuration_are_refused_and_not_shown() -> None:
    planted = "pl4nted-value"
    told = refused(f"student.env.HF_TOKEN={planted}")
    assert "student.env.HF_TOKEN" in told
    assert "--secret" in told
    assert planted not in told
    Path("rows.jsonl").write_text(f'{{"prompt": "https://me:{planted}@host"}}\n')
    assert "prompts.parts.rows.path" in refused()


# --- what cannot go there


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.nodes=1; trainer.hostfile='hosts'", "trainer.hostfile"),
        ("cluster={type = 'ray'}", 'cluster.type is "ray"'),
        ("run.share_gpus=true", "run.share_gpus"),
        ("run.max_loaded_teachers=1", "run.max_loaded_teachers"),
        ("student.devices=['0']", "student.devices"),
        ("teachers.itself.path='folder'", "is a folder of this machine"),
        ("prompts.parts.rows.path='none.jsonl'", "is not on this machine"),
        ("prompts.parts.rows.path='large.jsonl'", "1,000,000"),
        ("trainer.deepspeed='binary'", "cannot be read as text"),
        ("environments.guess.environment='package:guess'", "install it in the image"),
        ("environments.guess.python='.venv/bin/python'", "is relative"),
        ("weights.store={type = 'directory', path = '/elsewhere'}", "weights.store.path"),
        ("run.share_gpus=true; trainer.devices='0,1'", "run.share_gpus … trainer.devices"),
    ],
)
def test_all_that_pods_would_not_find_is_refused_by_name(override: str, named: str, here: Path) -> None:
    (here / "folder").mkdir()
    (here / "package").mkdir()
    (here / "large.jsonl").write_text("x" * 1_000_001)
    (here / "binary").write_bytes(b"\xff\xfe")
    told = refused(*override.split("; "))
    names = named.split(" … ")
    assert all(name in told for name in names)
    assert len(told.splitlines()) == 1 + len(names)  # the first says what follows


@pytest.mark.parametrize(
    ("override", "without"),
    [
        ("teachers.big_one.urls=['http://teacher:8000']", {"teacher-big-one"}),
        ("controller.trainer='external'", set()),
    ],
    ids=["a server that is reached by URL has none", "a trainer whoever starts it"],
)
def test_every_other_job_has_its_pods_whatever_is_set(override: str, without: set[str]) -> None:
    assert rendered(override).jobs.keys() == COUNTS.keys() - without


def test_the_example_with_each_role_alone_goes_there_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = rendered(path=Path("configs/examples/each_role_alone.toml"))
    assert [*found.jobs] == ["controller", "student", "teacher-teacher", "evaluator", "trainer"]
    jsonschema.Draft7Validator(closed(SCHEMA["JobSet"])).validate(found.objects["JobSet"])


# --- roles in pods


def test_a_role_waits_until_the_controller_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In DNS, which has it once the controller's pod is placed."""
    asked: list[str] = []

    def own_address(url: str) -> str:
        asked.append(url)
        if len(asked) < 3:
            raise ConfigError("unknown name")
        return "10.0.0.7"

    monkeypatch.setattr(single_role, "own_address", own_address)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    config, _ = single_role.joining(load(Path("run.toml")), None, "http://controller:8000")
    assert asked == ["http://controller:8000"] * 3
    assert config.student.host == config.teachers["itself"].host == "10.0.0.7"
    asked.clear()
    impatient = load(Path("run.toml"), ["run.start_seconds=1e-9"])
    with pytest.raises(ConfigError, match="unknown name"):
        single_role.joining(impatient, None, "http://controller:8000")


def test_a_role_takes_the_port_that_it_is_told() -> None:
    free = free_port()
    for configured in (0, 1):
        with Ports(only=free) as ports:
            assert ports.take("127.0.0.1", configured, "student.port") == free
