"""Models small enough to enumerate, a replica that samples from one, a teacher without its process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from in_memory import MemoryReplica, MemoryTeacher
from msgspec.structs import replace
from small_config import make_config
from started import controlled
from tiny_models import language_model
from transformers import Qwen3ForCausalLM

from distill.aio import cancel
from distill.config import RunConfig
from distill.controller import Controller
from distill.evaluation.completions import Completion, file_of
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.schedule import Evaluations
from distill.evaluation.sets import open_sets
from distill.interfaces import Components
from distill.prompts.sources import longest_sequence, open_prompts
from distill.prompts.stream import PromptStream
from distill.record.store import Store
from distill.tasks.sort_letters import letter_tokenizer
from sync import wire
from sync.base.tokenizers import load_tokenizer
from sync.wire import GenerateRequest, Version, pack
from teacher_service.config import TeacherConfig
from teacher_service.engines import build
from teacher_service.engines.base import Item, ScoreOptions
from teacher_service.messages import describe, scored
from teacher_service.router import Router

torch.set_num_threads(1)

ROWS, EOS = 32, 1
"""Rows of the models; the tokenizer has fewer ids, the rest are padding."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MADE: list[Controller] = []
KNOWN = len(letter_tokenizer().get_vocab())


def save(folder: Path, *others: str) -> Path:
    """A student, a teacher and `others` in `folder`, each with weights of its own."""
    size = {"vocab_size": ROWS, "hidden_size": 16, "head_dim": 8, "intermediate_size": 24}
    for seed, name in enumerate(("student", "teacher", *others)):
        language_model("Qwen3", seed, **size, initializer_range=0.5).save_pretrained(folder / name)
        letter_tokenizer().save_pretrained(folder / name)
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Replica(MemoryReplica):
    """Samples from a model at temperature 1, whatever its version."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = Qwen3ForCausalLM.from_pretrained(folder)
        self.random = torch.Generator().manual_seed(3)

    async def _complete(self, prompt: wire.GeneratePrompt, request: GenerateRequest) -> wire.Generated:
        ids, logprob = list[int](), list[float]()
        while len(ids) < request.sampling.max_tokens and EOS not in ids:
            logp_V = log_probs(self.model, [*prompt.token_ids, *ids])[-1]
            ids.append(int(torch.multinomial(logp_V.exp(), 1, generator=self.random)))
            logprob.append(float(logp_V[ids[-1]]))
        return wire.Generated(
            id=prompt.id,
            token_ids=pack(np.array(ids, "i4")),
            logprob=pack(np.array(logprob, "f4")),
            spans=[wire.VersionSpan(self.version or Version(0, 0), 0, len(ids))],
            finish_reason="stop" if ids[-1] == EOS else "length",
        )


class Teacher(MemoryTeacher):
    """The engine of a model folder without its process; `told`: what it says of itself instead."""

    def __init__(self, folder: Path, **told: Any) -> None:
        super().__init__()
        config = TeacherConfig(path=str(folder), dtype="float32")
        tokenizer = load_tokenizer(config)
        self._engine = build(config, len(tokenizer.get_vocab()))
        self._info = replace(describe("t", self._engine.engine_info, tokenizer), **told)

    async def info(self, timeout: float | None = None) -> wire.TeacherInfo:
        return self._info

    first_info = info

    async def head(self) -> wire.Head:
        assert "hidden" in self._info.can
        head = self._engine.head()
        assert head is not None
        return head

    def _scores(self, sequence: wire.ScoreSequence, want: wire.Want) -> wire.Scored:
        assert "hidden" in self._info.can or not want.hidden
        item = Item(wire.unpack(sequence.token_ids), sequence.start)
        return scored(sequence.id, self._engine.score([item], ScoreOptions(hidden=want.hidden)), "f4")

    def _completion(self, prompt: wire.TeacherPrompt, max_tokens: int) -> wire.TeacherCompletion:
        """Two tokens, the second the end."""
        self.completed.append(prompt.id)
        token_ids, logprob = pack(np.array([3, EOS], np.int32)), pack(np.zeros(2, np.float32))
        return wire.TeacherCompletion(prompt.id, token_ids, logprob, "stop")


@torch.no_grad()
def log_probs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[L, V] over the known ids, one sequence at a time and without padding or cache."""
    return model(input_ids=torch.tensor([tokens])).logits[0, :, :KNOWN].float().log_softmax(-1)


def by_hand(models: Path) -> np.ndarray:
    """[R, 3]: of each held-out completion or episode exact KL and log p − log q, summed over the student's
    tokens, and their number."""
    student, teacher = (Qwen3ForCausalLM.from_pretrained(models / name) for name in ("student", "teacher"))

    def sums(prompt: list[int], done: list[int], own: list[tuple[int, int]]) -> np.ndarray:
        logp, logq = (log_probs(model, prompt + done)[len(prompt) - 1 : -1] for model in (student, teacher))
        exact = (logp.exp() * (logp - logq)).sum(-1)
        sampled = (logp - logq).gather(1, torch.tensor(done)[:, None])[:, 0]
        places = [place for start, end in own for place in range(start, end)]
        return np.array([exact[places].sum(), sampled[places].sum(), len(places)])

    def of(row: dict[str, Any]) -> np.ndarray:
        if "sequences" in row:
            return sum(sums(part["prompt_ids"], part["token_ids"], part["own"]) for part in row["sequences"])
        return sums(letter_tokenizer().encode(row["prompt"]), row["token_ids"], [(0, len(row["token_ids"]))])

    return np.array([of(row) for row in lines(models)])


def configure(tmp_path: Path, **evaluation: Any) -> RunConfig:
    return make_config(
        run={"name": "x", "folder": tmp_path},
        student={"path": str(tmp_path / "student")},
        teachers={"t": {"path": "t/t", "urls": ["http://127.0.0.1:1"]}},
        prompts={"type": "task", "task": "sort_letters"},
        rollout={"max_tokens": 6, "request_size": 5},
        evaluation={"prompts": 12, "batch_tokens": 64, "device": "cpu", **evaluation},
    )


def lines(models: Path, name: str = "held_out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in file_of(models / "x", Version(0, 0), name).read_text().splitlines()]


def evaluation(
    config: RunConfig,
    models: Path,
    replica: MemoryReplica,
    teachers: dict[str, Any],
    environments: dict[str, Any] | None = None,
) -> Controller:
    """A controller whose evaluator is in this process; the replica is its only one."""
    tokenizer, context = load_tokenizer(config.student), longest_sequence(config)
    split = open_prompts(config, tokenizer, context)
    weights: Any = SimpleNamespace(folder=lambda version: models / "student")
    evaluator: Any = Evaluator(config, weights, teachers)
    parts = Components(
        replicas={"r0": replica},
        teachers=teachers,
        route=Router(config.teachers).route,
        prompts=PromptStream(split.train, 0),
        store=Store(Path(mkdtemp(dir=models)), "never"),
        want=wire.Want(),
        vocab_size=KNOWN,
        evaluator=evaluator,
        sets=open_sets(config, split, tokenizer),
        environments=environments or {},
        context=context,
    )
    controller = controlled(config, parts)
    MADE.append(controller)
    controller.pool.poll_seconds = controller.pool.retry_seconds = 0.02
    controller.dispatcher.paused.add("end")
    return controller


async def close() -> None:
    """All that were made, with their workers."""
    while MADE:
        controller = MADE.pop()
        assert controller.evaluations is not None
        await controller.evaluations.generation.close()
        controller.close()


@asynccontextmanager
async def working(controller: Controller) -> AsyncIterator[Evaluations]:
    tasks = [asyncio.create_task(stage) for stage in (controller.pool.run(), controller.lives.run())]
    try:
        assert controller.evaluations is not None
        yield controller.evaluations
        assert not any(task.done() for task in tasks)
    finally:
        await cancel(tasks)


async def completed(
    controller: Controller, version: Version = Version(0, 0), sets: Sequence[str] = ()
) -> dict[str, list[Completion]]:
    """The completions of a version."""
    async with working(controller) as evaluations:
        return await evaluations.generation.completions(version, ["held_out", *sets])


async def evaluated(
    controller: Controller, version: Version = Version(0, 0), sets: Sequence[str] = ()
) -> wire.EvalReport:
    """The report of a version."""
    async with working(controller) as evaluations:
        return await evaluations.report(version, sets)
