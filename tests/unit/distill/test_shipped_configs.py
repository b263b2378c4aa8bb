"""Every configuration of configs/ opens with its command, and passes plan and preflight against models of the
shape that it names."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from byte_tokenizer import byte_tokenizer
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

import distill
from distill.config import RunConfig
from distill.config.loading import load
from distill.config.prompts import DatasetPrompts, JsonlPrompts, TaskPrompts
from distill.launch.preflight import check_machine
from distill.model_facts import count_parameters
from distill.preflight_checks import checks, devices, machine, placement
from distill.preflight_checks.machine import GIB
from distill.tasks import calculate, guess, sort_letters
from distill.tasks.teaching import Recipe, new_model
from sync.base.address import TOKEN_VARIABLE
from sync.base.settings import ModelSource

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))
RECIPES = sorted((ROOT / "configs/recipes").glob("*.toml"))
TOYS: dict[str, tuple[Any, Any]] = {
    "": (sort_letters, sort_letters.letter_tokenizer),
    "guess": (guess, guess.guess_tokenizer),
    "calculator": (calculate, calculate.calculate_tokenizer),
}
"""Task and tokenizer of the quickstart that plays an environment of this name; "": that has none."""
H100 = 79.6
"""GiB of a GPU sold with 80 GB."""
TURNS: Final = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
)
HYBRID: Final = (
    TURNS
    + "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    + "{%- endif %}{%- endif %}"
)
"""Thinks unless told not to, as Qwen3 does."""
NO_THINKING: Final = TURNS + "{%- endif %}"
"""Never thinks, as Qwen3-Coder."""
DENSE: Final = {
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, False),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40, False),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 64, False),
}
"""Width, feed-forward width, layers, heads, tied embeddings."""
EXPERTS: Final = {
    "Qwen/Qwen3-30B-A3B": (2048, 768, 48, 32),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (2048, 768, 48, 32),
    "Qwen/Qwen3-235B-A22B": (4096, 1536, 94, 64),
}
"""Width, an expert's width, layers, heads; 128 experts, 8 a token."""


def stand_in(folder: Path, name: str) -> Path:
    """For the model called `name` on the Hub: a config of its shape, so that sizes computed from it are the
    model's, and a tiny tokenizer with a chat template of its family's kind; no weights."""
    place = folder / name.replace("/", "--")
    if not place.is_dir():
        config_of(name).save_pretrained(place)
        template = NO_THINKING if "Coder" in name else HYBRID
        byte_tokenizer(template, pad_token="<|endoftext|>").save_pretrained(place)
    return place


def config_of(name: str) -> Any:
    longest = 262144 if "Coder" in name else 40960
    shared = {"head_dim": 128, "vocab_size": 151936, "dtype": "bfloat16", "max_position_embeddings": longest}
    if "SmolLM2-135M" in name:
        shared = {"vocab_size": 49152, "dtype": "bfloat16", "max_position_embeddings": 8192}
        return LlamaConfig(**sized(576, 1536, 30, 9, 3), tie_word_embeddings=True, **shared)
    if name in DENSE:
        *size, tied = DENSE[name]
        return Qwen3Config(**sized(*size, 8), tie_word_embeddings=tied, **shared)
    width, inner, layers, heads = EXPERTS[name]
    experts = {"moe_intermediate_size": inner, "num_experts": 128, "num_experts_per_tok": 8}
    sizes = sized(width, 3 * width, layers, heads, 4)
    return Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=False, **shared)


def sized(*size: int) -> dict[str, int]:
    attention = "num_attention_heads", "num_key_value_heads"
    return dict(zip(("hidden_size", "intermediate_size", "num_hidden_layers", *attention), size, strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight GPUs of 80 GB and a large disk."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(TOKEN_VARIABLE, "sesame")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "gpus", lambda: {str(i): H100 * GIB for i in range(8)})
    for module in (devices, placement):
        monkeypatch.setattr(module, "installed_for_cpu", lambda: False)
    monkeypatch.setattr(machine, "_free", lambda path: (path, 100 << 40))


def replaced(config: RunConfig, models: Path, folder: Path) -> RunConfig:
    """The same with stand-ins for models and rows, and a run folder that can be made."""

    task, tokenizer = TOYS[next(iter(config.environments), "")]

    def placed(source: Any, recipe: Recipe = task.TEACHER) -> Any:
        if source.path == "made by the command":  # of a quickstart, whose task makes them
            path = models / f"{task.__name__} of {recipe.width}"
            new_model(recipe, tokenizer()).save_pretrained(path)
            tokenizer().save_pretrained(path)
        else:
            path = stand_in(models, source.path)
        return source.model_copy(update={"path": str(path)})

    rows = folder / "rows"
    rows.mkdir()
    lines = [
        {"prompt": f"{i}?", "question": f"{i}?", "answer": str(i), "source": ("code", "x")[i % 2]}
        for i in range(100)
    ]
    (rows / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    update: dict[str, Any] = {
        "run": config.run.model_copy(update={"folder": folder / "runs"}),
        "student": placed(config.student, task.STUDENT),
        "teachers": {name: placed(teacher) for name, teacher in config.teachers.items()},
        "environments": {
            name: one if one.python is None else one.model_copy(update={"python": Path(sys.executable)})
            for name, one in config.environments.items()
        },
    }
    if isinstance(config.prompts, DatasetPrompts):
        update["prompts"] = config.prompts.model_copy(update={"path": str(rows), "name": None})
    elif isinstance(config.prompts, TaskPrompts) and "tokenizer" in config.prompts.options:
        options = config.prompts.options | {"tokenizer": update["student"].path}
        update["prompts"] = config.prompts.model_copy(update={"options": options})
    elif isinstance(config.prompts, JsonlPrompts) and not config.prompts.path.is_file():
        update["prompts"] = config.prompts.model_copy(update={"path": rows / "rows.jsonl"})
    return config.model_copy(update=update)


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_opens_with_its_command_and_passes_the_preflight(
    path: Path, models: Path, tmp_path: Path
) -> None:
    opening = [line for line in path.read_text().splitlines()[:8] if line.startswith("#")]
    assert any("distill " in line or "make " in line for line in opening)
    given = load(path)
    if path.stem in ("user_run", "small_model", "rewards"):  # for CPUs: changed as user_run.toml says
        student = given.student.model_copy(update={"engine_args": {"gpu-memory-utilization": 0.4}})
        trainer = {"deepspeed": ROOT / "configs/deepspeed/zero3_gpu.json"}
        given = given.with_(student=student, trainer=trainer, run={"share_gpus": True})
    own = replaced(given, models, tmp_path)
    config, split, lines, *_ = checks.check(own)
    check_machine(config)
    needed = machine.estimate(config)
    machine.check_room(config, needed)
    print("\n".join([f"--- {path.name}", *lines, *machine.lines(config, needed)]))  # noqa: T201
    assert bool(split.train[0].token_ids) != bool(config.environments)
    assert config.objective.type != "auto"
    assert any(line.startswith("computed: ") for line in lines) or config.student.urls


def test_the_stand_ins_are_of_the_size_that_they_stand_for(models: Path) -> None:
    """Parameters of the model cards, in billions."""
    sizes = {"0.6B": 0.596, "1.7B": 1.72, "32B": 32.76, "30B-A3B": 30.53, "235B-A22B": 235.1}
    for name, size in sizes.items():
        source = ModelSource(path=str(stand_in(models, f"Qwen/Qwen3-{name}")))
        assert count_parameters(source) / 1e9 == pytest.approx(size, rel=0.005)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_opens_with_the_memory_and_the_bottleneck_of_its_plan(
    path: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(devices, "gpus", dict)
    opening = " ".join(itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()))
    comment = " ".join(opening.replace("#", " ").split())
    (device,) = re.findall(rf"Computed by `distill plan {path.relative_to(ROOT)} --device (\w+)`", comment)
    given = load(path)
    config = replaced(given, models, tmp_path).with_(prompts=given.prompts)  # no rows are here
    found = distill.plan(config, device=device)
    assert found.refusal is None
    assert "not measured" in comment
    for use in found.memory:
        terms = " + ".join(f"{what} {size / GIB:.1f}" for what, size in use.terms.items())
        assert f"{terms} = {use.bytes / GIB:.1f}" in comment
    seconds = [f"{stage.role} {stage.seconds:.3g}" for stage in found.plan.slowest]
    assert f"{seconds[0]} (the bottleneck)" in comment
    assert all(words in comment for words in seconds)
    assert f"{found.plan.step_seconds:.3g}" in comment
