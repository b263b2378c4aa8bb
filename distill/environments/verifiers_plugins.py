"""What the verifiers library loads by name: a renderer of prompts, and a harness in this process.

Imported only where verifiers is installed (`make environments`). A taskset that wants the harness as its
default lists `DirectHarness` in its `__all__`; any other names it by `agent.harness.id = "direct"`.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import httpx2
import verifiers.v1 as vf
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import INVALID_PARAMS
from pydantic_core import to_json
from renderers.base import RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

from distill.environments.rendering import Message, Renderer
from sync.base.address import is_loopback

__all__ = ["DirectHarness"]


class AppendingConfig(DefaultRendererConfig):
    """renderers' `tool_parser` and `reasoning_parser`; other fields are variables of the chat template."""

    name: Literal["custom"] = "custom"


class AppendingRenderer(DefaultRenderer):
    """Prompts by `rendering.Renderer`: every turn stands behind the ids that the student sampled."""

    config_class = AppendingConfig

    def __init__(self, tokenizer: Any, config: AppendingConfig) -> None:
        super().__init__(tokenizer, config)
        self._ours = Renderer(tokenizer, config.model_extra or {})

    def render(
        self, messages: list[Message], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """A prompt from scratch: the first one, or that of a harness which rewrote its messages."""
        return _rendered(self._ours.prompt(messages, tools), 0, messages)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens:
        """The ids so far, and behind them those of the new messages. Raises DataError as `Renderer.added`."""
        ids = [*previous_prompt_ids, *previous_completion_ids]
        added = self._ours.added(previous_completion_ids, new_messages, tools)
        return _rendered(ids + added, len(ids), new_messages)


def _rendered(ids: list[int], old: int, messages: list[Message]) -> RenderedTokens:
    """All behind the first `old` ids counts to the first message: verifiers needs no finer attribution."""
    indices = [-1] * old + [0] * (len(ids) - old)
    return RenderedTokens(
        token_ids=ids, message_indices=indices, message_roles=[message["role"] for message in messages]
    )


class DirectHarness(vf.Harness[vf.HarnessConfig]):
    """Chat completions in this process: one for a segment, and one more after each that calls tools.

    No subprocess, and no network but to the tools' servers. What a tool cannot do is told to the student.
    """

    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Complete the task's prompt, or the conversation so far, until no tool is called."""
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            prompt = [vf.UserMessage(content=prompt)]
        messages = [message_to_wire(message) for message in prompt or []]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        asked: dict[str, Any] = {"model": ctx.model, "messages": messages}
        headers = {"Authorization": f"Bearer {secret}"}
        student = httpx2.AsyncClient(verify=_tls(), timeout=None, headers=headers, trust_env=False)
        try:
            async with student, _connected(mcp_urls, self.config.tool_timeout) as tools:
                if tools:
                    asked["tools"] = [tool.schema for tool in tools.values()]
                refused = await _completed(student, f"{endpoint}/chat/completions", asked, tools)
        except ExceptionGroup as group:  # of the clients' tasks, which hide what happened
            raise _first(group) from None
        return vf.ProgramResult(exit_code=0 if refused is None else 1, stdout="", stderr=refused or "")


async def _completed(
    student: httpx2.AsyncClient, url: str, asked: dict[str, Any], tools: Mapping[str, _Tool]
) -> str | None:
    """Answer calls of tools until a completion has none. Why a completion was refused; None: none was."""
    messages = asked["messages"]
    while True:
        answer = await student.post(url, json=asked)
        if answer.status_code != 200:
            return answer.text[:2000]
        said = answer.json()["choices"][0]["message"]
        if not (calls := said.get("tool_calls")):
            return None
        messages.append(said)
        for call in calls:
            content = await _called(tools, call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


@cache
def _tls() -> ssl.SSLContext:
    """One for all episodes: making it takes 25 ms."""
    return httpx2.create_ssl_context()


def _first(error: Exception) -> Exception:
    """The first exception in groups of groups."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


class _Tool(NamedTuple):
    server: Client
    name: str
    """Its name at that server."""
    schema: dict[str, Any]
    """What chat completions are told of it."""


@asynccontextmanager
async def _connected(urls: Mapping[str, str], seconds: float) -> AsyncIterator[dict[str, _Tool]]:
    """Every tool of some servers, by its name for the student; a call may take so many seconds.

    Raises ValueError for one name twice.
    """
    tools: dict[str, _Tool] = {}
    async with AsyncExitStack() as stack:
        for prefix, url in urls.items():
            client = httpx2.AsyncClient(
                verify=_tls(),
                timeout=httpx2.Timeout(seconds, connect=5.0),
                follow_redirects=True,
                trust_env=not is_loopback(urlsplit(url).hostname or ""),  # proxies
            )
            http = await stack.enter_async_context(client)
            server = await stack.enter_async_context(Client(streamable_http_client(url, http_client=http)))
            for tool in (await server.list_tools()).tools:
                name = f"{prefix}_{tool.name}" if prefix else tool.name
                if name in tools:
                    raise ValueError(f"two tools are called {name!r}: give their Toolsets a TOOL_PREFIX each")
                what = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
                tools[name] = _Tool(server, tool.name, {"type": "function", "function": what})
        yield tools


async def _called(tools: Mapping[str, _Tool], function: Mapping[str, str]) -> str:
    """What a tool answers, or why it does not; called once, whatever becomes of it.

    A server that is gone, or answers what is none, raises and costs the episode.
    """
    if (tool := tools.get(function["name"])) is None:
        return f"error: there is no tool {function['name']!r}"
    try:
        arguments = json.loads(function["arguments"])
        to_json(arguments)  # as they are sent: neither half a character nor hundreds of lists in one another
    except (ValueError, RecursionError) as error:
        return f"error: arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: arguments must be an object"
    try:
        answer = await tool.server.call_tool(tool.name, arguments)
    except MCPError as error:
        if error.code != INVALID_PARAMS:  # the others are of the connection
            raise
        return f"error: {error.message}"
    said = mcp_content_to_chat_content(answer.content)
    return said if isinstance(said, str) else "error: the tool answered with more than text"
