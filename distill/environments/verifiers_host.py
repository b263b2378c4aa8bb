"""Environments of the verifiers library (0.4.0): its episodes, as turns.

    harness ─▶ verifiers' client ─▶ loopback endpoint here ─▶ Playing.complete ─▶ back the same way

verifiers calls for a completion where the student is to answer; the call waits at an endpoint of this process
until `complete` has the student's tokens. A call's prompt begins with the ids so far, because
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
from collections.abc import AsyncIterator
from typing import Any, Final

import psutil

from distill.environments.config import EnvironmentConfig
from distill.environments.host import Playing
from sync.base.errors import ConfigError, DataError
from sync.base.own_code import CODE_VARIABLE, search_folder
from sync.wire import EpisodeOver

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


class VerifiersEnvironment:
    """Plays episodes of one verifiers environment; a `host.Host`.

    A task of those without an end is reached by walking over all before it.
    """

    tasks: int | None = None

    def __init__(self, name: str, config: EnvironmentConfig, tokenizer: Any) -> None:
        """`tokenizer`: the student's, with its chat template. Raises ConfigError."""
        self.name, self._config, self._tokenizer = name, config, tokenizer
        self._of: dict[str, tuple[Playing, Any, list[Any]]] = {}
        """Id of a verifiers trace → its episode, the trace, those of the episode that the student plays."""
        self._known: list[Any] = []
        """Tasks, from the first on."""
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

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
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
            yield

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

        if (called := self._of.get(request.headers.get("X-Session-ID", ""))) is None:
            raise web.HTTPNotFound
        playing, trace, traces = called
        if trace not in traces:
            traces.append(trace)
        ids, reason = await playing.complete((await request.json())["token_ids"])
        finish_reason = "stop" if reason == "stop" else "length"
        logprobs = [{"token": f"token_id:{token}", "logprob": 0.0} for token in ids]  # nobody reads them
        choice = {"index": 0, "finish_reason": finish_reason, "token_ids": ids}
        return web.json_response(
            {"request_id": playing.id, "choices": [{**choice, "logprobs": {"content": logprobs}}]}
        )

    # --- an episode

    async def _task(self, index: int) -> Any | None:
        """A task by its number; None: there are fewer."""
        while index >= len(self._known):
            if (task := next(self._walk, None)) is None:
                return None
            self._known.append(task)
            await asyncio.sleep(0)  # others go on during a long walk
        return self._known[index]

    async def play(self, playing: Playing, task: int) -> EpisodeOver:
        """Let verifiers play the episode."""
        if (begun := await self._task(task)) is None:
            raise DataError(f"task {task} is none of the environment's {len(self._known)}")
        traces, minted = list[Any](), list[str]()

        def on_trace(trace: Any) -> None:
            minted.append(trace.id)
            self._of[trace.id] = playing, trace, traces

        try:
            (slot,) = self._env.slots(begun)
            done = await self._env.run_slot(slot, self._context, on_trace=on_trace)
            return _conclusion(playing.id, traces, done)
        except Exception:
            if self._servers:  # it may be no fault of the environment's
                await asyncio.sleep(_GONE_SECONDS)
                self._end_without_servers()
            raise
        finally:
            for trace in minted:
                del self._of[trace]

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


def _conclusion(id: str, traces: list[Any], done: Any) -> EpisodeOver:
    """How a verifiers episode ended. The reward is that of the traces which the student played, added up."""
    errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
    if not done.ok:
        said = f"{errors[0].type}: {errors[0].message}" if errors else "it is not ok, and names no error"
        raise DataError(f"verifiers could not play the episode on: {said}")
    if not traces:
        raise DataError("the episode ended without a turn of the student: nothing can be trained")
    rewards = [pair for trace in traces for pair in trace.rewards.items() if pair[1] is not None]
    metrics = [pair for trace in traces for pair in trace.metrics.items() if pair[1] is not None]
    reward = sum(part.value for _, part in rewards) if rewards else None
    figures = {name: part.value for name, part in rewards} | dict(metrics)
    return EpisodeOver(id=id, reward=reward, metrics=figures)
