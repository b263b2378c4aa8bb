"""`distill chat`: a run's student and its teachers answer the same prompts.

The student's folder is served by one more teacher process: all generate in the same way, on CPU or GPU.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from distill.aio import unless
from distill.config import RunConfig
from distill.config.loading import load_run_dir
from distill.config.prompts import DatasetPrompts, JsonlPrompts
from distill.launch.preflight import serving
from distill.launch.roles import Ports, plan_servers, temporary
from distill.launch.supervise import Supervisor
from distill.prompts.rows import row_encoder
from distill.published import export_version
from distill.scoring import ask
from sync.base.address import token_from_environment
from sync.base.errors import ConfigError, DistillError
from sync.base.own_code import use_folder
from sync.base.tokenizers import load_tokenizer, text_reader
from sync.wire import ScoreRefused, TeacherPrompt, pack, unpack
from sync.wire.peers import Role
from teacher_service.client import TeacherClient
from teacher_service.config import TeacherConfig

ANSWER_SECONDS: Final = 3600.0
_OF_THE_RUN: Final = ("replicas", "host", "port", "threads", "follow_student_every", "keep_folder")
"""What a teacher that is started here does not take over from its configuration."""


class Conversations:
    """One with each model; every prompt goes to all of them.

    Prompts are encoded, and answers sampled, as the run's are. Without a chat template each is a text to be
    continued, by itself.
    """

    def __init__(self, config: RunConfig, tokenizer: Any, clients: Mapping[str, TeacherClient]) -> None:
        rows = config.prompts
        if not isinstance(rows, JsonlPrompts | DatasetPrompts):
            template = "chat" if tokenizer.chat_template else "plain"
            rows = JsonlPrompts(type="jsonl", path=Path(), template=template)
        self._encode, self._is_chat = row_encoder(tokenizer, rows), rows.template == "chat"
        self._clients, self._rollout = clients, config.rollout
        self._text = text_reader(tokenizer, config.rollout.stop_token_ids)
        self._turns, self._messages = 0, defaultdict[str, list[dict[str, str]]](list)

    def reset(self) -> None:
        """Forget all turns."""
        self._messages.clear()

    async def answer(self, prompt: str) -> dict[str, str]:
        """Model → its answer, or in parentheses why there is none; such a turn is not kept."""
        self._turns += 1
        answers = await asyncio.gather(*(self._ask(name, prompt) for name in self._clients))
        return dict(zip(self._clients, answers, strict=True))

    async def _ask(self, name: str, prompt: str) -> str:
        messages = [*self._messages[name], {"role": "user", "content": prompt}]
        ids = pack(np.array(self._encode(messages if self._is_chat else prompt), np.int32))
        try:
            request = partial(
                self._clients[name].generate,
                max_tokens=self._rollout.max_tokens,
                stop_token_ids=self._rollout.stop_token_ids,
                temperature=self._rollout.temperature,
            )
            prompts = [TeacherPrompt(name, ids, seed=self._turns)]
            ((reply, _),) = await ask(self._clients[name], prompts, request, ANSWER_SECONDS)
        except DistillError as error:
            return f"({error})"
        if isinstance(reply, ScoreRefused):
            return f"({reply.error})"
        text = self._text(unpack(reply.token_ids).tolist())
        if self._is_chat:
            self._messages[name] = [*messages, {"role": "assistant", "content": text}]
        return text


@dataclass
class Chat:
    """Conversations with servers that run meanwhile; its methods block."""

    conversations: Conversations
    supervisor: Supervisor
    runner: asyncio.Runner

    def answer(self, prompt: str) -> dict[str, str]:
        """See `Conversations.answer`. Raises ChildFailed when a server has died."""
        answers, told = self.conversations.answer(prompt), "every server has ended: see their logs"
        return self.runner.run(unless(self.supervisor.watch(), answers, told))


@contextmanager
def chatting(
    run_dir: Path, version: str, with_teachers: bool, sampling: Mapping[str, Any], say: Callable[[str], None]
) -> Iterator[Chat]:
    """Chat with a version of a run's student ("final", "best" or a published one), and with its teachers.

    `sampling`: keys of [rollout] with other values than the run's. Teachers with `urls` are reached there;
    all other servers are started, and stopped at the end of the block. `say` gets a line when each stage
    begins. Raises ConfigError when the run holds no such model.
    """
    config = load_run_dir(run_dir)
    config = config.with_(rollout=dict(sampling))
    use_folder(config.run.code_folder)
    token = token_from_environment() or secrets.token_urlsafe(32)
    with temporary(config) as moved, Ports() as ports, asyncio.Runner() as runner:
        say(f"reading {version}")
        student = _student(config, run_dir, version, moved.run.folder / "student")
        models = {f"student-{version}": student}
        if with_teachers:
            sharing = {name: t for name, t in config.teachers.items() if t.tokenizer != "own"}
            for name in config.teachers.keys() - sharing.keys():
                say(f"teacher {name} is left out: it has a tokenizer of its own")
            models |= {name: _served_here(teacher) for name, teacher in sharing.items()}
        plan = plan_servers(moved.model_copy(update={"teachers": models}), token, ports, Role.TEACHER)
        clients = {name: TeacherClient(name, plan.where[f"teachers.{name}"], token) for name in models}
        conversations = Conversations(config, load_tokenizer(student), clients)
        servers = serving(plan.children, moved.run_dir / "logs", config.run.start_seconds)
        stack = AsyncExitStack()
        try:
            say(f"starting {', '.join(models)}")
            supervisor = runner.run(stack.enter_async_context(servers))
            for client in clients.values():
                stack.push_async_callback(client.aclose)
            yield Chat(conversations, supervisor, runner)
        finally:
            runner.run(stack.aclose())


def _student(config: RunConfig, run_dir: Path, version: str, work: Path) -> TeacherConfig:
    """A server of that version; `work`: a folder for a model that must be merged or read from the store."""
    folder, place = (run_dir / version).absolute(), config.student
    if version not in ("final", "best"):
        export_version(run_dir, version, work)
        folder = work
    elif (folder / "adapter_config.json").is_file():
        from distill.evaluation.models import write_merged

        write_merged(place, folder, work)
        folder = work
    elif not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} holds no model: finish the run, or give a --version that `distill sync ls` lists"
        )
    return TeacherConfig(
        path=str(folder),
        trust_remote_code=place.trust_remote_code,
        chat_template=place.chat_template,
        dtype=place.dtype,
        devices=place.devices[:1],
        env=place.env,
    )


def _served_here(teacher: TeacherConfig) -> TeacherConfig:
    """One process on loopback that generates, with the weights of its folder; as it is where it has URLs."""
    update = {name: TeacherConfig.model_fields[name].default for name in _OF_THE_RUN}
    if "generate" not in teacher.kind.can:
        update |= {"engine": "transformers", "engine_args": {}}
    return teacher if teacher.urls else teacher.model_copy(update=update)
