"""A trainer under the real deepspeed launcher, and a controller written by hand that gives it batches."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import waiting
from forked import start
from plain_step import flat_rows
from ports import Handler
from tiny_models import save_words

from student_trainer import launch
from student_trainer.config import TrainerConfig
from sync import wire
from sync.base.settings import DirectoryStoreConfig
from sync.weights.broadcast import Receiver, Reception
from sync.weights.stores import open_store
from sync.weights.subscribe import Mirror
from sync.wire import Head, Message, Published, Rows, TrainBatch, Version, decode, encode, pack

LAUNCHED = [
    pytest.mark.engine,
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
"""Of a module that starts trainers."""
VOCAB, HIDDEN = 30, 16
ROOT = Path(__file__).parents[2]
Share = Callable[[Version, int, int], Message]


def save_tokenizer(folder: Path) -> None:
    """With VOCAB ids."""
    save_words(folder, (f"w{i}" for i in range(VOCAB)), eos_token="w1", unk_token="w0", pad_token="w0")


# --- a controller -------------------------------------------------------------------------------------------


class StubController:
    """Serves batches from `share(version, rank, world_size)` and keeps what the trainer says."""

    def __init__(
        self,
        share: Share,
        start: Version = Version(0, 0),
        parent: Version | None = None,
        servers: wire.TeacherServers | None = None,
    ) -> None:
        self.events: list[Message] = []
        self.receptions: list[Reception] = []
        self._receiver = Receiver(60.0)
        self.welcome = wire.TrainerWelcome(
            version=start, parent=parent, teachers=["only"], run=wire.RunIdentity("test", "1")
        )
        self._share = share
        outer = self

        class Answers(Handler):
            def do_GET(self) -> None:
                gets = {"/v1/teachers/only/head": teacher_head(), "/v1/teachers/only": servers}
                if self.path.startswith("/v1/broadcasts/"):
                    gets[self.path] = wire.BroadcastMembers(lost={})
                message = gets.get(self.path)
                self.answer(404) if message is None else self.answer(200, encode(message))

            def do_POST(self) -> None:
                self.answer(200, encode(outer.answer(self.path, self.body())))

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> Message:
        if path == "/v1/hello":
            self.events.append(decode(body, wire.TrainerHello))
            return self.welcome
        if path == "/v1/batch":
            request = decode(body, wire.BatchRequest)
            return self._share(request.version, request.rank, request.world_size)
        kinds = wire.StepReport | Published | wire.CheckpointSaved | wire.FinalDigests
        event = decode(body, kinds)  # type: ignore[arg-type]
        self.events.append(event)
        if isinstance(event, Published) and event.rendezvous is not None:
            group = f"group-{len(self.receptions)}"
            ticket = wire.BroadcastTicket(address=event.rendezvous, group=group, rank=1, world_size=2)
            self.receptions.append(self._receiver.receive(ticket))
            return wire.Audience(group=group, world_size=2)
        return wire.Ok()

    def told(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._receiver.close()


def teacher_head() -> Head:
    generator = np.random.default_rng(5)
    return Head(weight=pack(generator.normal(size=(VOCAB, HIDDEN)).astype(np.float32)))


def rows(step: int, indices: range, full: bool) -> Rows:
    """Some of a step's rollouts; rollout i of a step is the same wherever it is trained on."""
    prompts, completions, kinds = [], [], []
    for index in indices:
        generator = np.random.default_rng([step, index])
        prompts.append(generator.integers(2, VOCAB, 3 + index % 3))
        completions.append(generator.integers(2, VOCAB, 2 + (step + index) % 5))
        logits = torch.from_numpy(generator.normal(size=(completions[-1].size, VOCAB)))
        kinds.append((logits.log_softmax(1), generator.normal(size=(completions[-1].size, HIDDEN))))
    count = sum(map(len, completions))
    logp = torch.cat([kind[0] for kind in kinds]) if kinds else torch.zeros(0, VOCAB)
    token = np.concatenate([*completions, np.zeros(0, np.int64)]).astype(np.int64)
    best = logp.topk(4, dim=1)
    more: dict[str, Any] = {
        "teacher_topk_ids": pack(best.indices.numpy().astype(np.int32)),
        "teacher_topk_logprob": pack(best.values.numpy().astype(np.float32)),
    }
    if full:
        hidden = np.concatenate([kind[1] for kind in kinds]) if kinds else np.zeros((0, HIDDEN))
        more = {"teacher_hidden": pack(hidden.astype(np.float32))}
    return flat_rows(
        [f"s{step}-r{index}" for index in indices],
        prompts,
        completions,
        behavior_logprob=pack(np.full(count, -3.3, np.float32)),
        token_step=pack(np.full(count, max(0, step - 1), np.int32)),
        teacher_logprob=pack(logp.numpy()[np.arange(count), token].astype(np.float32)),
        truncated=pack(np.zeros(len(prompts), np.uint8)),
        **more,
    )


def shares(full: bool) -> Callable[[Version, int, int], TrainBatch]:
    """Six rollouts a step. Two ranks get two micro-batches each (3 + 2, 1 + 0), one rank or four get one."""
    cuts = {1: [[range(6)]], 2: [[range(3), range(3, 5)], [range(5, 6), range(0)]]}
    cuts[4] = [[range(2)], [range(2, 5)], [range(0)], [range(5, 6)]]

    def share(version: Version, rank: int, world_size: int) -> TrainBatch:
        denominator = sum(2 + (version.step + index) % 5 for index in range(6))
        parts = [rows(version.step, cut, full) for cut in cuts[world_size][rank]]
        return TrainBatch(version=version, denominator=denominator, micro_batches=parts)

    return share


def until(steps: int, then: Message, full: bool = False) -> Share:
    give = shares(full)
    return lambda version, rank, world: give(version, rank, world) if version.step < steps else then


STOP = wire.Stop(reason="enough", checkpoint=False)


# --- a trainer --------------------------------------------------------------------------------------------


def settings(models: Path, run_dir: Path, url: str, model: str, **more: Any) -> TrainerConfig:
    overrides = {"optimizer.params": {"eps": 0.1, "torch_adam": True}, **more.pop("overrides", {})}
    trainer = {
        "deepspeed": str(ROOT / "configs/deepspeed/zero3_cpu.json"),
        "overrides": overrides,
        "lr": 0.02,
        "threads": 1,
    }
    trainer |= {"ranks": 2, "head_chunk": 5, **more.pop("trainer", {})}
    base = {"run": "test", "run_dir": run_dir, "controller_url": url, "steps": 4, "trainer": trainer}
    return TrainerConfig.model_validate(base | {"student": {"path": str(models / model)}} | more)


class Running:
    """A launcher in a session of its own; leaving the context kills what is left."""

    def __init__(self, config: TrainerConfig) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        path, self._log = config.run_dir / "trainer.json", config.run_dir / "trainer.log"
        path.write_text(config.model_dump_json())
        argv, env = launch.command(config, path)
        env["PYTHONPATH"] = str(ROOT)
        with self._log.open("w") as log:
            self.process = start(argv, env, log, new_session=True)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in members(self.process.pid):
            process.kill()
        self.process.wait()

    def end(self, timeout: float = 1200.0) -> int:
        """Exit code; nothing of the session may live on."""
        code = self.process.wait(timeout)
        waiting.until(lambda: not members(self.process.pid), 600.0, poll_seconds=0.1)
        return code

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for it while the launcher lives."""
        waiting.until(condition, 1200.0, lambda: self.log, self.process)


def ran(config: TrainerConfig, code: int = 0) -> str:
    """Run a trainer to its end, with that exit code; what it said."""
    with Running(config) as running:
        assert running.end() == code, running.log
        return running.log


def trained(
    models: Path,
    run_dir: Path,
    kind: str,
    share: Share,
    start: Version = Version(0, 0),
    parent: Version | None = None,
    code: int = 0,
    servers: wire.TeacherServers | None = None,
    **more: Any,
) -> tuple[StubController, str]:
    """Run a trainer to its end, with that exit code; what it told the controller, and what it said.

    It begins at `start`, from the checkpoint `parent` of `run_dir`. `servers`: of the teacher that keeps its
    scores. `more`: see `settings`.
    """
    with closing(StubController(share, start, parent, servers)) as stub:
        if parent is not None:
            (run_dir / "checkpoints/latest").write_text(f"{parent}\n")
        return stub, ran(settings(models, run_dir, stub.url, kind, **more), code)


def mirror_of(run_dir: Path, folder: Path) -> Mirror:
    """Of what a trainer published, in `folder`."""
    return Mirror(folder / "mirror", open_store(DirectoryStoreConfig(), run_dir / "store"), "test")


def members(session: int) -> list[psutil.Process]:
    """Living processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.Error):
            continue
    return found
