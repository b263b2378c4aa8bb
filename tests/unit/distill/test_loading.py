"""What a person reads when a configuration cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from small_config import LEAST, make_config

from distill.config.loading import load, load_run_dir, merge, parse_override, read, retyped, validate
from sync.base.errors import ConfigError


def problem(override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(merge(LEAST, parse_override(override)), "my.toml")
    return str(caught.value)


ROWS = '{type="jsonl", path="x"}'


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.stps=3", "run.stps: did you mean 'steps'?"),
        ("studnt.path=3", "studnt: did you mean 'student'?"),
        ("teachers.t.engin=3", "teachers.t.engin: did you mean 'engine'?"),
        ("prompts.tsk=3", "prompts.tsk: did you mean 'task'?"),
        ('objective={type="topk",kk=3}', "objective.kk: did you mean 'k'?"),
        ("evaluation.placement.prt=3", "evaluation.placement.prt: did you mean"),
        (
            'prompts={type="mixture",task="x",parts={a={type="jsonl",path="x",prompt_field="y"}}}',
            "prompts.parts.a.prompt_field: did you mean 'field'?",
        ),
        ("objective.kk=3", "objective.kk: known of type 'auto' are coefficient,"),
        (f"evaluation.sets.a.source={ROWS[:-1]}, fild=1}}", "evaluation.sets.a.source.fild: did you mean"),
        ("buffer.zzzz=1", "buffer.zzzz: known here are depth, fsync, late, max_staleness, score_batch, "),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one_or_all(override: str, says: str) -> None:
    key, _, hint = says.partition(": ")
    assert problem(override).startswith(f"my.toml: {key} is not a known key: {hint}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=many", "run.steps = 'many': input should be a valid integer"),
        ("teachers.t.engine=x", "teachers.t.engine = 'x': input should be 'transformers' or 'vllm'"),
        ("teachers.t.engine_url=h:1", "teachers.t.engine_url = 'h:1': not a server's URL: write http://host"),
        ("controller.url=h:1", "controller.url = 'h:1': not a server's URL: write http://host:port"),
        ('objective.type=["topk"]', "objective = {'type': ['topk']}: input tag '['topk']' found"),
        ('student.engine_args={tensor-parallel-size="two"}', "GPUs are counted with it: write a whole"),
        ("student.engine_args={pipeline-parallel-size=0}", "pipeline-parallel-size = 0: GPUs are counted"),
        ("teachers.t.engine_args={tensor_parallel_size=2.0}", "size = 2.0: GPUs are counted with it: write"),
        ("student.engine_args={max-num-seqs=0}", "-seqs = 0: plans are computed with it: write a whole"),
        (
            'teachers.t={path="m",engine="vllm",engine_args={gpu_memory_utilization="high"}}',
            "gpu_memory_utilization = 'high': memory is computed with it: write a share above 0, at most 1",
        ),
        ("student.engine_args={gpu-memory-utilization=1.5}", "1.5: memory is computed with it: write a"),
        ("trainer.lr=inf", "trainer.lr = inf: input should be a finite number"),
        (
            'prompts={type="jsonl",path="p",chat_template_kwargs={enable_thinking="False"}}',
            "enable_thinking = 'False': every text is true to a template: write false",
        ),
        ("teachers.u.device=cpu", "teachers.u.path is missing: it has no default"),
        ('student.urls=["http://h:1","http://h:l"]', "urls.1 = 'http://h:l': not a server's URL (Inv"),
        ("weights.store.path=x", 'weights.store.type is missing: … one of directory, xet, … "p'),
        ("buffer.late.seconds=5", "buffer.late.type is missing: set it too, … drop, wait, freshness"),
        ('prompts={type="mixture",parts={a={path="x"}}}', "prompts.parts.a.type is missing: set it too"),
    ],
)
def test_a_wrong_value_or_a_missing_one_is_shown_with_its_rule(override: str, expected: str) -> None:
    message = problem(override)
    assert all(words in message for words in expected.split(" … ")), message


@pytest.mark.parametrize("engine", ["transformers", "my_engine:make"])
def test_arguments_of_an_engine_other_than_vllm_are_its_own(config: Any, engine: str) -> None:
    args = {"max-num-seqs": 0, "gpu_memory_utilization": "auto"}
    teacher = {"path": "teacher", "engine": engine, "engine_args": args}
    assert config(teachers={"t": teacher}).teachers["t"].engine_args == args


def test_every_wrong_key_is_reported_at_once() -> None:
    raw = merge(merge(LEAST, parse_override("run.stps=3")), parse_override("rollout.batch=0"))
    with pytest.raises(ConfigError) as caught:
        validate(raw, "my.toml")
    assert len(str(caught.value).splitlines()) == 2


def test_an_override_is_toml_and_else_a_string() -> None:
    assert parse_override("a.b=3") == {"a": {"b": 3}}
    assert parse_override("a.b=../model") == {"a": {"b": "../model"}}
    assert parse_override('a."b.c"=1e-3') == {"a": {"b.c": 1e-3}}
    assert parse_override("a=x=y") == {"a": "x=y"}
    assert parse_override('a.b="True"') == {"a": {"b": "True"}}


RULE = "TOML writes true and false, and has no value for none"
PYTHONS = {f"a.b={value}": f"b={value}': {RULE}" for value in ("True", "False", "None", "null")}


@pytest.mark.parametrize(
    ("text", "says"),
    [*PYTHONS.items(), *((text, r"section\.key=value") for text in ("a.b", "=3", "a b c=3"))],
)
def test_an_override_of_another_form_or_in_pythons_words_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_override(text)


def test_paths_come_back_absolute_and_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch")
    for folder in "sm":
        (tmp_path / folder).mkdir()
    config = validate(LEAST | {"evaluation": False}, "x")
    assert (config.trainer.deepspeed, config.run.folder) == (tmp_path / "x.json", tmp_path / "runs")
    assert (config.student.path, config.teachers["t"].path) == (str(tmp_path / "s"), "t")
    assert config.evaluation is None
    written = {
        "run": {"folder": "~/runs"},
        "student": {"path": "~/m", "mirror_folder": "${SCRATCH}/m", "chat_template": "$SCRATCH/t.jinja"},
        "weights": {"store": {"type": "directory", "path": "~/store"}},
    }
    config = validate(merge(LEAST, written), "my.toml")
    assert (config.run.folder, config.weights.store.path) == (tmp_path / "runs", tmp_path / "store")
    student = config.student.path, config.student.mirror_folder, config.student.chat_template
    assert student == (str(tmp_path / "m"), Path("/scratch/m"), "/scratch/t.jinja")
    for path in ("$NOT_SET/runs", "~nobody-of-that-name/runs"):
        with pytest.raises(ConfigError, match="a variable or user that is not known here: write it out"):
            validate(merge(LEAST, {"run": {"folder": path}}), "my.toml")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_bytes(b'\xef\xbb\xbf[run]\r\nname = "x"\r\n')
    assert read(tmp_path / "my.toml") == {"run": {"name": "x"}}


def test_a_file_that_is_missing_or_no_toml_and_a_folder_without_a_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none\.toml cannot be read \(No such .*name an existing TOML file"
    ):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML.*line 1"):
        load(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="name the folder of a run"):
        load_run_dir(tmp_path)


# --- an override that gives a section another type


TOPK = {"objective": {"type": "topk", "k": 8, "coefficient": 2.0, "rho_cap": 3.0}}
OWN = {"objective": {"type": "a:f", "k": 8, "options": {"x": 1}}}
STORE = {"weights": {"store": {"type": "bucket", "bucket": "a/b"}}}
MIXTURE = {"prompts": {"type": "mixture", "parts": {"a": {"type": "task", "task": "x"}}}}


@pytest.mark.parametrize(
    ("before", "override", "after", "says"),
    [
        (TOPK, "objective.type=sampled", {"coefficient": 2.0, "rho_cap": 3.0}, "'sampled' has no k"),
        (TOPK, 'objective={type="jsd",beta=1}', {"beta": 1, "coefficient": 2.0}, "'jsd' has no k, rho_cap"),
        (OWN, "objective.type=a:g", {"k": 8}, "'a:g' has no options"),
        (STORE, "weights.store.type=directory", {}, "'directory' has no bucket"),
        (MIXTURE, 'prompts.parts.a={type="jsonl",path="y"}', {"path": "y"}, "'jsonl' has no task"),
    ],
)
def test_another_type_keeps_what_it_knows_and_names_what_it_drops(
    before: dict[str, Any], override: str, after: dict[str, Any], says: str
) -> None:
    over, place = parse_override(override), override.partition("=")[0].removesuffix(".type")
    kept, lines = retyped({**LEAST, **before}, over)
    section: Any = merge(kept, over)
    for key in place.split("."):
        section = section[key]
    assert section == {"type": says.split("'")[1], **after}
    assert lines == [f"{place} of type {says}, which is left out"]


@pytest.mark.parametrize("override", ["objective.type=topk", "objective.k=3", "objective.type=nothing"])
def test_the_same_type_a_plain_key_and_an_unknown_type_drop_nothing(override: str) -> None:
    raw = {**LEAST, "objective": {"type": "topk", "k": 8}}
    assert retyped(raw, parse_override(override)) == (raw, [])


def test_a_file_is_loaded_with_another_type_and_one_line_says_what_went(tmp_path, caplog) -> None:
    path = tmp_path / "run.toml"
    objective = {"type": "topk", "k": 8, "coefficient": 2.0}
    path.write_text(tomli_w.dumps(LEAST | {"objective": objective}))
    objective = load(path, ["objective.type=sampled"]).objective
    assert (objective.type, objective.coefficient) == ("sampled", 2.0)
    said = "--set objective.type=sampled: objective of type 'sampled' has no k, which is left out"
    assert [record.getMessage() for record in caplog.records] == [said]
    for key in ("k", "kk"):
        with pytest.raises(ConfigError, match=rf"objective\.{key} is not a known key"):
            load(path, ["objective.type=sampled", f"objective.{key}=3"])


def test_own_code_lies_beside_the_file_unless_it_says_where(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "configs" / "user_run.toml"
    assert load(path).run.code_folder == path.parent
    assert load(path, [f"run.code_folder={tmp_path}"]).run.code_folder == tmp_path


def test_a_changed_configuration_has_other_values_in_the_sections_that_are_named() -> None:
    config = make_config(student={"env": {"A": "1"}})
    changes: dict[str, Any] = {"teachers": {"t": {"port": 7}}, "student": {"env": {"B": "2"}}}
    changed = config.with_(run={"steps": 9}, evaluation=None, **changes)
    assert (changed.run.steps, changed.evaluation) == (9, None)
    assert (changed.teachers["t"].port, changed.student.env) == (7, {"B": "2"})
    assert changed.run == config.run.model_copy(update={"steps": 9}), "and nothing else is"
    assert changed.with_(run={"steps": config.run.steps}).run == config.run
