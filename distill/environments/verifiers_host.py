"""Environments of the verifiers library (0.4.0): its episodes, as turns of `Environment`.

    harness ─▶ verifiers' client ─▶ loopback endpoint here ─▶ Turn ─▶ … ─▶ proceed() ─▶ back the same way

verifiers calls for a completion where the student is to answer; the call waits at an endpoint of this process
until `proceed` has the student's tokens. A call's prompt begins with the ids so far, because
`verifiers_plugins.AppendingRenderer` makes it: nothing is tokenized twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import numpy as np
import psutil

from distill.environments.config import EnvironmentConfig
from distill.environments.episode import EnvironmentAnswer, FinishReason
from sync.base.errors import ConfigError
from sync.base.own_code import CODE_VARIABLE, search_folder
from sync.wire import Array, EpisodeFailed, EpisodeOver, Turn, pack, unpack

log = logging.getLogger(__name__)
DIRECT: Final = "direct"
"""Id of the harness `verifiers_plugins.DirectHarness`, for tasksets that have none of their own."""
_RENDERER: Final = {
    "name": "custom",
    "import_path": "distill.environments.verifiers_plugins.AppendingRenderer",
}
_GONE_SECONDS: Final = 0.5
"""In which a server of tools that was killed is gone, after its connections are."""
_LARGEST: Final = 1 << 28
"""Bytes of a call: the ids of a prompt as JSON."""


class _Call(NamedTuple):
    """A completion that verifiers waits for."""

    prompt_ids: list[int]
    answer: asyncio.Future[tuple[list[int], str]]


@dataclass
class _Episode:
    id: str
    said: asyncio.Queue[_Call | EpisodeOver | EpisodeFailed] = field(default_factory=asyncio.Queue)
    """What the environment said, in order."""
    calls: list[_Call] = field(default_factory=list)
    traces: list[Any] = field(default_factory=list)
    """Traces whose calls the student answers."""
    token_ids: list[int] = field(default_factory=list)
    """The sequence so far."""
    turn: int = -1
    """Turn that is to be answered."""
    play: asyncio.Task[None] | None = None


class VerifiersEnvironment:
    """Plays episodes of one verifiers environment; see `app.Host`, which sets their time limits.

    A task of those without an end is reached by walking over all before it.
    """

    tasks: int | None = None

    def __init__(self, name: str, config: EnvironmentConfig, tokenizer: Any) -> None:
        """`tokenizer`: the student's, with its chat template. Raises ConfigError."""
        self.name, self._config, self._tokenizer = name, config, tokenizer
        self._episodes: dict[str, _Episode] = {}
        self._of: dict[str, tuple[_Episode, Any]] = {}
        """Id of a verifiers trace → its episode, the trace."""
        self._known: list[Any] = []
        """Tasks, from the first on."""
        self._plays: set[asyncio.Task[None]] = set()
        self._open = contextlib.AsyncExitStack()
        self._servers: list[psutil.Process] = []
        """Servers of tools: what verifiers started while it began to serve."""
        search_folder()
        try:
            self._load()
        except Exception as error:  # importing runs the environment's own code
            raise ConfigError(
                f"environments.{name}: verifiers cannot load {config.environment!r} ({type(error).__name__}: "
                f"{error}): name a taskset that is installed or a module in run.code_folder, with options "
                f"of its configuration, and let environments.{name}.python be an interpreter that has its "
                "packages (`make environments`)"
            ) from error

    def _load(self) -> None:
        import verifiers.v1 as vf

        from distill.environments import verifiers_plugins

        sys.modules.setdefault(DIRECT, verifiers_plugins)  # verifiers imports a harness by its id
        # and servers of tools as modules, by this interpreter, which does not know the code folder
        paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), os.environ.get(CODE_VARIABLE)]
        os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
        options = dict(self._config.options)
        renderer = {**_RENDERER, **self._config.chat_template_kwargs, **options.pop("renderer", {})}
        taskset = {"id": self._config.environment, **options.pop("taskset", {})}
        resolved = vf.resolve_env_config({"taskset": taskset, **options})
        tasks = vf.load_taskset(resolved.taskset)
        self._walk = iter(tasks)
        if tasks.bounded:
            self._known = list(self._walk)
            self.tasks = len(self._known)
        self._client = vf.TrainClientConfig(api_key_var="NO_API_KEY", renderer=renderer)
        self._env = vf.load_environment(resolved)

    async def __aenter__(self) -> Self:
        """Start what the environment serves."""
        import verifiers.v1 as vf

        async def watch_servers() -> None:
            while True:
                await asyncio.sleep(_GONE_SECONDS)
                self._end_without_servers()

        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenizer-"))
            self._tokenizer.save_pretrained(folder)
            places = {"base_url": await self._listen(stack), "renderer_model_name": folder}
            client = self._client.model_copy(update=places)
            self._context = vf.ModelContext(model="student", client=client, sampling=vf.SamplingConfig())
            before = psutil.Process().children()
            await stack.enter_async_context(self._env.serving())
            self._servers = [
                child for child in psutil.Process().children() if child not in before and _runs(child)
            ]
            stack.callback(asyncio.create_task(watch_servers()).cancel)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end([*self._episodes])
        await asyncio.gather(*self._plays, return_exceptions=True)
        await self._open.aclose()

    async def _listen(self, stack: contextlib.AsyncExitStack) -> str:
        """Serve verifiers' calls on a free port of loopback, below a path that none can guess; its URL."""
        from aiohttp import web

        path = f"/{secrets.token_urlsafe(32)}"
        app = web.Application(client_max_size=_LARGEST)
        app.router.add_post(f"{path}/inference/v1/generate", self._generate)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}{path}/v1"

    async def _generate(self, request: Any) -> Any:
        """A call of verifiers, as vLLM's /inference/v1/generate: answered when the student has."""
        from aiohttp import web

        episode, trace = self._of.get(request.headers.get("X-Session-ID", ""), (None, None))
        if episode is None:
            raise web.HTTPNotFound
        if trace not in episode.traces:
            episode.traces.append(trace)
        call = _Call((await request.json())["token_ids"], asyncio.get_running_loop().create_future())
        episode.calls.append(call)
        episode.said.put_nowait(call)
        ids, finish_reason = await call.answer
        logprobs = [{"token": f"token_id:{token}", "logprob": 0.0} for token in ids]  # nobody reads them
        choice = {"index": 0, "finish_reason": finish_reason, "token_ids": ids}
        return web.json_response(
            {"request_id": episode.id, "choices": [{**choice, "logprobs": {"content": logprobs}}]}
        )

    # --- Environment

    async def begin(self, id: str, task: int) -> EnvironmentAnswer:
        begun = await self._task(task)
        if begun is None:
            return EpisodeFailed(id=id, error=f"task {task} is none of the environment's {len(self._known)}")
        episode = self._episodes[id] = _Episode(id)
        episode.play = asyncio.create_task(self._play(episode, begun))
        self._plays.add(episode.play)
        episode.play.add_done_callback(self._plays.discard)
        return await self._next(episode)

    async def proceed(
        self, id: str, turn: int, token_ids: Array, finish_reason: FinishReason
    ) -> EnvironmentAnswer:
        episode = self._episodes[id]
        ids = unpack(token_ids).tolist()
        episode.token_ids = episode.token_ids + ids
        episode.calls[turn].answer.set_result((ids, "stop" if finish_reason == "stop" else "length"))
        return await self._next(episode)

    async def end(self, ids: list[str]) -> None:
        """Give these up: what verifiers runs of them is cancelled."""
        for id in ids:
            if (episode := self._episodes.pop(id, None)) is not None:
                for call in episode.calls:
                    call.answer.cancel()
                assert episode.play is not None
                episode.play.cancel()

    # --- an episode

    async def _task(self, index: int) -> Any | None:
        """A task by its number; None: there are fewer."""
        while index >= len(self._known):
            if (task := next(self._walk, None)) is None:
                return None
            self._known.append(task)
            await asyncio.sleep(0)  # others go on during a long walk
        return self._known[index]

    async def _play(self, episode: _Episode, task: Any) -> None:
        """Let verifiers play the episode, and say how it ended."""
        minted: list[str] = []

        def on_trace(trace: Any) -> None:
            minted.append(trace.id)
            self._of[trace.id] = episode, trace

        try:
            (slot,) = self._env.slots(task)
            done = await self._env.run_slot(slot, self._context, on_trace=on_trace)
            said = _conclusion(episode, done)
        except Exception as error:  # noqa: BLE001 - of the environment's own code, and it costs one episode
            said = EpisodeFailed(id=episode.id, error=f"{type(error).__name__}: {error}")
        finally:
            for trace in minted:
                del self._of[trace]
        if isinstance(said, EpisodeFailed) and self._servers:  # it may be no fault of the environment's
            await asyncio.sleep(_GONE_SECONDS)
            self._end_without_servers()
        episode.said.put_nowait(said)

    async def _next(self, episode: _Episode) -> EnvironmentAnswer:
        said = await episode.said.get()
        if not isinstance(said, _Call):
            await self.end([episode.id])
            return said
        episode.turn += 1
        keep = _shared(episode.token_ids, said.prompt_ids)
        episode.token_ids = said.prompt_ids
        added = np.array(said.prompt_ids[keep:], "i4")
        return Turn(id=episode.id, turn=episode.turn, token_ids=pack(added), keep=keep)

    def _end_without_servers(self) -> None:
        """End this process, to be started again, when one is gone: verifiers starts each once."""
        if not all(map(_runs, self._servers)):
            log.error("a server of tools has ended: this process ends too, so that both are started again")
            os._exit(1)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _shared(before: list[int], after: list[int]) -> int:
    """Ids that both begin with; at least one of `after` is left."""
    length = min(len(before), len(after) - 1)
    if before[:length] == after[:length]:
        return length
    return next(i for i in range(length) if before[i] != after[i])


def _conclusion(episode: _Episode, done: Any) -> EpisodeOver | EpisodeFailed:
    """How a verifiers episode ended. The reward is that of the traces which the student played, added up."""
    errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
    if not done.ok:
        said = f"{errors[0].type}: {errors[0].message}" if errors else "it is not ok, and names no error"
        return EpisodeFailed(id=episode.id, error=f"verifiers could not play the episode on: {said}")
    if not episode.traces:
        return EpisodeFailed(
            id=episode.id, error="the episode ended without a turn of the student: nothing can be trained"
        )
    rewards = [pair for trace in episode.traces for pair in trace.rewards.items() if pair[1] is not None]
    metrics = [pair for trace in episode.traces for pair in trace.metrics.items() if pair[1] is not None]
    reward = sum(part.value for _, part in rewards) if rewards else None
    figures = {name: part.value for name, part in rewards} | dict(metrics)
    return EpisodeOver(id=episode.id, reward=reward, metrics=figures)
