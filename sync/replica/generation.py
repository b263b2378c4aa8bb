"""`POST /distill/v1/generate`: many prompts in one request, each answered in a frame as soon as it ends."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from starlette.types import Receive, Send

from sync.replica import vllm_compat
from sync.replica.completions import Limits, generated, prompt_problem
from sync.wire import CONTENT_TYPE, Generated, GenerateFailed, GeneratePrompt, GenerateRequest, frame

_request_numbers = itertools.count()


async def left(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Generation:
    """The completions of one request. `run` once; ends early, aborting them all, when the client leaves."""

    def __init__(self, engine: Any, request: GenerateRequest, adapter: Any | None = None) -> None:
        """`adapter`: what `Updater.adapter` says."""
        self._engine = engine
        self._adapter = adapter
        self._request = request
        self._limits: Limits = vllm_compat.limits(engine)
        self._frames: list[bytes] = []
        self.open = len(request.prompts)
        """Prompts without an answer so far."""
        self._news = asyncio.Event()

    async def run(self, receive: Receive, send: Send) -> None:
        """Answer the request over ASGI. Raises EngineDead when the engine died on the way."""
        headers = [(b"content-type", CONTENT_TYPE.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with asyncio.TaskGroup() as group:
            gone = group.create_task(left(receive))
            tasks = [group.create_task(self._one(prompt)) for prompt in self._request.prompts]
            writer = group.create_task(self._write(send, len(tasks)))
            await asyncio.wait({gone, writer}, return_when=asyncio.FIRST_COMPLETED)
            for task in (gone, writer, *tasks):
                task.cancel()

    async def _write(self, send: Send, expected: int) -> None:
        written = 0
        while written < expected:
            await self._news.wait()
            await asyncio.sleep(0)  # completions of the same engine step join this write
            frames, self._frames = self._frames, []
            self._news.clear()
            written += len(frames)
            await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _one(self, prompt: GeneratePrompt) -> None:
        answer = await self._answer(prompt)  # before the list is looked up: the writer swaps it meanwhile
        self._frames.append(frame(answer))
        self.open -= 1
        self._news.set()

    async def _answer(self, prompt: GeneratePrompt) -> Generated | GenerateFailed:
        problem = prompt_problem(prompt, self._limits)
        if problem is not None:
            return GenerateFailed(id=prompt.id, error=problem)
        sampling = self._request.sampling
        params = vllm_compat.sampling_params(sampling, self._limits.vocab_size, prompt.seed)
        request_id = f"{prompt.id}#{next(_request_numbers)}"
        try:
            completion = await vllm_compat.complete(
                self._engine, prompt.token_ids, params, request_id, self._adapter, sampling.max_seconds
            )
        except vllm_compat.RefusedPrompt as error:
            return GenerateFailed(id=prompt.id, error=f"the engine refused the prompt: {error}")
        return generated(prompt.id, completion, sampling.student_topk)
