"""Requests and answers name their run: a server is claimed by the first one and refuses every other."""

from __future__ import annotations

from contextlib import AbstractContextManager

import httpx
import pytest
from ports import PATIENCE, answering, saying
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sync.base.errors import WireError, WrongServer
from sync.wire import EvalRequest, Ok, RunIdentity, Version, encode, frame
from sync.wire.claims import MODEL_HEADER, RUN_HEADER, Claim
from sync.wire.client import BlockingPeer, Peer
from sync.wire.server import Gate, reply

OLD, NEW = RunIdentity("toy", "aa", "m1"), RunIdentity("toy", "bb", "m1")
BODY = EvalRequest(version=Version(0, 1))


def server(claim: Claim | None, model: str | None = None) -> AbstractContextManager[str]:
    """URL of one whose /use claims it, and /look does not."""
    both, paths = ["GET", "POST"], ("/use", "/look", "/health")
    routes = [Route(path, lambda _: reply(Ok()), methods=both) for path in paths]
    routes.append(Route("/stream", lambda _: StreamingResponse(iter([frame(Ok())])), methods=["POST"]))
    return answering(Gate(Starlette(routes=routes), "", claim, ("/use", "/stream"), model))


async def ask(url: str, run: RunIdentity | None, path: str = "/use") -> Ok:
    async with Peer(url, claim=Claim(run)) as peer:
        return await peer.call(path, BODY, Ok)


async def test_the_first_run_that_uses_a_server_claims_it_and_every_other_one_is_refused_by_name() -> None:
    claim = Claim(RunIdentity("toy"))
    with server(claim) as url:
        assert await ask(url, OLD, "/look") == Ok()
        assert claim.run_id is None
        assert await ask(url, OLD) == Ok()
        assert claim.run == OLD
        assert await ask(url, OLD) == Ok()
        told = r"421: it serves run 'toy' \(id aa, model m1\) and was asked for run 'toy' \(id bb, model m1\)"
        for path in ("/use", "/look"):
            with pytest.raises(WrongServer, match=told):
                await ask(url, NEW, path)
        assert claim.run == OLD
        async with Peer(url, claim=Claim(NEW)) as peer:
            assert await peer.alive()
            with pytest.raises(WrongServer, match="it serves run 'toy'"):
                await anext(peer.stream("/stream", BODY, Ok))


@pytest.mark.parametrize(
    ("asking", "words"),
    [
        (RunIdentity("words", "aa"), r"was asked for run 'words' \(id aa\)"),
        (RunIdentity("toy", None), r"was asked for run 'toy' \(no id\)"),
        (RunIdentity("toy", "aa", "m2"), r"was asked for run 'toy' \(id aa, model m2\)"),
        (None, "the request names no run"),
    ],
)
async def test_another_name_model_or_none_at_all_is_refused(asking: RunIdentity | None, words: str) -> None:
    with server(Claim(OLD)) as url:
        with pytest.raises(WrongServer, match=words):
            await ask(url, asking)
        assert await ask(url, RunIdentity("toy", "aa", None)) == Ok()  # its trainer has not started yet


async def test_a_run_that_has_not_begun_claims_nothing_and_the_model_of_one_is_learned_once() -> None:
    claim = Claim(RunIdentity("toy"))
    with server(claim) as url:
        assert await ask(url, RunIdentity("toy")) == Ok()
        with pytest.raises(WrongServer, match="was asked for run 'words'"):
            await ask(url, RunIdentity("words"))
        assert claim.run == RunIdentity("toy")
        for asking in (RunIdentity("toy", "aa"), OLD, RunIdentity("toy", "aa")):
            assert await ask(url, asking) == Ok()
    assert claim.run == OLD


def test_an_answer_of_another_run_is_refused_by_its_reader() -> None:
    """The server guards nothing, and answers in the name of whatever run it is of."""
    served = Claim(OLD)
    route = Route("/x", lambda _: Response(encode(Ok()), headers=served.headers()), methods=["POST"])
    with answering(Starlette(routes=[route])) as url:
        peer = BlockingPeer(url, claim=Claim(NEW))
        with pytest.raises(WrongServer, match=rf"{url} serves run 'toy' \(id aa, .*not run 'toy' \(id bb"):
            peer.call("/x", BODY, Ok)
        served.run = NEW
        assert peer.call("/x", BODY, Ok) == Ok()


async def test_a_teacher_that_answers_with_another_model_is_refused() -> None:
    with server(None, "the new one") as url:
        async with Peer(url, claim=Claim(NEW)) as peer:
            assert await peer.call("/use", BODY, Ok) == Ok()
            peer.model = "the new one"
            assert await peer.call("/use", BODY, Ok) == Ok()
            peer.model = "the old one"
            with pytest.raises(WrongServer, match="with model the new one, and the old one was checked"):
                await peer.call("/use", BODY, Ok)
            assert await ask(url, OLD) == Ok()  # it may serve many runs
            assert (await peer.health(PATIENCE))[1][MODEL_HEADER] == "the new one"


@pytest.mark.parametrize("header", ["", "{}", '{"x":' + "[" * 5000], ids=["empty", "no name", "nested"])
def test_a_header_that_names_no_run_is_a_bad_request(header: str) -> None:
    with server(Claim(OLD)) as url:
        answer = httpx.get(f"{url}/look", headers={RUN_HEADER: header}, trust_env=False, timeout=PATIENCE)
        assert answer.status_code == 400
        assert "names no run" in answer.json()["error"]
    with pytest.raises(WireError, match="names no run"):
        Claim(NEW).check("http://peer", {RUN_HEADER: header})


async def test_an_answer_whose_run_is_no_utf_8_names_no_run() -> None:
    head = b'HTTP/1.1 200 OK\r\n%b: {"name":"\xff"}\r\ncontent-length: 0\r\n\r\n' % RUN_HEADER.encode()
    async with saying(head) as url:
        with pytest.raises(WireError, match="header x-distill-run of 12 characters names no run"):
            await ask(url, NEW)
