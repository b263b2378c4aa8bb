"""What answers at a URL is named: roles, vLLM, servers of the OpenAI protocol, others; silence is none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from ports import Handler, answering, refusing, saying, served
from prometheus_client import CollectorRegistry

from sync.base.errors import WrongServer
from sync.wire.peers import Role, identify, wrong, wrong_among
from sync.wire.server import application
from teacher_service.client import TeacherClient

OPENAI = {"/health": {}, "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]}}
VLLM = {"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}, "/version": {"version": "0.32.0"}}


@contextmanager
def plain_server(answers: Mapping[str, Any]) -> Iterator[str]:
    """URL of a server with these JSON answers; 404 elsewhere."""

    class Plain(Handler):
        def do_GET(self) -> None:
            content = json.dumps(answers.get(self.path, {"detail": "Not Found"})).encode()
            self.answer(200 if self.path in answers else 404, content)

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Plain)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.VLLM])
async def test_every_role_names_itself_at_health_without_a_token(role: Role) -> None:
    with answering(application(role, [], CollectorRegistry(), "secret", None)) as url:
        assert await identify(url) == (role, role.words)
        assert await wrong(url, role) is None


async def test_a_role_in_the_place_of_another_is_refused_with_both_names_and_a_path_behind_one() -> None:
    with answering(application(Role.EVALUATOR, [], CollectorRegistry(), "", None)) as url:
        problem = await wrong(url, Role.TEACHER)
        behind = await wrong(f"{url}/v1", Role.EVALUATOR)
    expected = "is an evaluator of this project, and a teacher service of this project was expected"
    assert expected in problem
    assert "distill teacher" in problem
    assert f"a path of an evaluator of this project: write {url} for it" in behind


async def test_a_plain_vllm_server_and_one_of_the_openai_protocol_are_told_apart() -> None:
    with plain_server(VLLM) as url:
        assert await identify(url) == (Role.VLLM, "a plain vLLM server that serves 'm'")
        assert await wrong(url, Role.VLLM) is None
    with plain_server(OPENAI) as url:
        assert await identify(url) == (None, "a server of the OpenAI protocol that serves 'm'")
        assert await identify(f"{url}/v1") == await identify(url)


async def test_another_web_server_is_named_by_what_it_answers_and_what_speaks_no_http_is_said_to() -> None:
    with plain_server({}) as url:
        assert "answers 404 at /health" in (await identify(url))[1]
    async with saying(b"-ERR unknown command\r\n\r\n") as url:
        assert "speaks no HTTP" in (await identify(url))[1]


async def test_nothing_is_said_of_a_port_where_nobody_listens_or_of_a_gateway() -> None:
    with refusing() as url:
        assert await identify(url) is None
        assert wrong_among([("teachers.t.urls", url, Role.TEACHER)]) == []
    async with saying(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n") as url:
        assert await identify(url) is None


async def test_the_teachers_client_says_at_once_what_it_met() -> None:
    with plain_server(OPENAI) as url:
        async with TeacherClient("t", [url]) as client:
            with pytest.raises(WrongServer, match="OpenAI protocol that serves 'm', and a"):
                await client.info()
