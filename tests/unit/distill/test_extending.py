"""Code of the user's own beside a configuration: examples of docs/extending.md and docs/tutorials, used."""

from __future__ import annotations

import random
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_config
import tomli_w
import torch
from byte_tokenizer import Letters
from episodes import Script
from reference import parsed
from transformers import Qwen3Config, Qwen3ForCausalLM

from distill import tasks
from distill.config import RunConfig
from distill.config.loading import load, load_run_dir, merge
from distill.evaluation.probes import not_loaded
from distill.launch import roles
from distill.launch.run_folder import RunFolder
from distill.preflight_checks import checks
from distill.preflight_checks.objective import lacking
from distill.prompts.reward_pool import RewardPool
from distill.prompts.rewards import load_rewards, reward_source
from distill.prompts.stream import Prompt
from distill.published import store_of
from distill.record.resume import record_of
from distill.tasks import guess
from distill.tasks.sort_letters import STUDENT, TEACHER, letter_tokenizer
from distill.tasks.teaching import new_model
from student_trainer.objectives.config import ObjectiveConfig, Sampled, needs, student_topk
from student_trainer.objectives.divergences import Targets, build
from student_trainer.objectives.try_own import try_out
from sync.base import own_code
from sync.base.errors import AlreadyPublished, ConfigError, DataError
from sync.base.own_code import CODE_VARIABLE, load_function, use_folder
from sync.wire import Want
from teacher_service.engines import build as build_engine
from teacher_service.engines.base import Item, ScoreOptions
from teacher_service.limits import limits

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/extending.md").read_text()
ROUTED = {"path": "t", "route": ["rest"]}
ROWS = {"type": "jsonl", "path": "prompts.jsonl"}
LEAST = small_config.LEAST | {"teachers": {"t": ROUTED}, "prompts": ROWS}
Example = Callable[..., RunConfig]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    """The configuration of a section of the page, from a file with the section's module beside it."""
    monkeypatch.chdir(tmp_path)

    def make(heading: str, *overrides: str) -> RunConfig:
        section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        name, code = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", section, re.DOTALL)[0]
        (table,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
        (tmp_path / "beside").mkdir(exist_ok=True)
        (tmp_path / "beside" / name).write_text(code)
        assert len([line for line in code.splitlines() if line.strip()]) <= 20, "short enough to copy"
        raw = tomllib.loads(table)
        known = {**LEAST, "prompts": {}} if "prompts" in raw else LEAST
        (tmp_path / "beside" / "run.toml").write_text(tomli_w.dumps(merge(known, raw)))
        config = load(tmp_path / "beside" / "run.toml", overrides)
        use_folder(config.run.code_folder)
        return config

    yield make
    use_folder(None)
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


# --- the examples -----------------------------------------------------------------------------------------


def loss_and_gradient(objective: ObjectiveConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Of stale tokens; statistics [N] and the gradient of the summed loss."""
    random = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(9, 5, generator=random, dtype=torch.float64, requires_grad=True)
    behavior_N, teacher_N = (-torch.rand(9, generator=random, dtype=torch.float64) * 3 for _ in range(2))
    targets = Targets(
        token_N=torch.arange(9) % 5,
        behavior_logp_N=behavior_N,
        teacher_logp_N=teacher_N,
        fresh_N=torch.zeros(9, dtype=torch.bool),
        coefficient_N=torch.full((9,), 3.0),
        teacher_logp_NV=torch.randn(9, 5, generator=random, dtype=torch.float64).log_softmax(1),
    )
    loss_N, stats = build(objective)(logits_NV.log_softmax(1), targets)
    (gradient,) = torch.autograd.grad(loss_N.sum(), logits_NV)
    return stats["reverse_kl"], gradient


def test_the_objective_has_the_gradient_of_the_policy_gradient_that_it_restates(example: Example) -> None:
    """∇ ½(log p − log q)² = d·∇log p, so that ρ, its cap and the coefficient of 3 must agree too."""
    own = example("Objective", "objective.options.rho_cap=1.5").objective
    for found, expected in zip(loss_and_gradient(own), loss_and_gradient(Sampled(rho_cap=1.5)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("divergence", "sends", "options"),
    [
        ("sampled", "sampled", "{rho_cap=5.0, drop_rho_outside=[0.5, 2.0]}"),
        ("hybrid", "topk", "{rho_cap=5.0, drop_rho_outside=[0.5, 2.0]}"),
        ("hybrid", "student_topk", "{rho_cap=5.0, drop_rho_outside=[0.5, 2.0]}"),
        ("forward_topk", "topk", "{}"),
        ("full", "full", "{}"),
        ("jsd", "full", "{beta=0.3}"),
        ("skew", "full", "{alpha=0.1}"),
    ],
)
def test_every_divergence_of_this_package_is_an_objective_by_name(
    example: Example, divergence: str, sends: str, options: str
) -> None:
    name = f"objective.type=student_trainer.objectives.divergences:{divergence}"
    own = example("Objective", name, f"objective.needs={sends}", f"objective.options={options}").objective
    try_out(own)


def test_an_objective_that_fails_is_refused_before_anything_starts(example: Example) -> None:
    config = example("Objective", "objective.options.rho_kap=1.0")
    problem = "raised TypeError .*unexpected keyword argument 'rho_kap'.* mend the function, or its"
    with pytest.raises(ConfigError, match=rf"objective\.type = 'own_objective:squared' {problem}"):
        checks.check(config)


@pytest.mark.parametrize(
    ("sends", "want", "gathered"),
    [
        ("sampled", Want(entropy=True), 0),
        ("topk", Want(entropy=True, topk=7), 0),
        ("student_topk", Want(entropy=True), 7),
        ("full", Want(hidden=True), 0),
    ],
)
def test_the_teacher_is_asked_for_what_the_objective_needs(
    example: Example, sends: str, want: Want, gathered: int
) -> None:
    own = example("Objective", f"objective.needs={sends}", "objective.k=7").objective
    assert (needs(own), student_topk(own)) == (want, gathered)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return logp_NV.sum(1)", "raised ValueError"),
        ("return logp_NV.sum(1), {}", r"returned {'loss': \(6,\)} for 6 tokens"),
        ("return logp_NV.sum(), {'reverse_kl': logp_NV.sum(1)}", r"returned {'loss': \(\), 'reverse_kl'"),
        ("v = logp_NV.detach().sum(1); return v, {'reverse_kl': v}", "without gradient"),
        ("v = logp_NV.new_zeros(6).requires_grad_(); return v, {'reverse_kl': v}", "in log p is missing"),
    ],
)
def test_an_objective_that_returns_something_else_is_refused(
    example: Example, tmp_path: Path, body: str, problem: str
) -> None:
    config = example("Objective", "objective.type=own_objective:wrong")
    (tmp_path / "beside" / "own_objective.py").write_text(f"def wrong(logp_NV, targets):\n    {body}\n")
    with pytest.raises(DataError, match=rf"objective\.type = 'own_objective:wrong' .*{problem}"):
        try_out(config.objective)


def test_the_reward_function_runs_in_a_worker_beside_its_module(example: Example) -> None:
    prompts = example("Reward function").prompts
    prompt = Prompt("1", [1], "default", "7", "")
    assert load_rewards(prompts)(prompt, "so 7") == (0.98, "7")
    RewardPool(reward_source(prompts, Letters())).check(prompt)  # in a process of its own


def test_the_prompt_source_keeps_held_out_prompts_apart(example: Example) -> None:
    prompts = example("Prompt source").prompts
    task = tasks.load(prompts.task, prompts.options)
    trained = {task.prompt(seed, index).text for seed in range(3) for index in range(600)}
    held_out = {task.held_out(0, index).text for index in range(600)}
    assert len(trained) == len(held_out) == 500
    assert not trained & held_out
    assert task.reward(task.prompt(0, 4), [9, 1])
    assert not task.reward(task.prompt(0, 4), [])


def test_the_engine_scores_at_its_temperature_and_refuses_what_it_cannot_give(
    example: Example, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    size = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = Qwen3ForCausalLM(Qwen3Config(**size, **heads, initializer_range=0.5))
    model.save_pretrained(tmp_path / "models" / "teacher")
    config = example("Teacher engine", "teachers.sharp.device=cpu")
    engine = build_engine(config.teachers["sharp"], 16)
    items = [Item(np.arange(length, dtype=np.int32), 1) for length in (3, 5)]
    with torch.no_grad():
        logits = [model(torch.arange(one.positions + 1)[None]).logits[0, :-1] for one in items]
    plain = [(part / 0.5).log_softmax(1) for part in logits]
    expected = [float(part[i, i + 1]) for part in plain for i in range(len(part))]
    np.testing.assert_allclose(engine.score(items, ScoreOptions()).logprob_C, expected, atol=1e-5)
    assert limits(config.teachers["sharp"], engine.engine_info, 1 << 30).max_length == 64
    assert engine.head() is None
    full = RunConfig.model_validate({**LEAST, "objective": {"type": "full"}})
    assert lacking(full, engine.engine_info.can) == ["hidden"]
    assert "is your own" in (not_loaded(config.teachers["sharp"], 1 << 30) or "")
    engine.close()


def test_the_store_keeps_the_contract_and_its_copy(example: Example, tmp_path: Path) -> None:
    config = example("Store")
    store = store_of(config, config.run_dir)
    store.create("run/a", b"content")
    with pytest.raises(AlreadyPublished):
        store.create("run/a", b"other")
    assert store.read("run/a") == (tmp_path / "backup/run/a").read_bytes() == b"content"
    replica = config.subscriber("student-0")
    assert type(replica).model_validate_json(replica.model_dump_json()) == replica, "as a replica reads it"


def test_a_recorded_configuration_finds_the_same_code_again(example: Example, tmp_path: Path) -> None:
    config = example("Store")
    with RunFolder.open(config, resume=False) as folder:
        folder.keep(record_of(config, {}))
    assert load_run_dir(config.run_dir) == config
    assert config.run.code_folder == tmp_path / "beside"


# --- where modules are found ------------------------------------------------------------------------------


def test_the_trainer_s_ranks_are_told_the_folder(example: Example, tmp_path: Path) -> None:
    environment = roles.trainer_process(example("Objective"), "http://127.0.0.1:1").env
    assert environment[CODE_VARIABLE] == str(tmp_path / "beside")


def test_only_the_folder_in_use_is_searched_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `json.py` there hides nothing."""
    use_folder(None)
    before = [*sys.path]
    monkeypatch.setattr(sys, "path", [*before])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"own_{name}.py").write_text("def f(): ...")
    use_folder(tmp_path / "one")
    load_function("own_one:f", "x")
    use_folder(tmp_path / "two")
    load_function("own_two:f", "x")
    assert sys.path == [*before, str(tmp_path / "two")]
    use_folder(None)
    assert str(tmp_path / "two") not in sys.path
    with pytest.raises(ConfigError, match=r"run\.code_folder \(default: beside the configuration\)"):
        load_function("own_three:f", "x")


@pytest.mark.parametrize(
    ("heading", "override", "field"),
    [
        ("Objective", "objective.type=own_objectiv:squared", r"objective\.type = 'own_objectiv:squared'"),
        ("Store", "weights.store.type=own.store:Mirrored", r"weights\.store\.type = 'own\.store:Mirrored'"),
        ("Teacher engine", "teachers.sharp.engine=engine:", r"teachers\.sharp\.engine = 'engine:'"),
    ],
)
def test_a_module_that_is_not_there_is_refused_before_anything_starts(
    example: Example, heading: str, override: str, field: str
) -> None:
    config = example(heading, override)
    with pytest.raises(ConfigError, match=f"{field} names no module that can be found: say"):
        checks.check(config)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Install a package of that name whose entry points are given as TOML, beside the examples' modules."""

    def install(package: str, table: str) -> None:
        about = tmp_path / "beside" / f"{package}-1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        groups = tomllib.loads(table)["project"]["entry-points"]
        points = [(group, *point) for group, points in groups.items() for point in points.items()]
        text = "\n".join(f"[{group}]\n{name} = {value}" for group, name, value in points)
        (about / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / "beside"))
        own_code._entry_points.cache_clear()

    yield install
    own_code._entry_points.cache_clear()


POINTS = re.findall(r"```toml\n(# pyproject.*?)```", PAGE, re.DOTALL)[0]


@pytest.mark.parametrize(
    ("heading", "overrides"),
    [
        ("Objective", ["objective.type=squared", "objective.options={rho_cap=5.0}"]),
        ("Teacher engine", ["teachers.sharp.engine=sharper"]),
        ("Store", ["weights.store.type=mirrored", "weights.store.options={first='store', second='backup'}"]),
    ],
)
def test_an_entry_point_is_another_name_for_the_same_code(
    example: Example, installed: Callable[[str, str], None], heading: str, overrides: list[str]
) -> None:
    config = example(heading)
    with pytest.raises(ConfigError, match=overrides[0].partition("=")[2]):
        example(heading, *overrides)
    installed("examples", POINTS)
    assert example(heading, *overrides) == config


def test_rewards_and_tasks_are_found_by_their_entry_points(
    example: Example, installed: Callable[[str, str], None]
) -> None:
    rows = example("Reward function", "prompts.reward_fn=brief").prompts
    made = example("Prompt source", "prompts.task=successor").prompts
    with pytest.raises(ConfigError, match="'brief' cannot be loaded"):
        load_rewards(rows)
    with pytest.raises(ConfigError, match="'successor' cannot be loaded"):
        tasks.load(made.task, made.options)
    installed("examples", POINTS)
    assert load_rewards(rows)(Prompt("1", [1], "default", "7", ""), "so 7") == (0.98, "7")
    assert tasks.load(made.task, made.options).prompt(0, 4).answer == "9"


def test_built_in_names_are_nobody_elses_and_a_name_is_one_package_s(
    example: Example, installed: Callable[[str, str], None]
) -> None:
    config = example("Store", "weights.store={type='directory'}", "objective.type=full")
    installed("hides", POINTS.replace("mirrored", "directory").replace("squared =", "full ="))
    assert example("Store", "weights.store={type='directory'}", "objective.type=full") == config
    installed("again", POINTS.replace("own_store:Mirrored", "other_store:Mirrored"))
    installed("first", POINTS)
    with pytest.raises(ConfigError, match=r"'mirrored' is an entry point .*other_store:.*, own_store:"):
        example("Store", "weights.store.type=mirrored")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def Mirrored(first, second): return 3", r"a int: it must return a sync\.weights\.stores\.Store"),
        ("def Mirrored(first): ...", r"raised TypeError \(.*\) when it was called"),
    ],
)
def test_a_store_that_is_none_is_refused(example: Example, tmp_path: Path, code: str, problem: str) -> None:
    config = example("Store")
    (tmp_path / "beside" / "own_store.py").write_text(code)
    with pytest.raises(ConfigError, match=rf"weights\.store\.type = 'own_store:Mirrored' .*{problem}"):
        store_of(config, config.run_dir)


# --- the files of docs/tutorials, written and used as their reader does, up to the preflight


BLOCK = re.compile(r"^```(?:python|toml)\n# (\w+\.\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""Name and content of a file."""
COMMAND = re.compile(r"^(distill run \w+\.toml.*)$", re.MULTILINE)


def test_every_configuration_passes_the_preflight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "tutorial").mkdir()
    monkeypatch.chdir(tmp_path / "tutorial")
    letters = {"tiny/student": STUDENT, "tiny/teacher": TEACHER, "other/teacher": TEACHER}
    game = {"game/student": guess.STUDENT, "game/teacher": guess.TEACHER}
    for models, tokenizer in ((letters, letter_tokenizer()), (game, guess.guess_tokenizer())):
        for folder, recipe in models.items():
            new_model(recipe, tokenizer).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    pages = [*(ROOT / "docs/tutorials").glob("*.md")]
    for page in pages:
        for name, text in BLOCK.findall(page.read_text()):
            Path(name).write_text(text)
    runpy.run_path("make_letters.py")
    lines = [line for page in pages for line in COMMAND.findall(page.read_text().replace("\\\n", ""))]
    commands = {" ".join(line.split()): parsed(shlex.split(line, comments=True)) for line in lines}
    files = [line for line in commands.values() if line["config"].is_file()]
    configs = [load(line["config"], line["overrides"]) for line in files]
    understood = {config.run.name: len(checks.check(config).split.train) for config in configs}
    use_folder(None)
    runs = ("crash", "letters", "lora", "rewarded", "two-teachers")
    assert understood == {"game": 1800, "hints": 2000} | dict.fromkeys(runs, 1872)


def test_the_reward_takes_letters_from_both_ends(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorials/own-data.md").read_text()
    reward = {}
    exec(dict(BLOCK.findall(page))["letters_reward.py"], reward)
    prompt = Prompt("1", [], answer="bdkmz")
    right = {text: reward["from_both_ends"](prompt, text) for text in ("bzdmk", "zmbdk", "dbkmz", "bzd")}
    assert right == {"bzdmk": 1.0, "zmbdk": 1.0, "dbkmz": 0.0, "bzd": 0.0}


async def test_the_game_ends_with_the_number_or_after_five_guesses() -> None:
    page, game = (ROOT / "docs/tutorials/environment.md").read_text(), dict[str, Any]()
    exec(dict(BLOCK.findall(page))["own_game.py"], game)
    task = next(task for task in range(1000) if random.Random(task).randint(1, 20) == 7)

    async def plays(*guesses: str) -> tuple[Any, list[str]]:
        script = Script(*guesses)
        return await game["play"](task, script), script.heard

    won, lost = {"reward": 1.0, "guesses": 3}, {"reward": 0.0, "guesses": 5}
    assert await plays("[10]", "[5]", "[7]") == (won, ["?", "lower", "higher"])
    assert await plays("[1]", "", "[2]", "[20]", "[6]") == (lost, ["?", "higher", "lower", "higher", "lower"])
