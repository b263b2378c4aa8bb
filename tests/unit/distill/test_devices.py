"""Which process is on which GPU, and what is said to be in its memory, against sums made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sized_models import HEAD, INNER, KV, LAYERS, PARAMETERS, SIZES, VOCABULARY, WIDTH, dense, mixture
from small_config import make_config

from distill.config import RunConfig
from distill.hardware import device_named
from distill.model_facts import count_parameters, kv_bytes, weight_bytes
from distill.planning.estimate import find_roles
from distill.preflight_checks import devices
from distill.preflight_checks.machine import GIB
from sync.base.errors import ConfigError
from sync.base.settings import ModelSource
from teacher_service.config import ENGINES, EngineKind

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dense(tmp_path_factory.mktemp("model"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs of 10 GiB."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "installed_for_cpu", lambda: False)
    monkeypatch.setattr(devices, "gpus", lambda: {str(i): 10.0 * GIB for i in range(4)})


def apart(model: str, **sections: Any) -> RunConfig:
    """Every role on a GPU of its own; `sections` are laid over them."""
    base: dict[str, Any] = {
        "student": {"path": model, "devices": ["0"]},
        "teachers": {"t": {"path": model, "devices": ["1"]}},
        "trainer": {"devices": "2", "ranks": 1, "deepspeed": str(ROOT / "configs/deepspeed/zero3_gpu.json")},
        "evaluation": {"placement": {"devices": ["3"]}},
    }
    over = {name: {**base.get(name, {}), **fields} for name, fields in sections.items()}
    return make_config(**base | over)


def terms(config: RunConfig) -> dict[str, dict[str, float]]:
    return {use.process: dict(use.terms) for use in devices.uses(config, ["0", "1", "2", "3"])}


def test_what_is_in_the_memory_of_each_process(model: str) -> None:
    assert count_parameters(ModelSource(path=model)) == PARAMETERS
    engine_args = {"max_model_len": 100, "gpu_memory_utilization": 0.5}
    trainer = {"head_chunk": 8, "micro_batch_tokens": 1000, "activation_checkpointing": True}
    teacher = {"path": model, "devices": ["1"], "batch_tokens": 1000, "head_chunk": 8}
    student = {"engine_args": engine_args}
    found = terms(apart(model, student=student, teachers={"t": teacher}, trainer=trainer))
    work = float(devices.WORKSPACE)
    cache = {"KV cache of 100 tokens": 100 * KV}
    assert found["student-0"] == {"weights": 2 * PARAMETERS, "work space": work, **cache}
    assert found["teacher-t"] == {
        "weights": 2 * PARAMETERS,
        "pass of 1,000 tokens": 2 * 1000 * (6 * WIDTH + 3 * INNER),
        "logits": 2 * 4 * 8 * VOCABULARY,
    }
    assert found["evaluator"] == {"student in float32": 4 * PARAMETERS, "work space": work}
    assert found["trainer"] == {
        "weights": 2 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimizer": 12 * PARAMETERS,
        "gathered": 2 * PARAMETERS,
        "activations of 1,000 tokens": 2 * 1000 * (LAYERS * WIDTH + 16 * WIDTH + 4 * INNER),
        "logits": 20 * 8 * VOCABULARY,
    }


def test_a_further_engine_has_the_memory_and_the_pace_of_the_way_in_which_it_computes(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one of which that is not said does not import."""
    with pytest.raises(TypeError, match="computes"):
        EngineKind(())  # type: ignore[call-arg]
    monkeypatch.setitem(ENGINES, "third", ENGINES["vllm"])
    teacher = {"path": model, "engine": "third", "devices": ["1,3"]}
    config = apart(model, teachers={"t": teacher | {"engine_args": {"tensor_parallel_size": 2}}})
    assert {*terms(config)["teacher-t"]} == {"weights", "work space", "KV cache of 32,768 tokens"}
    uses = [*devices.uses(config, ["0", "1", "2", "3"])]
    role = find_roles(config, device_named("h100"), uses)["teacher t"]
    assert role.devices == sum(role.load.values()) == 2, "its GPUs compute at once"


@pytest.mark.parametrize(
    ("given", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "own"}, 16),
    ],
    ids=lambda given: given["quant_method"] if isinstance(given, dict) else "",
)
def test_a_quantized_teacher_takes_the_bits_of_its_config(tmp_path, given: dict[str, Any], bits: int) -> None:
    teacher = dense(tmp_path, quantization_config=given)
    quantized = apart(teacher, teachers={"t": {"path": teacher, "engine": "vllm", "devices": ["1"]}})
    embeddings = VOCABULARY * WIDTH
    expected = 2 * embeddings + bits / 8 * (PARAMETERS - embeddings)
    assert terms(quantized)["teacher-t"]["weights"] == expected


def test_a_quantized_multimodal_model_takes_the_bits_of_its_outer_config(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    config = Gemma3Config(text_config=SIZES | {"num_hidden_layers": 1, "intermediate_size": INNER})
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    source, embeddings = ModelSource(path=str(tmp_path)), VOCABULARY * WIDTH  # tied to the head
    expected = 2 * embeddings + 4 / 8 * (count_parameters(source) - embeddings)
    assert weight_bytes(source, "bfloat16") == expected


def test_a_folder_of_quantized_tensors_is_as_large_as_it_is_stored(tmp_path: Path) -> None:
    source = ModelSource(path=dense(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4}))
    stored = {"packed": np.zeros(100, "i4"), "norm": np.zeros(50, "f2"), "scales": np.zeros(10, "f4")}
    save_file(stored, tmp_path / "model.safetensors")
    assert weight_bytes(source, "auto") == 4 * 100 + 2 * (50 + 10)
    assert weight_bytes(source, "float32") == 4 * 100 + 4 * (50 + 10)
    assert count_parameters(source) == PARAMETERS


def test_weights_stored_in_any_precision_are_sized(tmp_path: Path) -> None:
    teacher = {"path": dense(tmp_path, dtype="float64"), "devices": ["1"]}
    assert terms(apart(str(tmp_path), teachers={"t": teacher}))["teacher-t"]["weights"] == 8 * PARAMETERS


def test_ranks_share_what_zero_shards_and_offload_and_adapters_take_it_away(model: str, tmp_path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    for machines in ({"hostfile": str(tmp_path / "hosts")}, {"nodes": 2}):
        four = terms(apart(model, trainer={"ranks": 2, "devices": "0,1", **machines}))
        assert four["trainer"]["optimizer"] == 12 * PARAMETERS / 4
    offload = str(ROOT / "configs/deepspeed/zero3_offload.json")
    found = terms(apart(model, trainer={"deepspeed": offload}))["trainer"]
    assert (found["weights"], found["optimizer"], found["gradients"]) == (0, 0, 0)
    kept = {f"zero_optimization.offload_{name}.device": "none" for name in ("param", "optimizer")}
    assert terms(apart(model, trainer={"deepspeed": offload, "overrides": kept})) == terms(apart(model))
    found = terms(apart(model, objective={"type": "full"}))["trainer"]
    assert found["heads of teachers"] == 2 * VOCABULARY * WIDTH
    found = terms(apart(model, trainer={"lora": {}}))["trainer"]
    assert (found["weights"], found["optimizer"], found["gradients"]) == (2 * PARAMETERS, 0, 0)


@pytest.mark.parametrize("live", [1e9, 1e4], ids=["as many as there are", "a layer at a time"])
def test_ranks_that_share_experts_gather_a_part_of_them_and_keep_what_zero_keeps(
    tmp_path: Path, live: float
) -> None:
    """Layers 0 and 2 have experts."""
    student = {"path": mixture(tmp_path, mlp_only_layers=[1])}
    total, layer = count_parameters(ModelSource(path=str(tmp_path))), 8 * 3 * WIDTH * INNER

    def trainer(shared: int) -> dict[str, float]:
        overrides = {"zero_optimization.stage3_max_live_parameters": live}
        given = {"ranks": 4, "devices": "0,1,2,3", "expert_parallel": shared, "overrides": overrides}
        return terms(apart(str(tmp_path), student=student, trainer=given))["trainer"]

    alone, by_two = trainer(1), trainer(2)
    assert alone["gathered"] == 2 * (total if live == 1e9 else layer)
    assert by_two["gathered"] == 2 * (total - 2 * layer / 2 if live == 1e9 else layer / 2)
    assert by_two == alone | {"gathered": by_two["gathered"]}
    assert by_two["optimizer"] == 12 * total / 4


def test_tensor_parallel_engines_take_as_many_gpus_as_they_ask_for(model: str) -> None:
    student = {"devices": ["0,1", "2,3"], "engine_args": {"tensor-parallel-size": 2}, "replicas": 2}
    by_four = {"engine": "vllm", "engine_args": {"tensor_parallel_size": 4}}
    teacher = {"path": model, "devices": ["0,1,2,3"], **by_four}
    config = apart(model, student=student, teachers={"t": teacher})
    used = {use.process: use for use in devices.uses(config, [])}
    assert [used[f"student-{i}"].gpus for i in (0, 1)] == [("0", "1"), ("2", "3")]
    assert used["student-1"].terms["weights"] == 2 * PARAMETERS / 2
    assert used["teacher-t"].gpus == ("0", "1", "2", "3")
    heads_are_not_split_further = 2 * LAYERS * 1 * HEAD * 2
    assert kv_bytes(devices.text_config(config.student), 4) == heads_are_not_split_further
    with pytest.raises(ConfigError, match="need 2 GPUs, and devices names 0: name as many"):
        terms(apart(model, student={**student, "devices": ["0"], "replicas": 1}))


@pytest.mark.usefixtures("machine")
def test_two_processes_on_a_gpu_are_refused_unless_told(model: str) -> None:
    lines = devices.check_devices(apart(model))
    places = dict(line.split(":")[1].strip().split(" on ") for line in lines)
    assert places == {"student-0": "GPU 0", "teacher-t": "GPU 1", "evaluator": "GPU 3", "trainer": "GPU 2"}
    users = r"student-0 \(student\.devices\) and evaluator \(evaluation\.placement\.devices\)"
    wanted = rf"GPU 0 is used by {users}.*run\.share_gpus = true"
    together = {"placement": {}}  # inherits all, takes the first
    with pytest.raises(ConfigError, match=wanted):
        devices.check_devices(apart(model, evaluation=together))
    smaller = {"engine_args": {"gpu-memory-utilization": 0.5}}
    shared = apart(model, evaluation=together, run={"share_gpus": True}, student=smaller)
    assert len(devices.check_devices(shared)) == 4
    game = {"game": {"environment": "m:f", "devices": ["0"]}}  # computes there, in memory that is not known
    with pytest.raises(ConfigError, match=r"^GPU 0 is used by student-0 .* and environment-game"):
        devices.check_devices(apart(model, environments=game))
    lines = devices.check_devices(apart(model, environments=game, run={"share_gpus": True}))
    assert not [line for line in lines if "environment" in line]


@pytest.mark.usefixtures("machine")
def test_what_cannot_fit_is_refused_with_the_sum(model: str) -> None:
    args = {"max-model-len": 2**23, "gpu-memory-utilization": 0.2}
    problem = r"work space 2\.0 = .*, in the 0\.2 that vLLM reserves, 2\.0 GiB of 10\.0 GiB: raise"
    with pytest.raises(ConfigError, match=problem):
        devices.check_devices(apart(model, student={"engine_args": args}))
    shared = apart(
        model, run={"share_gpus": True}, evaluation={"placement": {"devices": ["2"]}},
        trainer={"micro_batch_tokens": 3_000_000},
    )  # fmt: skip
    problem = r"GPU 2 has 10\.0 GiB, and .* are needed \(evaluator 2\.0 GiB; trainer"
    with pytest.raises(ConfigError, match=problem):
        devices.check_devices(shared)
    of_two = {"devices": "2,3", "ranks": 2, "micro_batch_tokens": 3_000_000}
    with pytest.raises(ConfigError, match=r"^GPU 2 has 10\.0 GiB, and .* trainer on GPU 2,3: weights.*\Z"):
        devices.check_devices(apart(model, trainer=of_two, evaluation={"device": "cpu"}))  # in one line
    large = apart(model, preflight={"gpu_gib": 100.0}, trainer={"micro_batch_tokens": 3_000_000})
    assert devices.check_devices(large)


@pytest.mark.usefixtures("machine")
def test_teachers_that_unload_share_a_gpu_as_far_as_they_are_loaded_together(model: str) -> None:
    idle = {"path": model, "devices": ["1"], "idle_unload_seconds": 5.0, "batch_tokens": 4_000_000}
    teachers = {"t": idle, "u": idle | {"route": ["b"]}}
    config = apart(model, teachers=teachers, evaluation={"device": "cpu"})
    assert devices.check_devices(config.with_(run={"max_loaded_teachers": 1}))
    with pytest.raises(ConfigError, match=r"GPU 1 has 10\.0 GiB, and 10\.\d GiB are needed"):
        devices.check_devices(config)


def test_machines_that_urls_name_are_computed_by_host(model: str) -> None:
    urls = ["http://a:1", "http://b:1", "http://b:2"]
    place = {"path": model, "devices": ["0", "0", "0"], "urls": urls}
    with pytest.raises(ConfigError, match=r"GPU 0 of b is used by student-1 .* and student-2"):
        devices.check_devices(apart(model, student=place, trainer={"devices": "2"}))
    place["devices"] = ["0", "0", "1"]
    lines = devices.check_devices(apart(model, student=place, controller={"trainer": "external"}))
    assert "GPU 2 of each trainer node" in lines[-1]


def test_a_model_of_another_machine_may_be_readable_there_alone(model: str, caplog: Any) -> None:
    teacher = {"path": "/there/only", "urls": ["http://a:1"], "devices": ["0"]}
    lines = devices.check_devices(apart(model, teachers={"t": teacher}))
    assert not any("teacher" in line for line in lines)
    assert "memory of teacher t is not computed: its path is not readable here" in caplog.text


def test_a_machine_without_gpus_computes_only_what_is_named(model: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(devices.shutil, "which", lambda _: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    bare = make_config(student={"path": model}, teachers={"t": {"path": model}})
    assert devices.check_devices(bare) == []


def test_nvidia_smi_is_read(monkeypatch: Any, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 81559'; echo '1, 40960'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert devices.gpus() == {"0": 81559 * 2**20, "1": 40960 * 2**20}
    program.write_text("#!/bin/sh\necho '0, [N/A]'\n")
    assert devices.gpus() == {"0": None}
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert devices.gpus() == {}
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(devices, "SMI_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"nvidia-smi has not answered within 0\.1 s: look into dmesg"):
        devices.gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 0")
    monkeypatch.setattr(devices, "installed_for_cpu", lambda: False)
    assert devices.visible({"0": 1.0}) == ["1", "0"]
