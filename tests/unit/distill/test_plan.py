"""What a plan computes, against closed forms for models of known shape; and its probe."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from command import left
from sized_models import (
    HEAD,
    HEADS,
    INNER,
    KV,
    KV_HEADS,
    LAYER,
    LAYERS,
    PARAMETERS,
    VOCABULARY,
    WIDTH,
    dense,
    mixture,
)
from small_config import make_config

import distill
from distill import hardware
from distill.config import RunConfig
from distill.config.loading import with_settings
from distill.config.prompts import EnvironmentPrompts, JsonlPrompts
from distill.hardware import DEVICES, Device, of_names
from distill.launch import probe
from distill.model_facts import Shape, shape_of
from distill.planning import estimate, forecast
from distill.planning.estimate import Generation, Lengths, Role, delta_share, find_roles, train_factor
from distill.planning.measured import calibrate, measure
from distill.preflight_checks import devices, machine, placement
from distill.preflight_checks.machine import GIB
from distill.topology import EACH_NODE
from distill.trainer_api.guard import Guard
from student_trainer.deepspeed_json import deepspeed_config, in_bf16
from sync.base.errors import ConfigError, DataError, RemoteError
from sync.base.jsonl import JsonLines
from sync.base.settings import ModelSource
from teacher_service.config import TeacherConfig

ROOT = Path(__file__).parents[3]
DEEPSPEED = str(ROOT / "configs/deepspeed/zero3_gpu.json")
FLOPS, BYTES = 1e9, 1e6
GPU = Device("h100", 2 * FLOPS, 4 * BYTES, 10.0, 256, 0.5, 0.25)
"""Reaches FLOPS and BYTES a second."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dense(tmp_path_factory.mktemp("model"))


def on_gpus(model: str, **sections: Any) -> RunConfig:
    """Two replicas, a vLLM teacher of two GPUs, two ranks; batches of 8 completions of 8 tokens."""
    teacher = {"path": model, "engine": "vllm", "devices": ["2,3"]}
    teacher["engine_args"] = {"tensor_parallel_size": 2}
    base: dict[str, Any] = {
        "student": {"path": model, "replicas": 2, "devices": ["0", "1"]},
        "teachers": {"t": teacher},
        "trainer": {"devices": "4,5", "ranks": 2, "deepspeed": DEEPSPEED},
        "preflight": {"gpu_gib": 10.0},
        "buffer": {"depth": "full"},
    }
    over = {name: {**base.get(name, {}), **fields} for name, fields in sections.items()}
    return make_config(**base | over).with_(evaluation=None)


def one_gpu_each(model: str, **more: Any) -> RunConfig:
    student, trainer = {"replicas": 1, "devices": ["0"]}, {"devices": "2", "ranks": 1}
    teachers = {"t": {"path": model, "devices": ["1"]}}
    return on_gpus(model, student=student, teachers=teachers, trainer=trainer, **more)


def planned(config: RunConfig, prompt: float = 4, completion: float = 8, **more: Any) -> estimate.Plan:
    lengths = estimate.Lengths(prompt, completion, "given")
    return estimate.plan(config, GPU, list(devices.uses(config, [])), lengths, **more)


def forward(tokens: float) -> float:
    return 2 * PARAMETERS * tokens + 2 * LAYERS * HEADS * HEAD * tokens**2


def test_experts_and_embeddings_that_multiply_nothing_are_left_out(tmp_path: Path) -> None:
    shape = shape_of(ModelSource(path=mixture(tmp_path, tie_word_embeddings=False)))
    one_expert, router = 3 * WIDTH * INNER, WIDTH * 8
    shared = VOCABULARY * WIDTH + WIDTH + LAYERS * (LAYER + router)
    assert shape.active == pytest.approx(shared + LAYERS * 2 * one_expert)
    assert shape.read(1) == pytest.approx(shape.active)
    assert shape.read(1000) == pytest.approx(shared + LAYERS * 8 * one_expert)


def test_a_decode_step_moves_weights_and_cache_or_computes() -> None:
    shape = Shape(1000.0, 0.0, 0.0, 1.0, 2, 10.0, 50.0)
    role = Role("student", 3, 3 * 2, {})
    device = partial(Device, "of a test", gib=1.0, sequences=1, compute_share=1.0, bandwidth_share=1.0)
    memory_bound = Generation(shape, 2, Lengths(10, 20, ""), role, 5, device(1e12, 100.0))
    assert memory_bound.decode_step() == (2 * 1000 + 5 * (10 + 20 / 2) * 50) / (2 * 100)
    compute_bound = replace(memory_bound, device=device(10.0, 1e12))
    assert compute_bound.decode_step() == 5 * 2 * 1000 / (2 * 10)
    prefill = (30 * shape.forward(10) + 0.5 * 15 * shape.forward(20)) / (3 * 2 * 10)
    seconds = compute_bound.seconds(30, swaps=0.5)
    assert seconds == pytest.approx(30 * 20 / (3 * 5) * compute_bound.decode_step() + prefill)


def test_seconds_flops_and_tokens_of_each_stage(model: str) -> None:
    found = planned(on_gpus(model, weights={"kv_on_swap": "recompute"}))
    replicas, teacher, trainer = found.stages
    assert (teacher.flops, trainer.flops) == (8 * forward(12), 3 * 8 * forward(12))
    assert teacher.seconds == teacher.flops / (2 * FLOPS)
    assert trainer.seconds == trainer.flops / (2 * FLOPS)
    in_flight = 3 * 8 / 2  # of a replica, by the capacity rule: (max_staleness + 1) batches in all
    assert found.in_flight == 2 * in_flight
    step = (2 * PARAMETERS + in_flight * (4 + 8 / 2) * KV) / BYTES
    prefill, again = 8 * forward(4) / (2 * FLOPS), 2 * in_flight * forward(8) / (2 * FLOPS)
    assert replicas.seconds == pytest.approx(8 * 8 / (2 * in_flight) * step + prefill + again)
    kept = planned(on_gpus(model, weights={"kv_on_swap": "keep"}))
    assert kept.step_seconds == pytest.approx(replicas.seconds - again)
    assert found.step_seconds == replicas.seconds == found.slowest[0].seconds
    of_a_token = 4 * 4  # id, log-probability, score, entropy
    assert (found.tokens, found.gpus) == (64, 6)
    assert found.hours == 6 * found.step_seconds / 3600
    assert found.record_bytes_a_day == pytest.approx(of_a_token * 64 / found.step_seconds * 86400)


@pytest.mark.parametrize(
    ("limits", "given", "lengths"),
    [
        ({"max_turns": 5}, (None, None), (60.0, 40.0)),
        ({"max_turns": 5, "max_tokens": 50}, (None, None), (10.0, 40.0)),
        ({"max_turns": 50}, (None, None), (1.0, 99.0)),
        ({"max_turns": 5}, (None, 9.0), (60.0, 9.0)),
        ({"max_turns": 5}, (7.0, 9.0), (7.0, 9.0)),
    ],
)
def test_an_episode_is_as_long_as_its_limits_allow(
    model: str, limits: dict[str, int], given: tuple[float | None, float | None], lengths: tuple[float, float]
) -> None:
    student, game = {"engine_args": {"max-model-len": 100}}, {"environment": "own:play", **limits}
    prompts = EnvironmentPrompts(type="environment", environment="e")
    config = on_gpus(model, student=student, environments={"e": game}).with_(prompts=prompts)
    found = estimate.lengths_of(config, *given)
    assert (found.prompt, found.completion) == lengths
    assert planned(config).episodes
    assert not planned(on_gpus(model)).episodes


@pytest.mark.parametrize("share", [0.0, 0.75])
def test_completions_of_teachers_are_in_no_stage_and_the_plan_tells_their_share(
    model: str, share: float
) -> None:
    sections = {"objective": {"type": "sft", "on_policy": share}, "weights": {"kv_on_swap": "recompute"}}
    found = planned(on_gpus(model, **sections))
    assert (found.stages[0].flops > 0, found.in_flight > 0) == (share > 0, share > 0)
    assert f"{1 - share:.0%} of the completions: in no stage" in shown(found)
    assert "generation by teachers" not in shown(planned(on_gpus(model)))


def shown(found: estimate.Plan) -> str:
    return "\n".join(forecast.table(found, GPU, [], False))


def test_memory_bounds_what_is_in_flight(model: str) -> None:
    reserved, free = 2 * PARAMETERS + devices.WORKSPACE, 5 * (4 + 8 / 2)
    config = on_gpus(model, preflight={"gpu_gib": (reserved + free * KV) / 0.92 / GIB})
    assert planned(config).in_flight == pytest.approx(2 * 5)


def test_a_synchronous_run_adds_its_stages_up_and_shared_gpus_add_up_too(model: str) -> None:
    one_by_one = planned(on_gpus(model, buffer={"max_staleness": 0}))
    assert one_by_one.step_seconds == pytest.approx(sum(one.seconds for one in one_by_one.stages))
    assert one_by_one.age == 0
    shared = planned(on_gpus(model, trainer={"devices": "0,1"}, run={"share_gpus": True}))
    assert shared.step_seconds == pytest.approx(shared.stages[0].seconds + shared.stages[2].seconds)


def test_a_swap_meets_what_is_in_flight_while_replicas_generate(model: str) -> None:
    fast = replace(GPU, bandwidth=1e15)

    def plan(cache: str, **sections: Any) -> estimate.Plan:
        config = on_gpus(model, weights={"kv_on_swap": cache}, **sections)
        return estimate.plan(config, fast, list(devices.uses(config, [])), Lengths(100, 1, ""))

    few = {"rollout": {"batch": 8, "max_in_flight": 1}}
    kept, dropped = plan("keep", **few).stages[0].seconds, plan("recompute", **few)
    again, share = 2 * forward(100.5) / (2 * FLOPS), dropped.stages[0].seconds / dropped.step_seconds
    assert share < 0.5, "the trainer is the bottleneck"
    assert dropped.stages[0].seconds == pytest.approx(kept + share * again)
    at_once = {"buffer": {"max_staleness": 0}}  # replicas have nothing to do while the trainer has
    assert plan("keep", **at_once).step_seconds == plan("recompute", **at_once).step_seconds


def test_age_is_what_is_in_flight_over_a_batch_and_at_most_the_bound(model: str) -> None:
    config = on_gpus(model, rollout={"batch": 8, "max_in_flight": 6}, weights={"publish_every": 2})
    assert planned(config).age == 2 * 6 / 8 + (2 - 1) / 2
    assert planned(on_gpus(model)).age == 2  # 3 batches are in flight, max_staleness is 2
    trainer_bound = on_gpus(model, rollout={"max_in_flight": 1}, buffer={"max_staleness": 5})
    measured = estimate.Calibration({"train": 1e-9})
    assert planned(trainer_bound, measured=measured).age == 5


def test_an_adaptive_buffer_is_planned_a_batch_ahead(model: str) -> None:
    config = on_gpus(model, buffer={"depth": "adaptive", "max_staleness": 4})
    assert planned(config).in_flight == 2 * 8
    assert planned(config, measured=estimate.Calibration({"train": 1e-9})).age == 1
    config = on_gpus(model, buffer={"depth": "adaptive", "max_staleness": 0})
    assert (planned(config).in_flight, planned(config).age) == (8, 0)


def test_a_core_reaches_what_its_products_and_its_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.float32: 2.0, torch.bfloat16: 1.0}
    products = {torch.mv: lambda matrix: 0.5, torch.mm: lambda matrix: seconds[matrix.dtype]}
    monkeypatch.setattr(hardware, "_seconds", lambda product, matrix, _: products[product](matrix))
    row, bandwidth = hardware.core.__wrapped__(), 4 * 4096 * 8192 / 0.5
    assert (row.flops, row.bandwidth) == (2 * 512**3, bandwidth)
    for item, bare in ((2, 2 * 512**3), (4, 512**3)):
        taken = 1 / (hardware.PRODUCTS * bare) + 1 / (hardware.BETWEEN * bandwidth)
        assert row.flops_per_second(item) == pytest.approx(1 / taken)
    assert GPU.flops_per_second(4) == GPU.flops_per_second(2) == FLOPS


def test_prompts_of_a_file_are_measured(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, folder := tmp_path / "model")
    byte_tokenizer().save_pretrained(folder)
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abcd", "abcdefgh")))
    prompts = JsonlPrompts(type="jsonl", path=rows, template="plain")
    config = on_gpus(str(folder)).with_(prompts=prompts)
    lengths = estimate.lengths_of(config, None, None)
    assert (lengths.prompt, lengths.completion) == (6, config.rollout.max_tokens)
    assert lengths.source.startswith("prompt: mean of the first 256 rows")
    gone = config.with_(prompts={"path": tmp_path / "elsewhere.jsonl"})
    assert "prompt: assumed" in estimate.lengths_of(gone, None, None).source


def test_bytes_of_a_version(model: str) -> None:
    found = planned(on_gpus(model, trainer={"lr": 3e-6}))
    assert found.full_bytes == 2 * PARAMETERS
    assert found.delta_bytes == pytest.approx(0.0247 * PARAMETERS)  # the row of docs/benchmarks.md
    assert delta_share(1e-9, "small", 1) == pytest.approx(0.00659 / 2)
    assert delta_share(3e-6, "fast", 8) == pytest.approx(0.0247 / 2 * 8**0.7)
    assert delta_share(5e-5, "fast", 10**4) == 1
    single = planned(on_gpus(model, trainer={"overrides": {"bf16.enabled": False}}))
    assert single.delta_bytes == single.full_bytes == 4 * PARAMETERS
    adapters = planned(on_gpus(model, trainer={"lora": {"rank": 4}}))
    query, key = WIDTH + HEADS * HEAD, WIDTH + KV_HEADS * HEAD
    assert adapters.full_bytes == 2 * 4 * LAYERS * (2 * query + 2 * key + 3 * (WIDTH + INNER))
    assert adapters.delta_bytes is None
    assert [train_factor(*case) for case in ((False, False), (True, False), (True, True))] == [3, 4, 3]


def test_a_split_is_suggested_from_twice_the_next_stage_on(model: str) -> None:
    slow = estimate.Calibration({"generate": 1e-3})
    assert "give student more GPUs, first from t" in forecast.split(planned(on_gpus(model), measured=slow))
    assert "no other role has one to spare" in forecast.split(planned(one_gpu_each(model), measured=slow))
    level = estimate.Calibration({stage.kind: stage.seconds for stage in planned(on_gpus(model)).stages})
    assert forecast.split(planned(on_gpus(model), measured=level)) == "", "every stage takes a second"


@pytest.mark.parametrize(
    ("single", "now", "fast"),
    [
        (20.0, "float32", "bfloat16 2.0 times as fast as float32"),
        (80.0, "bfloat16", "float32 2.0 times as fast as bfloat16"),
        (80.0, "float32", ""),
        (45.0, "bfloat16", ""),
        (None, "bfloat16", ""),
    ],
)
def test_the_faster_precision_of_cores_is_named_and_set(
    model: str, single: float | None, now: str, fast: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The preflight names fp32 for bf16, by which nothing is lost; `run.precision` sets it for a new run."""
    core = hardware.Device("cpu", 100.0, 1.0, 0.0, 128, 0.4, 0.5, single)
    overrides = {"bf16.enabled": now == "bfloat16"}
    config = make_config(
        run={"name": "test", "steps": 1, "folder": tmp_path},
        student={"path": model, "dtype": now},
        trainer={"deepspeed": DEEPSPEED, "overrides": overrides},
    )
    teachers = {
        "v1.5": TeacherConfig(path=model, dtype=now),
        "far": TeacherConfig(path="elsewhere", urls=["http://127.0.0.1:1"]),
    }
    config = with_settings(config.model_copy(update={"teachers": teachers}), [])
    sentence = machine.faster_precision(config, core)
    assert fast in sentence
    assert bool(fast) == bool(sentence)

    monkeypatch.setattr(machine, "core", lambda: core)
    monkeypatch.setattr(machine, "installed_for_cpu", lambda: True)
    fp32 = fast.startswith("float32")
    assert machine.decide_precision(config) == (config, [sentence] if fp32 else [])
    asked = with_settings(config, [word for word in shlex.split(sentence) if "=" in word])
    assert asked.run.precision == ("fastest" if fp32 else "as_set")
    changed, lines = machine.decide_precision(asked)
    assert lines == ["run.precision: float32 (fastest)"] * fp32
    assert machine.faster_precision(changed, core) == ""
    if fast:
        models = [changed.student, changed.teachers["v1.5"]]
        assert {each.dtype for each in models} == {fast.split()[0]}
        assert in_bf16(deepspeed_config(changed.trainer)) == (fast.split()[0] == "bfloat16")
    assert changed.teachers["far"] == config.teachers["far"]
    assert changed.run == config.run

    fastest = with_settings(config, ["run.precision=fastest"])
    monkeypatch.setattr(machine, "installed_for_cpu", lambda: False)
    assert machine.decide_precision(config) == machine.decide_precision(fastest) == (config, [])
    config.run_dir.mkdir()
    (config.run_dir / "run.db").touch()
    in_fp32 = with_settings(config, [*machine._in_precision(config, "float32")])
    mixed = with_settings(in_fp32, ["student.dtype=bfloat16"])
    for began, kept in ((mixed, config), (in_fp32, in_fp32)):
        (config.run_dir / "config.json").write_text(began.model_dump_json())
        assert machine.decide_precision(fastest)[0] == kept


def test_roles_whose_gpus_are_unknown_are_refused(model: str) -> None:
    config = on_gpus(model, student={"devices": [], "urls": ["http://elsewhere:1"]})
    with pytest.raises(ConfigError, match=r"student\.devices is not set.*name the GPUs in student\.devices"):
        planned(config)


def test_a_gpu_is_known_by_its_name_or_refused() -> None:
    rows = {"H100 80GB HBM3": "h100", "A100-SXM4-40GB": "a100", "L4": "l4", "GeForce RTX 4090": "rtx4090"}
    assert [of_names({f"NVIDIA {name}"}) for name in rows] == [DEVICES[row] for row in rows.values()]
    for names in ({"NVIDIA L40S"}, {"NVIDIA H100 PCIe"}, {"NVIDIA L4", "NVIDIA H200"}):
        with pytest.raises(ConfigError, match=r"name the nearest with --device"):
            of_names(names)


def test_a_transformers_teacher_computes_on_one_of_its_gpus_at_a_time(model: str) -> None:
    config = on_gpus(model, teachers={"t": {"path": model, "devices": ["2,3"]}})
    role = find_roles(config, GPU, list(devices.uses(config, [])))["teacher t"]
    assert (role.devices, set(role.load.values())) == (1, {0.5})


def test_a_measured_run_replaces_what_is_assumed(model: str, tmp_path: Path) -> None:
    made_run(tmp_path)
    run, config = measure(tmp_path), on_gpus(model)
    assert (run.lengths.prompt, run.lengths.completion) == (5, 7)
    assert run.seconds == {"generate": 1.5, "score": 0.25, "train": 1.0}
    assert (run.step_seconds, run.age, run.delta) == (2, 1.5, 0.25)
    own = planned(config, 5, 7)
    again = planned(config, 5, 7, measured=calibrate(run, own, max(run.seconds.values())))
    assert [one.seconds for one in again.stages] == pytest.approx([1.5, 0.25, 1.0])
    assert again.step_seconds == pytest.approx(2)
    assert again.delta_bytes == 0.25 * again.full_bytes
    twice = planned(on_gpus(model, rollout={"batch": 16}), 5, 7, measured=calibrate(run, own, 1.5))
    assert [one.seconds for one in twice.stages[1:]] == pytest.approx([0.5, 2.0])
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl with figures"):
        measure(tmp_path / "none")


@pytest.mark.parametrize(
    ("measures", "words"),
    [
        ({"measured"}, r"--measured .*objective\.on_policy = 0.*on_policy above 0"),
        ({"probe"}, r"--probe measures the student's generation"),
        ({"measured", "probe"}, "leave one of them out"),
    ],
    ids=["a run that generated nothing", "a student that generates nothing", "two runs"],
)
def test_what_calibrates_no_plan_is_refused(model: str, tmp_path, measures: set[str], words: str) -> None:
    made_run(tmp_path)
    config = on_gpus(model, objective={"type": "sft"})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    measured = tmp_path if "measured" in measures else None
    with pytest.raises(ConfigError, match=words):
        distill.plan(config, device="h100", measured=measured, probe="probe" in measures)


def test_steps_on_what_was_generated_before_the_first_or_for_the_last_are_not_measured(tmp_path) -> None:
    """Two batches are there when the trainer starts, and three when generation has ended."""
    made_run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "train/rows" in line)
    ends = [0, 20, 50, 80, 110, 140, 150, 155, 160]
    first |= {"buffer/depth": 1.5}
    rows = [first | {"step": n, "time": end, **scored(n)} for n, end in enumerate(ends, 1)]
    rows[-1]["buffer/depth"] = 2.0
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    stages = (("student-0", "generate"), ("teacher t", "score"), ("trainer", "train"))
    spans = [{"role": role, "what": what, "start": 0, "end": 160} for role, what in stages]
    (tmp_path / "timeline.jsonl").write_text("\n".join(map(json.dumps, spans)))
    assert measure(tmp_path).step_seconds == pytest.approx((160 - 20) / 7), "it goes on"
    (tmp_path / "summary.json").write_text('{"completed": true}')
    assert measure(tmp_path).step_seconds == 30


def scored(steps: int) -> dict[str, int]:
    """What a teacher has scored by then, with the preflight's."""
    return {"teacher/t/tokens": 5000 + 12 * 8 * steps, "teacher/t/sequences": 100 + 8 * steps}


def made_run(folder: Path) -> None:
    """Slow steps of ten seconds, then four that end every two seconds, the last after a restart of an hour.

    Of 8 rollouts of 7 tokens; the spans that begin before the end of the warm-up reach into it.
    """
    folder.mkdir(exist_ok=True)
    counts = {"train/rows": 8, "train/tokens": 56, "sync/bytes_delta": 25, "sync/bytes_full": 100}
    steps: list[dict[str, Any]] = []
    for n, end in enumerate((0, 9, 11, 13, 15, 3615), 1):
        steps.append({"step": n, "time": end, "buffer/age_mean": 1.5, **scored(n), **counts})
    steps[0] |= {"train/tokens": 800, "buffer/age_mean": 9}
    spans = [
        ("student-0", "generate", 2, 16),
        ("student-1", "generate", 9, 14),
        ("teacher t", "score", 10, 11),
    ]
    spans += [("trainer", "train", 8, 12), ("trainer", "publish", 3611, 3612), ("trainer", "wait", 9, 99)]
    lines = [{"role": role, "what": what, "start": a, "end": b} for role, what, a, b in spans]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*steps, {"step": 4, "eval/x": 1}])))
    (folder / "timeline.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_the_command_prints_writes_and_refuses_what_does_not_fit(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpus", dict)
    made_run(run := tmp_path / "before")
    config = one_gpu_each(model, preflight={"gpu_gib": None}, objective={"type": "auto"})
    (run / "config.json").write_text(config.model_dump_json())
    words = ["plan", str(run), "--json", str(figures := tmp_path / "figures.json")]
    assert left(*words, "--device", "h100") == 0
    shown = capsys.readouterr().out
    words_shown = "trainer, GPU 2", "the bottleneck", "GPU-hours", "Assumed: 0.4 of 989"
    assert all(word in shown for word in words_shown)
    found = json.loads(figures.read_text())
    assert found["step_seconds"] == max(stage["seconds"] for stage in found["stages"])
    assert left(*words, "--device", "h100", "--measured", str(run)) == 0
    assert "measured in before" in (shown := capsys.readouterr().out)
    assert "Assumed" not in shown
    assert json.loads(figures.read_text())["step_seconds"] == pytest.approx(2)
    assert left(*words, "--device", "h100", "--set", "preflight.gpu_gib=1") == 1
    assert "the preflight refuses it" in capsys.readouterr().err
    assert left(*words) == 2
    assert "this machine has none: say which kind they are with --device" in capsys.readouterr().err
    assert left(*words, "--device", "abacus") == 2
    assert f"choose one of {', '.join(DEVICES)}" in capsys.readouterr().err


# --- clusters


def on_slurm(model: str, nodes: int) -> RunConfig:
    """The same without `devices`, two trainer machines, machines of four GPUs of 10 GiB."""
    return on_gpus(
        model,
        student={"devices": []},
        teachers={"t": {"path": model, "engine": "vllm", "engine_args": {"tensor_parallel_size": 2}}},
        trainer={"devices": None, "ranks": 2, "nodes": 2},
        cluster={"type": "slurm", "nodes": nodes, "gpus_per_node": 4, "cpus_per_node": 8},
    )


def test_on_slurm_roles_have_and_are_measured_on_the_gpus_of_their_placement(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas of one GPU, a teacher of two, ranks on two machines: eight GPUs, none used twice."""
    monkeypatch.setattr(devices, "gpus", lambda: {"0": 80.0 * GIB})  # here, on no node
    config = on_slurm(model, nodes=2)
    found = distill.plan(config, device="h100")
    assert found.machines[-1] == "GPUs: 8 used of 8 reserved"
    assert sum("trainer (2 GPUs)" in line for line in found.machines) == 2
    assert found.refusal is None
    assert found.plan.gpus == 8
    gpus = {stage.role: stage.devices for stage in found.plan.stages}
    assert gpus == {"student": 2, "teacher t": 2, "trainer": 4}
    alone = [(use.host, gpu) for use in found.memory for gpu in use.gpus if use.host != EACH_NODE]
    assert len(alone) == len(set(alone)) == 4
    assert (*found.lines,)[: len(found.machines)] == (*found.machines,)
    assert found.figures["machines"] == [*found.machines]
    made_run(tmp_path)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    measured = distill.plan(config, device="h100", measured=tmp_path)
    assert measured.plan.step_seconds == pytest.approx(2)
    with pytest.raises(ConfigError, match="trainer needs 2 machines with 2 GPUs each"):
        distill.plan(on_slurm(model, nodes=1), device="h100")


def test_processes_that_register_have_the_gpus_of_their_devices_on_machines_of_their_own(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "installed_for_cpu", lambda: False)
    monkeypatch.setattr(devices, "gpus", lambda: {"0": 80.0 * GIB})  # of the controller's machine
    monkeypatch.setattr(devices, "visible", list)
    teacher = {"path": model, "devices": ["0,1", "3"], "replicas": 2}
    sections = {"student": {"devices": []}, "teachers": {"t": teacher}, "cluster": {"type": "external"}}
    config = on_gpus(model, **sections)
    where, _ = placement.placed(config)
    used = {use.process: use for use in devices.uses(config, [], where)}
    assert [len(used[f"teacher-t-{i}"].gpus) for i in (0, 1)] == [2, 1]
    assert used["teacher-t-0"].terms["weights"] == 2 * PARAMETERS / 2
    assert all(" of the machine of " in line for line in devices.check_devices(config, where))


# --- `distill plan --probe` around its run; tests/integration/test_base_student.py makes a real one


@pytest.mark.virtual_time
async def test_it_is_stopped_after_its_seconds_and_as_many_steps_as_a_mean_takes_and_fails_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    async def of_a_run(*ends: float, then: BaseException | None = None) -> Path:
        """The probe of a run whose steps end at these seconds; then it fails, or goes on for ever."""

        async def begun(config: RunConfig, **_: object) -> None:
            config.run_dir.mkdir(parents=True)
            lines = JsonLines(config.run_dir / "metrics.jsonl")
            for end in ends:
                lines.write({"step": 1, "time": end, "train/rows": 8})
            if then is not None:
                raise then
            await asyncio.Event().wait()

        monkeypatch.setattr(probe, "run", begun)
        return await probe.probe(make_config(), tmp_path / str(ends), said.append)

    enough = 0.0, 1.0, 2.0, 3.0, 4.0, probe.SECONDS
    assert await of_a_run(*enough) == tmp_path / str(enough) / probe.NAME
    assert said[-1] == "6 steps in 40 s"
    for few in (enough[1:], enough[:-1]):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(of_a_run(*few), 3600)
    with pytest.raises(RemoteError, match="teacher ended"):
        await of_a_run(then=RemoteError("teacher ended"))


def test_its_run_leaves_nothing_outside_its_folder_and_goes_on_after_bad_steps(tmp_path: Path) -> None:
    store = {"type": "bucket", "bucket": "acme/weights"}
    weights = {"store": store, "codec": "small"}
    bad = {"max_grad_norm": 0.1, "patience": 1}
    config = make_config(run={"steps": 900}, weights=weights, tracking={"wandb": "online"}, guard=bad)
    short = probe.shortened(config, tmp_path)
    assert short.run_dir == tmp_path / "probe"
    assert (short.weights.store.type, short.weights.codec) == ("directory", "small")
    assert (short.tracking.wandb, short.tracking.samples_every, short.evaluation) == ("disabled", 0, None)
    assert (short.trainer.checkpoint_every, short.trainer.checkpoint_minutes) == (0, 0)
    assert short.run.steps == 900
    assert Guard(config.guard).look(1, {"grad_norm": 1.0})
    guard = Guard(short.guard)
    assert not any(guard.look(step, {"loss": math.nan, "grad_norm": 1.0}) for step in range(100))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"student": {"urls": ["http://127.0.0.1:1"]}}, r"student\.urls is set"),
        ({"trainer": {"nodes": 2}}, r"trainer\.nodes is 2"),
        ({"controller": {"trainer": "external"}}, r"controller\.trainer is 'external'"),
        ({"cluster": {"type": "external"}}, r"cluster\.type is 'external'"),
    ],
)
def test_roles_elsewhere_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"--probe starts .* and {words}: .*--measured RUN_DIR"):
        probe.check_here(make_config(**section))
