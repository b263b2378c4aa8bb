"""A secret in every place of a configuration that takes one: no file, tracker or command line shows it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from distill.config import RunConfig, loading
from distill.config.loading import load, load_run_dir
from distill.launch import preflight, roles, single_role
from distill.launch.run_folder import RunFolder
from distill.metrics.trackers import Wandb
from distill.preflight_checks.checks import check_secrets
from distill.record.resume import record_of, resumed
from distill.topology import processes
from student_trainer.config import TrainerConfig
from student_trainer.deepspeed_json import deepspeed_config
from student_trainer.objectives.config import Own
from sync.base import secrets
from sync.base.errors import ConfigError
from sync.base.settings import REPLICA_VARIABLE, ReplicaConfig, Settings, read_settings
from sync.weights.stores import open_store
from sync.wire import RunIdentity
from teacher_service.config import TeacherConfig

ROOT = Path(__file__).parents[3]
PLANTED = [f"pl4nted-{number}" for number in range(12)]
"""Of every place below; the last one is on this process's own command line."""
CONFIG = """
[run]
name = "x"
folder = "{folder}"
steps = 1
[student]
path = "{folder}/student"
env = {{ WANDB_API_KEY = "{0}", OMP_NUM_THREADS = "1" }}
[student.engine_args]
max-model-len = 64
[teachers.here]
path = "t"
env = {{ SERVICE_PASSWORD = "{1}" }}
route = ["a"]
[teachers.served]
path = "t"
engine = "vllm"
engine_url = "http://me:{2}@127.0.0.1:9"
route = ["b"]
[teachers.there]
path = "t"
urls = ["http://me:{3}@127.0.0.1:9"]
[prompts]
type = "task"
task = "sort_letters"
options = {{ nested = {{ api_token = "{4}" }} }}
[rollout]
max_tokens = 12
[trainer]
deepspeed = "{root}/configs/deepspeed/zero3_cpu.json"
env = {{ HF_TOKEN = "{5}" }}
overrides = {{ "comet.api_key" = "{6}" }}
[weights.store]
type = "object"
url = "s3://bucket/prefix"
options = {{ secret_access_key = "{7}", endpoint = "http://me:{8}@127.0.0.1:9" }}
[evaluation.placement]
env = {{ AWS_SESSION_TOKEN = "{9}" }}
[controller]
url = "http://me:{10}@127.0.0.1:9"
[tracking]
wandb = "offline"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(secrets, "_known", set())
    (tmp_path / "x.toml").write_text(CONFIG.format(*PLANTED, folder=tmp_path, root=ROOT))
    return load(tmp_path / "x.toml")


def shown(text: str | bytes) -> list[str]:
    return [one for one in PLANTED if (one.encode() if isinstance(text, bytes) else one) in text]


def keep(config: RunConfig) -> None:
    """In its run's folder."""
    with RunFolder.open(config, resume=False) as folder:
        folder.keep(record_of(config, {}))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_file_of_a_run_and_no_command_line_shows_a_secret_and_every_role_has_its_own(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder.open(config, resume=False) as folder, roles.Ports() as ports:
        folder.keep(record_of(config, {"deepspeed": deepspeed_config(config.trainer)}))
        plan = roles.plan_servers(config, "the run's token", ports)
        trainer = roles.trainer_child(config, "http://me:pl4nted-10@127.0.0.1:9", None)
    written = files(config.run_dir)
    names = {path.name for path in written}
    assert names >= {"config.json", "trainer.json", "evaluator.json", "student-0.json"}
    assert {path: shown(content) for path, content in written.items() if shown(content)} == {}
    private = [path for path in written if path.suffix == ".json"]
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}

    children = {child.name: child for child in [*plan.children, trainer]}
    assert not [name for name, child in children.items() if shown(" ".join(child.argv))]

    def given(name: str, kind: Any, file: str) -> Any:
        monkeypatch.setenv(secrets.VARIABLE, children[name].env[secrets.VARIABLE])
        return read_settings(kind, config.run_dir / "roles" / file)

    assert given("trainer", TrainerConfig, "trainer.json").weights == config.weights
    assert given("trainer", TrainerConfig, "trainer.json").controller_url == config.controller.url
    scores = {"keep_folder": config.run_dir / "scores" / "served"}
    served = config.teachers["served"].model_copy(update=scores)
    assert given("teacher-served", TeacherConfig, "teacher-served.json") == served
    evaluator = given("evaluator", RunConfig, "evaluator.json")
    urls = {f"teachers.{name}": section.urls for name, section in evaluator.teachers.items()}
    assert urls == {key: plan.where[key] for key in urls} != {}
    assert evaluator.model_copy(update={"teachers": config.teachers}) == config
    monkeypatch.setenv(REPLICA_VARIABLE, children["student-0"].env[REPLICA_VARIABLE])
    assert ReplicaConfig.from_environment() == config.subscriber("student-0")
    assert children["student-0"].env["WANDB_API_KEY"] == PLANTED[0]
    assert children["trainer"].env["HF_TOKEN"] == PLANTED[5]


def test_the_record_of_a_run_is_read_back_and_its_store_looks_for_its_secrets_elsewhere(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(config)
    (config.run_dir / "run.db").touch()
    kept = load_run_dir(config.run_dir)
    assert (kept.run, kept.rollout) == (config.run, config.rollout)
    asked: list[dict[str, str]] = []
    store = "sync.weights.stores.object_store.ObjectStore"
    monkeypatch.setattr(store, lambda url, options: asked.append(options))
    open_store(kept.weights.store, config.run_dir)
    assert [sorted(options) for options in asked] == [["endpoint"]]
    with RunFolder.open(config, resume=True) as folder:
        _, lines = resumed(folder.path, record_of(config, {}))
    assert lines == [], "what is hidden has not changed"


def test_a_role_of_a_run_folder_inherits_variables_that_are_hidden_there(config: RunConfig) -> None:
    keep(config)
    kept = load(config.run_dir)
    with roles.Ports() as ports:
        child = roles.server(kept, processes(kept)[0], ports)
    assert "WANDB_API_KEY" not in child.env
    assert child.env["OMP_NUM_THREADS"] == "1"
    assert kept.student.engine_args == config.student.engine_args
    assert kept.trainer.env == kept.teachers["here"].env == {}
    assert load(config.run_dir, ["student.env.WANDB_API_KEY=given"]).student.env["WANDB_API_KEY"] == "given"


def own_objective(config: RunConfig) -> RunConfig:
    """With a function of the user's that was given a secret, as a run's folder has it."""
    return config.with_(objective=Own(type="own", name="m:f", options={"api_key": secrets.HIDDEN}))


def evaluator(config: RunConfig) -> Any:
    with roles.Ports() as ports:
        return single_role.serving(config, "evaluation.placement", ports, controller=lambda: "")


def test_only_variables_of_roles_are_left_out_where_they_are_hidden() -> None:
    hidden = {"KEY": secrets.HIDDEN, "SIZE": "3"}
    raw = {
        "student": {"env": hidden},
        "evaluation": {"placement": {"env": hidden}, "replica": None},
        "environments": {"env": {"options": hidden}, "game": {"env": hidden, "options": {"env": hidden}}},
    }
    found = loading._inherited(json.loads(json.dumps(raw)))
    assert found["student"]["env"] == found["evaluation"]["placement"]["env"] == {"SIZE": "3"}
    assert found["environments"]["game"] == {"env": {"SIZE": "3"}, "options": {"env": hidden}}
    assert found["environments"]["env"]["options"] == hidden
    odd: dict[str, Any] = {"student": "x", "trainer": {"env": None}, "teachers": None, "evaluation": True}
    assert loading._inherited(json.loads(json.dumps(odd))) == odd, "refused by key later"


@pytest.mark.parametrize(
    ("serve", "key"),
    [
        (
            lambda config: single_role.serving(config, "teachers.served", roles.Ports()),
            "teachers.served.engine_url",
        ),
        (single_role.prepare_train, "trainer.overrides.comet.api_key"),
        (lambda config: single_role.prepare_train(own_objective(config)), "objective.options.api_key"),
        (evaluator, "teachers.there.urls.0"),
        (evaluator, "prompts.options.nested.api_token"),
    ],
)
def test_a_role_that_needs_a_value_which_a_run_folder_hides_is_refused(
    config: RunConfig, serve: Callable[[RunConfig], Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "check_parts", lambda *_: None)
    keep(config)
    with pytest.raises(ConfigError, match=rf"(?m)^{key} holds a secret, which the run's folder does not"):
        serve(load(config.run_dir))


def test_wandb_keeps_no_secret_of_the_configuration_or_the_command_line(config, monkeypatch) -> None:
    monkeypatch.setattr(secrets, "setproctitle", lambda title: None)
    said = f"weights.store.options.secret_access_key={PLANTED[11]}"
    monkeypatch.setattr(sys, "argv", ["distill", "run", "x.toml", "--set", said])
    secrets.redact_process()
    config.run_dir.mkdir(parents=True)
    sink = Wandb(config, RunIdentity(config.run.name, "0123abcd"))
    sink.log(1, {"loss": 0.5})
    sink.close()
    folder = config.run_dir / "wandb"
    recorded = lambda: any(b"max_tokens" in path.read_bytes() for path in folder.rglob("*.wandb"))  # noqa: E731
    until(recorded, 600.0)  # its service writes on behind the end
    written = files(folder)
    assert {path: shown(content) for path, content in written.items() if shown(content)} == {}


SECRET, SHOWN = PLANTED[0], r"holds a secret.*in the environment"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f'student.engine_args."hf-token"="{SECRET}"', SHOWN),
        (f'teachers.here.engine_args.nested.api_key="{SECRET}"', SHOWN),
        (f'trainer.launcher_args=["--ssh-password", "{SECRET}"]', SHOWN),
        (f"weights.store.options.secret_key=['{SECRET}']", re.escape(secrets.HIDDEN)),
        (f"weights.store={{type='objct',options={{secret_key='{SECRET}'}}}}", re.escape(secrets.HIDDEN)),
        (f"controller.url='ftp://me:{SECRET}@host'", re.escape(secrets.HIDDEN)),
    ],
)
def test_a_value_that_would_show_a_secret_or_cannot_be_used_is_refused_without_showing_it(
    config: RunConfig, tmp_path: Path, override: str, says: str
) -> None:
    check_secrets(config)
    with pytest.raises(ConfigError, match=says) as caught:
        check_secrets(load(tmp_path / "x.toml", [override]))
    assert shown(str(caught.value)) == []


def test_every_table_whose_keys_are_the_users_is_searched_by_name() -> None:
    sections = [Settings]
    for one in sections:
        sections += one.__subclasses__()
    tables = {
        name
        for section in sections
        for name, field in section.model_fields.items()
        if str(field.annotation).startswith("dict[str, ") and "Settings" not in str(field.annotation)
    }
    of_sections = {"environments", "parts", "teacher_coefficients", "teachers", "weights", "sets"}
    assert tables - secrets.FREE_FORM <= of_sections
