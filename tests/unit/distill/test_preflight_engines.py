"""Preflight over tiny real models in this process: which checks run, and that one failure stops all."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episodes import GuessEnvironment
from evaluated_models import Replica, Teacher, save
from msgspec.structs import replace
from small_config import make_config

from distill.config import RunConfig
from distill.evaluation import probes
from distill.evaluation.probes import probe
from distill.launch import single_role
from distill.launch.evaluate import evaluate_folder
from distill.launch.preflight import check_here, check_machine, run_preflight
from distill.launch.roles import Ports
from distill.preflight_checks import checks as preflight
from distill.preflight_checks import engines as live
from distill.preflight_checks.probes import Finding
from distill.prompts.sources import PromptSplit, longest_prompt, open_prompts
from student_trainer.objectives.config import TopK
from sync import wire
from sync.base import tokenizers
from sync.base.errors import ConfigError
from sync.base.tokenizers import load_tokenizer
from sync.wire import pack, unpack

DEEPSPEED = Path(__file__).parents[3] / "configs/deepspeed/zero3_cpu.json"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """student/, teacher/ and other/."""
    return save(tmp_path_factory.mktemp("models"), "other")


def configure(models: Path, **sections: dict[str, Any]) -> RunConfig:
    base: dict[str, Any] = {
        "student": {"path": str(models / "student")},
        "teachers": {"t": {"path": str(models / "teacher"), "dtype": "float32"}},
        "prompts": {"type": "task", "task": "sort_letters"},
        "rollout": {"max_tokens": 12},
        "trainer": {"deepspeed": str(DEEPSPEED)},
        "objective": {"type": "full"},
        "evaluation": {"prompts": 8, "device": "cpu"},
    }
    return make_config(**{**base, **sections})


def teacher_of(config: RunConfig, **told: Any) -> Teacher:
    return Teacher(Path(config.teachers["t"].path), **told)


class Evaluator:
    """The evaluator's probes without its process; `teachers`: those that it asks."""

    def __init__(self, config: RunConfig, **teachers: Any) -> None:
        self._config, self._teachers = config, teachers

    async def probe(self, request: wire.ProbeRequest, timeout: float) -> wire.ProbeReply:
        return await probe(self._config, self._teachers, request)


def jsonl(folder: Path, rows: str, **more: str) -> dict[str, str]:
    """[prompts] of these rows."""
    (folder / "prompts.jsonl").write_text(rows)
    return {"type": "jsonl", "path": str(folder / "prompts.jsonl"), "template": "plain", **more}


def split_of(config: RunConfig) -> PromptSplit:
    return open_prompts(config, load_tokenizer(config.student), 64)


async def findings(config: RunConfig, teacher: Teacher, evaluator: Any = None, **more: Any) -> list[Finding]:
    """What is said; every failure is in the error that it ends with."""
    said: list[Finding] = []
    error = ""
    try:
        engines = live.Engines({"t": teacher}, evaluator, **more)
        await live.check_engines(config, split_of(config), engines, said.append)
    except ConfigError as raised:
        error = str(raised)
    assert bool(error) == any(one.problem for one in said)
    assert [one.line for one in said if one.problem] == error.splitlines()[1:]
    return said


def failed(said: list[Finding]) -> list[str]:
    return [one.check for one in said if one.problem]


class Game(GuessEnvironment):
    """With what its service would tell of it."""

    def __init__(self, tokenizer: Any, tasks: int | None = None, fingerprint: str | None = None) -> None:
        super().__init__("e")
        fingerprint = fingerprint or tokenizers.fingerprint(tokenizer)
        self._told = {"tasks": tasks, "tokenizer_fingerprint": fingerprint}

    async def info(self, timeout: float) -> wire.EnvironmentInfo:
        return wire.EnvironmentInfo(name="e", environment="a:b", **self._told)


async def test_first_prompts_of_an_environment_are_what_is_probed(models: Path) -> None:
    prompts = {"type": "environment", "environment": "e"}
    sections = {"prompts": prompts, "environments": {"e": {"environment": "a:b", "max_tokens": 40}}}
    config = configure(models, **sections)
    game = Game(load_tokenizer(config.student))
    said = await findings(config, teacher_of(config), Evaluator(config), environments={"e": game})
    assert failed(said) == []
    assert [one.check for one in said][:4] == [
        "environment e: same tokenizer", "environment e: tasks", "environment e: first prompts", "length",
    ]  # fmt: skip
    assert "have up to 28 + 12" in said[3].figure, "an episode is at most 40 tokens long"
    assert game.begun
    assert not game.games, "what was begun is ended"
    other = Game(load_tokenizer(config.student), tasks=9, fingerprint="0" * 96)
    said = await findings(config, teacher_of(config), environments={"e": other})
    assert failed(said) == ["environment e: same tokenizer", "environment e: tasks"]
    assert len(said) == 2, "nothing else can be checked"


async def test_sound_engines_pass_every_check(models: Path) -> None:
    config = configure(models)
    said = await findings(config, teacher_of(config), Evaluator(config))
    assert failed(said) == []
    assert [one.check.removeprefix("teacher t: ") for one in said] == [
        "length", "same tokenizer", "same chat template", "capabilities", "length", "scores repeat",
        "not uniform, not shifted", "context is whole", "equals a plain forward pass",
        "a self-teacher gives 0", "the gradient depends on the teacher",
    ]  # fmt: skip


async def test_an_objective_is_probed_with_its_term_of_the_ends(models: Path) -> None:
    configs = [configure(models, objective={"type": "full", "ends": weight}) for weight in (0.0, 100.0)]
    without, with_it = [await findings(config, teacher_of(config), Evaluator(config)) for config in configs]
    assert failed(with_it) == []
    assert without[-1].check == "teacher t: the gradient depends on the teacher"
    assert with_it[-1].figure != without[-1].figure


async def test_another_vocabulary_is_reported_before_any_score_is_requested(models: Path) -> None:
    config = configure(models)
    stranger = teacher_of(config, tokenizer_fingerprint="0" * 96)
    said = await findings(config, stranger, Evaluator(config))
    assert failed(said) == ["teacher t: same tokenizer"]
    assert stranger.requests == []


async def test_a_teacher_that_serves_other_weights_than_configured_is_caught(models: Path) -> None:
    config = configure(models)
    other = configure(models, teachers={"t": {"path": str(models / "other"), "dtype": "float32"}})
    said = await findings(config, teacher_of(other), Evaluator(config))
    assert failed(said) == ["teacher t: equals a plain forward pass"]


@pytest.mark.parametrize("hidden", [True, False])
async def test_a_teacher_too_large_to_load_is_not_shown_to_be_right_and_its_gradient_still_is(
    models: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    monkeypatch.setattr(probes, "free_bytes", lambda device: 4 << 10)
    config = configure(models)
    other = configure(models, teachers={"t": {"path": str(models / "other"), "dtype": "float32"}})
    teacher = teacher_of(other) if hidden else teacher_of(other, can=["topk"])
    if not hidden:
        config = config.model_copy(update={"objective": TopK(type="topk", k=4)})
    said = await findings(config, teacher, Evaluator(config, t=teacher))
    assert failed(said) == []
    shown = {one.check.removeprefix("teacher t: "): one for one in said}
    plain = shown["equals a plain forward pass"]
    assert plain.line.startswith("NOT SHOWN teacher t: equals a plain forward pass: 0.00 B parameters take")
    assert "in fp32, and 50% of the evaluator's 0.0 GiB of free memory" in plain.line
    assert ("the gradient depends on the teacher" in shown) == hidden


async def test_a_teacher_that_is_the_student_teaches_nothing(models: Path) -> None:
    config = configure(models, teachers={"t": {"path": str(models / "student"), "dtype": "float32"}})
    said = await findings(config, teacher_of(config), Evaluator(config))
    assert failed(said) == ["teacher t: the gradient depends on the teacher"]
    follower = {"path": str(models / "student"), "dtype": "float32", "follow_student_every": 2}
    follows = configure(models, teachers={"t": follower}, objective={"type": "topk", "k": 4})
    said = await findings(follows, teacher_of(config), Evaluator(follows))
    assert failed(said) == []  # it will come to differ


def test_a_teacher_that_is_the_student_and_masked_tokens_are_refused(models: Path) -> None:
    itself = {"path": str(models / "student")}
    with pytest.raises(ConfigError, match=r"teachers\.t\.path is the student, which teaches it nothing"):
        preflight.check(configure(models, teachers={"t": itself}))
    follower = {"t": itself | {"follow_student_every": 2}}  # it will come to differ
    preflight.check(configure(models, teachers=follower, objective={"type": "topk", "k": 4}))
    rewarded = {"type": "topk", "k": 4, "task": {}}  # it keeps the student near its start
    preflight.check(configure(models, teachers={"t": itself}, objective=rewarded))
    deaf = {"type": "sampled", "drop_rho_outside": [2.0, 5.0]}
    with pytest.raises(ConfigError, match=r"drop_rho_outside \(2\.0, 5\.0\) drops every token of age 0"):
        preflight.check(configure(models, objective=deaf))
    preflight.check(configure(models, objective=deaf | {"type": "sft"}))


@pytest.mark.parametrize(
    ("objective", "lacks", "says"),
    [
        ({"type": "full"}, {"can": ["topk"]}, 'objective "full" needs hidden'),
        ({"type": "topk", "k": 5}, {"max_topk": 4}, "is 5, and it gives at most 4 ids per position: set obj"),
    ],
)
async def test_what_the_objective_needs_and_the_teacher_lacks_is_said(
    models: Path, objective: dict[str, Any], lacks: dict[str, Any], says: str
) -> None:
    config = configure(models, objective=objective, evaluation=None)
    said = await findings(config, teacher_of(config, **lacks))
    assert failed(said) == ["teacher t: capabilities"]
    assert says in said[-2].line


async def test_a_context_that_is_too_short_is_caught_on_either_side(models: Path) -> None:
    student = {"path": str(models / "student"), "engine_args": {"max_model_len": 20}}
    config = configure(models, student=student)
    said = await findings(config, teacher_of(config, max_length=21))
    assert failed(said) == ["length", "teacher t: length"]


async def test_rollouts_are_compared_with_a_plain_forward_pass(models: Path) -> None:
    config, replica = configure(models), Replica(models / "student")
    parts = teacher_of(config), Evaluator(config)
    assert failed(await findings(config, *parts, replicas={"r": replica})) == []
    replica.spoil = lambda answer: replace(answer, logprob=pack(unpack(answer.logprob) - np.float32(0.5)))
    assert failed(await findings(config, *parts, replicas={"r": replica})) == ["rollout engine agrees"]


def test_the_first_step_is_judged_by_its_fresh_tokens(config: Callable[..., RunConfig]) -> None:
    settings = config()
    assert live.first_step(settings, {"loss": 1.0}) == []
    good = live.first_step(settings, {"train/mismatch_kl": 5e-5, "train/score_gap": 1e-3})
    assert [one.problem for one in good] == [None, None]
    bad = live.first_step(settings, {"train/mismatch_kl": 0.3, "train/score_gap": 3.0})
    with pytest.raises(ConfigError, match="2 of 2 checks failed, nothing is trained"):
        live.refuse(bad)


def test_the_longest_prompt_of_a_table_is_known_whatever_its_length(tmp_path: Path, models: Path) -> None:
    prompts = jsonl(tmp_path, '{"prompt": "abc>"}\n' * 600 + '{"prompt": "abcdefghi>"}\n')
    assert longest_prompt(split_of(configure(models, prompts=prompts))) == 10


@pytest.mark.parametrize(
    "sections",
    [{"objective": {"type": "full", "task": {}}}, {"evaluation": {"metric": "pass_rate", "device": "cpu"}}],
    ids=["a task term", "the best version by pass rate"],
)
def test_what_counts_rewards_needs_prompts_that_have_one(
    tmp_path: Path, models: Path, sections: dict[str, Any]
) -> None:
    assert preflight.check(configure(models, **sections)).split.rewards is not None
    with pytest.raises(ConfigError, match=r'type "jsonl" have no reward: set prompts\.reward_fn'):
        preflight.check(configure(models, prompts=jsonl(tmp_path, '{"prompt": "abc>"}\n' * 20), **sections))


def test_every_data_source_needs_a_teacher_and_every_teacher_a_data_source(tmp_path, models: Path) -> None:
    prompts = jsonl(tmp_path, '{"prompt": "abc>", "from": "math"}\n' * 40, source_field="from")
    teachers = {"t": {"path": str(models / "teacher"), "route": ["math"]}}
    config = configure(models, teachers=teachers, prompts=prompts, evaluation=None)
    assert len(preflight.check(config).split.train) == 40
    idle = {"path": str(models / "teacher"), "route": ["maths"]}
    taught = config.model_dump()["teachers"] | {"u": idle}
    with pytest.raises(ConfigError, match=r"teachers\.u would have nothing to score, .*sources are math:"):
        preflight.check(RunConfig.model_validate(config.model_dump() | {"teachers": taught}))
    with open(prompts["path"], "a") as file:
        file.write('{"prompt": "abc>", "from": "law"}\n')
    with pytest.raises(ConfigError, match="no teacher for data source 'law'"):
        preflight.check(config)


def test_a_teacher_that_follows_the_student_needs_a_store_and_no_head(models: Path) -> None:
    teachers = {"t": {"path": str(models / "teacher"), "follow_student_every": 4}}
    sections = {"teachers": teachers}
    with pytest.raises(ConfigError, match='objective "full" keeps its head'):
        preflight.check(configure(models, **sections))
    sections["objective"] = {"type": "topk", "k": 4}
    assert preflight.check(configure(models, **sections)).split.held_out
    adapters = {**sections, "trainer": {"deepspeed": str(DEEPSPEED), "lora": {}}}
    for check in (preflight.check, lambda config: single_role.serving(config, "teachers.t", Ports())):
        with pytest.raises(ConfigError, match=r"trainer.lora is set, and adapters alone are no model"):
            check(configure(models, **adapters))
    off = {"evaluation": None, "weights": {"transport": "broadcast"}}
    with pytest.raises(ConfigError, match=r'weights.transport is "broadcast", and it reads the store'):
        preflight.check(configure(models, **sections, **off))


# --- what of a cluster's run is looked at here


CLUSTER = {"cluster": {"type": "slurm", "cpus_per_node": 4}, "evaluation": {"every": 2}}


async def test_servers_of_a_cluster_are_not_started_here() -> None:
    rule = r"^cluster\.type is 'slurm', and {} starts servers on this machine alone .*cluster\.type=local"
    with pytest.raises(ConfigError, match=rule.format("preflight --engines")):
        await run_preflight(make_config(**CLUSTER), PromptSplit([], [], None), lambda _: None)
    with pytest.raises(ConfigError, match=rule.format("evaluate")):
        evaluate_folder(make_config(**CLUSTER), None, None, lambda _: None)
    urls = {"urls": ["http://127.0.0.1:1"]}
    served = {"student": {"path": "s", **urls}, "teachers": {"t": {"path": "t", **urls}}}
    check_here(make_config(**CLUSTER | served | {"evaluation": {"placement": urls}}), "preflight --engines")


def test_ports_of_servers_that_start_elsewhere_may_be_taken_here(tmp_path: Path) -> None:
    run = {"name": "r", "steps": 1, "folder": tmp_path}
    with socket.create_server(("127.0.0.1", 0)) as server:
        student = {"path": "s", "port": server.getsockname()[1]}
        check_machine(make_config(**CLUSTER, run=run, student=student))
