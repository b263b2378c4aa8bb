"""Models in folders: conversations of `distill chat`, pruning, and how completions behave."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_config import make_config
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, Qwen3Config, Qwen3ForCausalLM

from distill import prune
from distill.cli.main import _prompts
from distill.config.prompts import TaskPrompts
from distill.evaluation.completions import LEAST, LONGEST, Completion, Tokens, behaviour
from distill.launch.chat import Chat, Conversations, _served_here, _student
from distill.launch.supervise import ChildFailed
from distill.rollout.validation import loop
from distill.tasks.sort_letters import STUDENT, letter_tokenizer
from distill.tasks.teaching import new_model
from sync.base.errors import ConfigError, DataError, RemoteError
from sync.wire import ScoreRefused, TeacherCompletion, TeacherPrompt, pack, unpack
from teacher_service.client import Reply
from teacher_service.config import TeacherConfig

TEMPLATE = "{% for one in messages %}{{ one.content }}{{ '>' if one.role == 'user' else '' }}{% endfor %}"


class Model:
    """Completes every prompt with the same letters; an error is raised, a text of refusal returned."""

    def __init__(self, completion: str, fault: Exception | str | None = None) -> None:
        self._ids = letter_tokenizer()(completion, return_tensors="np")["input_ids"][0].astype("int32")
        self.fault = fault
        self.prompts: list[str] = []
        self.calls: list[tuple[Any, ...]] = []

    pause = 0.0

    async def generate(self, prompts: list[TeacherPrompt], *, limit: float, **how: Any) -> Reply[Any]:
        (prompt,) = prompts
        self.prompts.append(letter_tokenizer().decode(unpack(prompt.token_ids)))
        self.calls.append((prompt.seed, *how.values(), round(limit)))
        if isinstance(self.fault, Exception):
            raise self.fault
        if self.fault is not None:
            return Reply([ScoreRefused(prompt.id, self.fault)], "here")
        logprob = pack(self._ids.astype("float32"))
        return Reply([TeacherCompletion(prompt.id, pack(self._ids), logprob, "stop")], "here")


def conversations(template: str | None, sampling: Mapping[str, Any] = {}, **models: Model) -> Conversations:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = template
    prompts = TaskPrompts(type="task", task="sort_letters")
    return Conversations(make_config().with_(prompts=prompts, rollout=dict(sampling)), tokenizer, models)


async def test_each_model_continues_a_conversation_of_its_own_until_the_reset() -> None:
    one, other = Model("xy"), Model("z")
    talk = conversations(TEMPLATE, one=one, other=other)
    assert await talk.answer("ab") == {"one": "xy", "other": "z"}
    other.fault = "8 prompt tokens are too many"
    assert await talk.answer("c") == {"one": "xy", "other": "(8 prompt tokens are too many)"}
    other.fault = RemoteError("no connection")
    assert await talk.answer("d") == {"one": "xy", "other": "(no connection)"}
    talk.reset()
    await talk.answer("e")
    assert one.prompts == ["ab>", "ab>xyc>", "ab>xyc>xyd>", "e>"]
    assert other.prompts == ["ab>", "ab>zc>", "ab>zd>", "e>"]


async def test_without_a_chat_template_every_prompt_is_continued_by_itself() -> None:
    one = Model("xy<eos>")
    talk = conversations(None, {"temperature": 0.5, "max_tokens": 3}, one=one)
    assert [await talk.answer(prompt) for prompt in ("ab>", "c>")] == [{"one": "xy"}] * 2
    assert one.prompts == ["ab>", "c>"]
    assert one.calls == [(1, 3, [], 0.5, 3600), (2, 3, [], 0.5, 3600)]


def test_a_server_that_dies_under_a_prompt_ends_the_chat_with_its_error() -> None:
    async def watch() -> None:
        raise ChildFailed("student-final was ended by SIGKILL")

    class Silent(Model):
        async def generate(self, *_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

    with asyncio.Runner() as runner:
        supervisor: Any = SimpleNamespace(watch=watch)
        talk = Chat(conversations(None, one=Silent("")), supervisor, runner)
        with pytest.raises(ChildFailed, match="student-final was ended"):
            talk.answer("ab>")


def test_a_teacher_is_served_by_one_process_that_generates_and_spares_the_kept_scores() -> None:
    more = {"keep_folder": Path("scores"), "engine_args": {"x": 1}, "host": "0.0.0.0"}
    teacher = TeacherConfig(path="m", engine="vllm", replicas=3, **more)
    assert _served_here(teacher) == TeacherConfig(path="m")
    there = teacher.model_copy(update={"urls": ["http://teacher:1"]})
    assert _served_here(there) is there


def test_an_adapter_is_merged_into_the_student_and_a_missing_model_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base, run = tmp_path / "base", tmp_path / "run"
    new_model(STUDENT, letter_tokenizer()).save_pretrained(base)
    letter_tokenizer().save_pretrained(base)
    config = make_config(student={"path": str(base), "dtype": "float32"})
    with pytest.raises(ConfigError, match="final holds no model: finish the run"):
        _student(config, run, "final", tmp_path / "work")
    model, settings = new_model(STUDENT, letter_tokenizer()), LoraConfig(r=2, target_modules="all-linear")
    get_peft_model(model, settings).save_pretrained(run / "final")
    served = _student(config, run, "final", tmp_path / "work")
    assert (served.path, served.dtype) == (str(tmp_path / "work"), "float32")
    assert {one.name for one in Path(served.path).iterdir()} >= {"model.safetensors", "tokenizer.json"}


def test_prompts_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    with pytest.raises(DataError, match=r"stdin holds bytes that are not utf-8: convert its prompts"):
        list(_prompts())


# --- layers are left out by what they cost, and what is left is a model folder like any other


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Four layers, of which 2 adds nothing to the stream and 1 next to nothing."""
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}>"
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, initializer_range=0.3,
            eos_token_id=tokenizer.eos_token_id, layer_types=["full_attention"] * 4,
        )
    )  # fmt: skip
    with torch.no_grad():
        for place, share in ((1, 1e-3), (2, 0.0)):
            layer = model.model.layers[place]
            layer.self_attn.o_proj.weight *= share
            layer.mlp.down_proj.weight *= share
    model.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    rows = [{"prompt": "".join(letters)} for letters in ("abc", "xyz", "hello", "world", "qrs")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "teacher"


def test_the_layers_that_cost_least_go_and_a_layer_that_adds_nothing_costs_nothing(teacher: Path) -> None:
    lines: list[str] = []
    student = teacher.parent / "student"
    assert prune.prune(str(teacher), student, 2, str(teacher.parent / "rows.jsonl"), lines.append) == [1, 2]
    assert lines[0] == "layer 2 goes: 3 layers are 0.000 nats from the teacher"
    assert lines[1].startswith("layer 1 goes: 2 layers are 0.0")
    whole, left = (AutoModelForCausalLM.from_pretrained(path) for path in (teacher, student))
    assert (left.config.num_hidden_layers, left.config.layer_types) == (2, ["full_attention"] * 2)
    for ours, theirs in ((0, 0), (1, 3)):
        layers = left.model.layers[ours], whole.model.layers[theirs]
        assert torch.equal(*(layer.mlp.up_proj.weight for layer in layers))
    ids = torch.tensor([[3, 5, 7]])
    assert torch.allclose(left(ids).logits, whole(ids).logits, atol=0.05)
    assert AutoTokenizer.from_pretrained(student).get_vocab() == letter_tokenizer().get_vocab()


def test_the_cost_is_the_divergence_of_the_two_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    assert prune.kl(p.log(), q.log()) == pytest.approx(0.25 * torch.log(torch.tensor(2.0)).item())


@pytest.mark.parametrize(
    ("folder", "layers", "says"),
    [
        ("student", 0, "--layers 0: .* has 4, keep 1 to 3 of them"),
        ("student", 4, "--layers 4: .* has 4, keep 1 to 3 of them"),
        ("teacher", 2, "is not empty"),
    ],
)
def test_what_would_leave_no_layer_or_all_or_a_folder_with_something_in_it_is_refused(
    teacher: Path, folder: str, layers: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        prune.prune(str(teacher), teacher.parent / folder, layers, str(teacher.parent / "rows.jsonl"))


def test_a_model_of_images_and_text_is_refused() -> None:
    width = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    text = width | {"vocab_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    vision = width | {"num_hidden_layers": 1, "image_size": 14, "patch_size": 14}
    both = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    with pytest.raises(ConfigError, match="both says in a part of its config"):
        prune._layers(AutoModelForCausalLM.from_config(both), "both", 1)


# --- figures of how completions read, against numbers counted by hand


def completion(token_ids: list[int], finish_reason: str) -> Completion:
    tokens = Tokens([1], np.array(token_ids, np.int32), [(0, len(token_ids))])
    return Completion(0, [tokens], finish_reason)


def test_behaviour_is_counted_over_completions_and_their_runs_of_four_tokens() -> None:
    """Lengths 5, 12, 0, 3; of two runs, nine runs of which one differs, none and none."""
    ends = ([1, 2, 3, 4, 5], "stop"), ([7] * 12, "length"), ([], "stop"), ([1, 2, 3], "failed")
    figures = behaviour([completion(ids, reason) for ids, reason in ends])
    assert figures.ended == 0.5
    assert figures.length_mean == 5.0
    assert figures.length_p90 == pytest.approx(5 + 0.7 * 7)  # between the third and the last of 0, 3, 5, 12
    assert figures.looping == 0.25
    assert figures.distinct == pytest.approx((2 + 1) / (2 + 9))


def test_only_what_the_student_sampled_counts() -> None:
    tokens = Tokens([1], np.array([1, 2, 9, 9, 9, 3], np.int32), [(0, 2), (5, 6)])
    figures = behaviour([Completion(0, [tokens], "stop")])
    assert (figures.length_mean, figures.distinct) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("token_ids", "is_loop"),
    [
        ([1] * 12, True),
        ([1] * 11, False),
        ([*range(32)] * 3, True),
        ([*range(33)] * 3, False),
    ],
)
def test_a_loop_is_over_twelve_tokens_and_of_32_at_most(token_ids: list[int], is_loop: bool) -> None:
    assert (loop(np.array(token_ids), LONGEST, 3, LEAST) is not None) == is_loop
