"""Environment services over HTTP: episodes, refusals, faults; and their place in a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import string
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_port, healthy
from served_app import at_url
from small_config import make_config
from waiting import until

from distill.config import RunConfig
from distill.environments import service as role
from distill.environments.client import EnvironmentClient
from distill.environments.config import EnvironmentConfig, EnvironmentService
from distill.environments.episode import EnvironmentFailed, EnvironmentLost, Episode, Limits, play
from distill.environments.host import Playing
from distill.environments.python_host import PythonEnvironment
from distill.environments.rendering import Renderer
from distill.environments.service import Service
from distill.launch.roles import Ports, plan_servers
from distill.launch.run_folder import write_role
from distill.preflight_checks import checks, probes
from distill.prompts.sources import EnvironmentSource, open_prompts
from distill.tasks.teaching import make_tokenizer
from sync import wire
from sync.base import tokenizers
from sync.base.address import TOKEN_VARIABLE
from sync.base.errors import ConfigError, RemoteError, Unreachable, WrongServer
from sync.base.own_code import CODE_VARIABLE, use_folder
from sync.base.settings import ModelSource
from sync.wire import EpisodeFailed, EpisodeOver, Generated, RunIdentity, Turn, pack
from sync.wire.claims import Claim
from sync.wire.client import Peer
from sync.wire.peers import Role

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
ODD = """
import asyncio

async def echo(task, talk):
    if task == 1:
        raise LookupError("no such task")
    if task == 2:
        await asyncio.Event().wait()
    if task == 3:
        return "won"
    if task == 4:
        return float("nan")
    if task == 5:
        return {"reward": 1, "moves": 3}
    reply = await talk.say([{"role": "system", "content": "s"}, {"role": "user", "content": "go"}])
    while True:
        reply = await talk.say({"role": "tool", "content": reply.text.upper()})

echo.tasks = 9

async def rewarded(task, talk):
    for value in (0.5, 0.0, 0.25):
        await talk.say("go")
        talk.reward(value)
    return 1.0

async def saying(task, talk, first="go", second="go"):
    await talk.say(first)
    await talk.say(second)
    return 1.0

async def twice(task, talk):
    await asyncio.gather(talk.say("go"), talk.say("on"))

ending = []

async def together(task, talk):
    try:
        await talk.say("go")
    finally:
        ending.append(task)
        while len(ending) < 3:
            await asyncio.sleep(0.01)
        ending.append("ended")

def blocking(task, talk):
    return 1.0
"""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %};{% endfor %}a:"
)
LIMITS = Limits(turns=16, tokens=512, seconds=None, vocab_size=256)
TOKEN = "open-sesame"


def character_tokenizer() -> Any:
    tokenizer = make_tokenizer(["<pad>", "<eos>", *string.printable], ".", "<eos>", "<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the page's environment and odd ones."""
    folder = tmp_path_factory.mktemp("code")
    (code,) = re.findall(r"```python\n# own_environment.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "own_environment.py").write_text(code)
    (folder / "odd_environments.py").write_text(ODD)
    use_folder(folder)
    yield folder
    use_folder(None)
    for name in ("own_environment", "odd_environments"):
        sys.modules.pop(name, None)


def section(environment: str = "odd_environments:echo", **more: Any) -> EnvironmentConfig:
    return EnvironmentConfig(environment=environment, **more)


@contextlib.asynccontextmanager
async def served(
    config: EnvironmentConfig | None = None, host: Any = None, **guards: Any
) -> AsyncIterator[tuple[Service, str]]:
    """A service and its URL."""
    config = config or section()
    host = host or PythonEnvironment("e", config, Renderer(TOKENIZER))
    known = tokenizers.fingerprint(TOKENIZER), tokenizers.vocab_size(TOKENIZER)
    service = Service(host, config, known, **guards)
    async with service.serving(), at_url(service.app) as url:
        yield service, url


@contextlib.asynccontextmanager
async def client_of(*urls: str, **more: Any) -> AsyncIterator[EnvironmentClient]:
    async with EnvironmentClient("e", urls, **{"timeout": 20.0, **more}) as client:
        yield client


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def said(text: str) -> wire.Array:
    return pack(np.array([*ids_of(text), END], "i4"))


def text_of(turn: object) -> str:
    assert isinstance(turn, Turn), turn
    return str(TOKENIZER.decode(wire.unpack(turn.token_ids).tolist()))


def player(answer: Callable[[str], str]) -> Callable[[Episode], Any]:
    """A student that answers the text so far."""

    async def generate(episode: Episode) -> Generated:
        ids = said(answer(TOKENIZER.decode(episode.context)))
        count = ids.shape[0]
        spans = [wire.VersionSpan(wire.Version(0, 0), 0, count)]
        logprob = pack(np.full(count, -0.5, "f4"))
        return Generated(id=episode.id, token_ids=ids, logprob=logprob, spans=spans, finish_reason="stop")

    return generate


# --- episodes -------------------------------------------------------------------------------------------


def bisecting(context: str) -> str:
    low, high = 1, 20
    for guess, hint in re.findall(r"a:(\d+)<eos>;u:(higher|lower)", context):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return str((low + high) // 2)


async def test_the_pages_environment_is_played_to_its_reward_and_nothing_is_tokenized_twice() -> None:
    async with served(section("own_environment:play")) as (_, url), client_of(url) as client:
        episodes = [Episode(f"{number}") for number in range(13)]
        for number, episode in enumerate(episodes):
            await play(client, episode, number % 12, player(bisecting), LIMITS)
    assert {episode.reward for episode in episodes} == {1.0}
    assert episodes[0].context == episodes[12].context, "a task is the same over again"
    longest = max((episode.sequences[0] for episode in episodes), key=lambda one: len(one.own))
    assert len(longest.own) > 2
    assert TOKENIZER.decode(longest.prompt) == "u:Guess my number, 1 to 20.;a:"
    guesses = [TOKENIZER.decode(longest.token_ids[start:end]) for start, end in longest.own]
    assert all(re.fullmatch(r"\d+<eos>", guess) for guess in guesses)
    whole = TOKENIZER.decode(longest.token_ids)
    assert re.fullmatch(r"(\d+<eos>;u:(higher|lower);a:)*\d+<eos>", whole), whole


@pytest.mark.parametrize("end", ["<eos>", "<end_of_turn>"])
def test_the_token_that_ends_a_turn_is_there_once_whether_or_not_it_ends_texts(end: str) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    tokenizer.chat_template = TEMPLATE.replace("<eos>", end)
    ends = tokenizer.convert_tokens_to_ids(end)
    added = Renderer(tokenizer).added([*ids_of("hi"), ends], [{"role": "user", "content": "x"}])
    assert added == ids_of(";u:x;a:")
    cut = Renderer(tokenizer).added(ids_of("hi"), [{"role": "user", "content": "x"}])
    assert cut == [ends, *ids_of(";u:x;a:")]
    stopping = Renderer(tokenizer, stop_token_ids=ids_of("!"))
    assert stopping.text([*ids_of("hi"), ends]) == stopping.text(ids_of("hi!")) == "hi"


async def test_messages_and_figures_are_taken_in_every_form() -> None:
    async with served() as (_, url), client_of(url) as client:
        assert text_of(await client.begin("x", 0)) == "s:s;u:go;a:"
        assert text_of(await client.proceed("x", 0, said("ab"), "stop")) == ";t:AB;a:"
        cut = pack(np.array(ids_of("c"), "i4"))
        following = await client.proceed("x", 1, cut, "length")
        assert text_of(following) == "<eos>;t:C;a:", "an answer that was cut off ends as the template has it"
        assert following.keep == len(ids_of("s:s;u:go;a:ab;t:AB;a:c")) + 1
        assert await client.begin("y", 5) == EpisodeOver(id="y", reward=1.0, metrics={"moves": 3.0})


ALTERNATING = (
    "{% if messages and messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['role'] + ':' + m['content'] + ';' }}"
    "{% endfor %}a:"
)
NO_TOOLS = "{% for m in messages if m['role'] != 'tool' %}" + TEMPLATE.partition("%}")[2]


SYSTEM, TOOL = {"role": "system", "content": "s"}, {"role": "tool", "content": "4"}
USER, THOUGHT = {"role": "user", "content": "a"}, {"type": "thinking", "text": "a"}
ALTERNATED = "user, assistant, tool: say messages of"
RAISED = r"template raised TemplateError \({}\) for messages of roles {}"


@pytest.mark.parametrize(
    ("template", "options", "problem"),
    [
        (ALTERNATING, {"first": SYSTEM}, "turn 0: .*" + RAISED.format("no system role", "system")),
        (ALTERNATING, {"second": TOOL}, "turn 1: .*" + RAISED.format("roles must alternate", ALTERNATED)),
        (NO_TOOLS, {"second": TOOL}, r"turn 1: .*leaves a message of role 'tool' out"),
        (TEMPLATE, {"first": 42}, r"talk.say, turn 0: a turn is 42: give a text"),
        (TEMPLATE, {"first": []}, r"turn 0: a turn is \[\]"),
        (TEMPLATE, {"second": [7]}, r"turn 1: a message is 7: give a role and a content"),
        (TEMPLATE, {"second": {"content": "x"}}, r"turn 1: a message is .* give a role"),
        (TEMPLATE, {"first": USER | {"content": [THOUGHT]}}, r"only parts of type 'text'"),
        (TEMPLATE, {"first": [USER, {"role": "assistant", "content": "3"}]}, r"is the assistant's, '3'"),
    ],
)
async def test_what_no_turn_can_be_made_of_is_named_by_turn_template_roles_and_argument(
    template: str, options: dict[str, Any], problem: str
) -> None:
    tokenizer, config = character_tokenizer(), section("odd_environments:saying", options=options)
    tokenizer.chat_template = template
    host = PythonEnvironment("e", config, Renderer(tokenizer))
    await fails(config, rf"'odd_environments:saying', task 0: .*{problem}", host)


async def fails(config: EnvironmentConfig, problem: str, host: Any = None) -> None:
    """An episode, whatever the student says."""
    async with served(config, host) as (_, url), client_of(url) as client:
        with pytest.raises(EnvironmentFailed, match=problem):
            await play(client, Episode("x"), 0, player(lambda _: "hi"), LIMITS)


async def test_a_turn_before_the_answer_to_the_last_one_is_refused() -> None:
    await fails(section("odd_environments:twice"), "has not answered the turn before: await each")


async def test_a_service_that_ends_gives_up_all_episodes_at_once() -> None:
    async with served(section("odd_environments:together")) as (service, url), client_of(url) as client:
        for name in "abc":
            await client.begin(name, 0)
        assert len(service._open()) == 3
        from odd_environments import ending
    assert ending.count("ended") == 3
    given_up = service.registry.get_sample_value("distill_environment_episodes_total", {"event": "given_up"})
    assert given_up == 3


def test_a_template_that_no_turn_can_follow_is_refused_with_the_prompts(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    upper = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    for template, problem in (
        (upper, "does not write an assistant's content"),
        ("{{ messages[0].content }}{{ raise_exception('one turn') if messages | length > 1 }}", "one turn"),
        (None, "chat_template is not set"),
    ):
        tokenizer = character_tokenizer()
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=f"environments.e cannot be played: .*{problem}"):
            open_prompts(config, tokenizer, 512)


async def test_turns_may_be_rewarded_one_by_one() -> None:
    async with served(section("odd_environments:rewarded")) as (_, url), client_of(url) as client:
        episode = Episode("x")
        await play(client, episode, 0, player(lambda _: "a"), LIMITS)
    assert (episode.reward, episode.turn_rewards) == (1.75, [0.5, 0.0, 0.25])


async def test_a_continue_that_comes_again_gets_the_same_answer_without_another_call() -> None:
    async with served() as (service, url), client_of(url) as client:
        await client.begin("x", 0)
        answers = [await client.proceed("x", 0, said("ab"), "stop") for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert service.registry.get_sample_value("distill_environment_turns_total") == 2
        with pytest.raises(RemoteError, match="turn 4 of x is continued, and its newest turn is 1"):
            await client.proceed("x", 4, said("ab"), "stop")
        other = await client.proceed("x", 0, said("cd"), "stop")
        assert other.lost, "other tokens are of another playing"
    async with served(section("own_environment:play", options={"guesses": 1})) as (_, url), Peer(url) as peer:
        await peer.call("/v1/begin", wire.EpisodeBegin(id="x", task=0), Turn)
        body = wire.EpisodeContinue(id="x", turn=0, token_ids=said("0"), finish_reason="stop")
        last = [await peer.call("/v1/continue", body, EpisodeOver) for _ in range(2)]
        await peer.call("/v1/end", wire.EpisodeEnd(ids=["x", "never begun"]), wire.Ok)
        assert (await peer.call("/v1/continue", body, EpisodeFailed)).lost, "it is not known any more"
    assert last == [EpisodeOver(id="x", reward=0.0)] * 2


# --- what goes wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (1, r"e.environment 'odd_environments:echo' raised LookupError \(no such task\) for task 1"),
        (2, r"turn 0 of episode x took longer than call_timeout_seconds = 2"),
        (3, r"raised ValueError \(could not convert string to float: 'won'\) for task 3"),
        (4, r"echo', task 4: the reward is nan: give a number within ±1e\+30"),
    ],
)
async def test_an_environment_that_raises_hangs_or_lies_costs_the_episode(task: int, error: str) -> None:
    limit = {"call_timeout_seconds": 2.0} if task == 2 else {}
    async with served(section(**limit)) as (service, url), client_of(url) as client:
        with pytest.raises(EnvironmentFailed, match=error):
            await play(client, Episode("x"), task, player(str), LIMITS)
        assert text_of(await client.begin("next", 0))
        count = service.registry.get_sample_value
        assert count("distill_environment_episodes_total", {"event": "failed"}) == 1
        assert count("distill_environment_open_episodes") == 1


class Odd:
    """Has the student answer to `context`, whatever the task."""

    name, tasks = "e", None

    def __init__(self, context: list[int]) -> None:
        self.context = context

    def serving(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def play(self, playing: Playing, task: int) -> EpisodeOver:
        await playing.complete(self.context)
        raise AssertionError


@pytest.mark.parametrize(
    ("context", "error"), [([1000], "token_ids is 1000 in one place or more"), ([], "token_ids is empty")]
)
async def test_turns_that_cannot_be_used_are_not_handed_on(context: list[int], error: str) -> None:
    async with served(host=Odd(context)) as (_, url), client_of(url) as client:
        answer = await client.begin("x", 0)
    assert error in answer.error


async def test_answers_that_are_no_tokens_of_the_student_are_refused() -> None:
    async with served() as (_, url), client_of(url) as client:
        await client.begin("x", 0)
        with pytest.raises(RemoteError, match="400: turn 0 of x: token_ids is 1000"):
            await client.proceed("x", 0, pack(np.array([1000], "i4")), "stop")


async def test_an_episode_waits_while_as_many_are_under_way_as_may_be(monkeypatch) -> None:
    monkeypatch.setattr(role, "RETRY_SECONDS", 0.05)
    async with served(section(max_episodes=1)) as (_, url), client_of(url) as client:
        await client.begin("x", 0)
        waiting = asyncio.create_task(client.begin("y", 0))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert text_of(await client.begin("eval:a:1:0", 0)), "an evaluation does not wait for training"
        assert text_of(await client.begin("x", 0)), "the same one again takes its own place"
        await client.end("x")
        assert text_of(await waiting)
        monkeypatch.setattr(role, "IDLE_SECONDS", 0.0)
        assert text_of(await client.begin("z", 0)), "one that was forgotten makes room"
        answer = await client.proceed("y", 0, said("a"), "stop")
        assert answer.lost


async def test_a_wrong_token_and_another_run_are_refused() -> None:
    claim = Claim(RunIdentity("mine"))
    async with served(token=TOKEN, claim=claim) as (_, url):
        async with client_of(url) as nobody:
            with pytest.raises(RemoteError, match="401"):
                await nobody.begin("x", 0)
        async with client_of(url, token=TOKEN, claim=Claim(RunIdentity("mine", "1"))) as mine:
            assert text_of(await mine.begin("x", 0))
            assert (await mine.info()).tasks == 9
        for other in (RunIdentity("mine", "2"), RunIdentity("theirs", "1")):
            async with client_of(url, token=TOKEN, claim=Claim(other)) as client:
                with pytest.raises(WrongServer, match="start a fresh server for this run"):
                    await client.begin("y", 0)


async def test_episodes_begin_at_the_process_with_the_fewest_and_not_at_one_that_is_gone() -> None:
    async with served() as (one, first), served() as (other, second):
        async with client_of(first, second) as client:
            for number in range(6):
                await client.begin(f"{number}", 0)
            assert [len(service._open()) for service in (one, other)] == [3, 3]
            for number in range(6):
                await client.end(f"{number}")
            assert [len(service._open()) for service in (one, other)] == [0, 0]
        async with client_of(f"http://127.0.0.1:{free_port()}", second) as client:
            for number in range(4):
                assert text_of(await client.begin(f"{number}", 0))
    async with client_of(f"http://127.0.0.1:{free_port()}", timeout=-9.9) as client:
        with pytest.raises(Unreachable):
            await client.begin("x", 0)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"environment": "odd_environments:blocking"}, "is no async function: write"),
        ({"options": {"speed": 2}}, r"cannot be called with .* unexpected keyword argument 'speed'\)"),
    ],
)
def test_what_is_no_environment_is_refused_before_any_episode(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        PythonEnvironment("e", section(**fields), Renderer(TOKENIZER))


# --- a process ------------------------------------------------------------------------------------------

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from distill.environments.service import main; sys.exit(main())"
)


async def test_a_killed_process_loses_its_episodes_and_no_more(tmp_path: Path, modules: Path) -> None:
    """Restarted at its port, without torch."""
    TOKENIZER.save_pretrained(tmp_path / "student")
    student = ModelSource(path=str(tmp_path / "student"))
    settings = EnvironmentService(name="e", run="r", environment=section(), student=student)
    path, port = write_role(tmp_path, "environment-e", settings), free_port()
    argv = [sys.executable, "-c", WITHOUT_TORCH, "--config", str(path), "--port", str(port)]
    env = {
        **os.environ,
        TOKEN_VARIABLE: TOKEN,
        CODE_VARIABLE: str(modules),
        "TOKENIZERS_PARALLELISM": "false",
    }
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            child = subprocess.Popen(argv, env=env)
            stack.callback(child.wait)
            stack.callback(child.kill)
            return child

        child = start()
        await asyncio.to_thread(until, partial(healthy, url), process=child)
        async with client_of(url, token=TOKEN, timeout=600.0) as client:
            answers = 0

            async def kill(episode: Episode) -> Generated:
                nonlocal child, answers
                answers += 1
                if answers == 2:
                    child.send_signal(signal.SIGKILL)
                    await asyncio.to_thread(child.wait)
                    child = start()
                return await player(lambda _: "a")(episode)

            with pytest.raises(EnvironmentLost, match="episode x is not known: this process was restarted"):
                await play(client, Episode("x"), 0, kill, LIMITS)
            assert text_of(await client.begin("x", 0)), "it may begin again"
            assert (await client.info()).tokenizer_fingerprint == tokenizers.fingerprint(TOKENIZER)
        child.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.wait, 600) == 0


# --- in a run -------------------------------------------------------------------------------------------


def run_config(tmp_path: Path, **sections: Any) -> RunConfig:
    given: dict[str, Any] = {
        "run": {"folder": tmp_path},
        "environments": {"e": {"environment": "odd_environments:echo", "processes": 2}},
        "prompts": {"type": "environment", "environment": "e"},
    }
    return make_config(**{**given, **sections})


def test_services_are_started_with_the_run_and_the_evaluator_knows_them(tmp_path: Path) -> None:
    python = {"python": "/opt/games/bin/python", "env": {"PYTHONPATH": "/g"}}
    elsewhere = {"environment": "odd_environments:echo", **python}
    both = {"e": {**elsewhere, "processes": 2}, "far": {**elsewhere, "urls": ["http://far:1"]}}
    config = run_config(tmp_path, environments=both, rollout={"stop_token_ids": [3]})
    with Ports() as ports:
        plan = plan_servers(config, "token", ports)
    assert plan.where["environments.far"] == ["http://far:1"]
    children = {child.name: child for child in plan.children}
    for index, url in enumerate(plan.where["environments.e"]):
        child = children[f"environment-e-{index}"]
        assert url == child.url
        assert list(child.argv[:3]) == ["/opt/games/bin/python", "-m", "distill.environments.service"]
        assert child.env[TOKEN_VARIABLE] == "token"
        packages, more = child.env["PYTHONPATH"].split(os.pathsep)
        assert more == "/g"
        assert sorted(os.listdir(packages)) == ["distill", "sync"]
        assert (Path(packages) / "sync" / "base" / "errors.py").is_file()
    files = [config.run_dir / f"roles/{role}.json" for role in ("evaluator", "environment-e")]
    evaluator, service = (json.loads(file.read_text()) for file in files)
    assert len(evaluator["environments"]["e"]["urls"]) == 2
    assert service["stop_token_ids"] == [3]


def test_services_of_two_machines_link_the_packages_at_the_same_time(tmp_path: Path, monkeypatch) -> None:
    make = Path.symlink_to

    def after_another(link: Path, target: Path) -> None:
        make(link.with_name(target.name), target)
        make(link, target)

    monkeypatch.setattr(Path, "symlink_to", after_another)
    place = {"environment": "odd_environments:echo", "python": "/opt/games/bin/python"}
    config = run_config(tmp_path, environments={"e": place})
    with Ports() as ports:
        (child,) = plan_servers(config, "token", ports, Role.ENVIRONMENT).children
    assert sorted(os.listdir(child.env["PYTHONPATH"].split(os.pathsep)[0])) == ["distill", "sync"]


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"environments": {}}, "prompts.environment is 'e', the environments are none: use their names"),
        ({"prompts": {"type": "jsonl", "path": "x"}}, "environments.e is named by no prompts"),
        ({"objective": {"type": "sampled", "on_policy": 0.5}}, "objective.on_policy is 0.5, and a teacher's"),
        ({"teachers": {"t": {"path": "t", "prompt_transform": "a:b"}}}, "t.prompt_transform is set, and"),
        ({"environments": {"e": {"environment": "nowhere:f"}}}, "names no module that can be found"),
        ({"environments": {"e": {"environment": "a:b", "python": "/none"}}}, "e.python /none does not exist"),
    ],
)
def test_sections_that_do_not_fit_are_refused(tmp_path: Path, sections: dict[str, Any], problem: str) -> None:
    config = run_config(tmp_path, **sections)
    here = (line for name in config.environments for line in checks.check_environment(config, name))
    found = [*checks.environment_problems(config), *here]
    assert [problem in one for one in found].count(True) == 1, found


async def test_the_preflight_takes_first_prompts_from_the_environment(tmp_path: Path) -> None:
    async with served() as (service, url), client_of(url) as client:
        sample = [EnvironmentSource("e", 0)[task] for task in (0, 6, 7, 8)]
        found = await probes.with_first_prompts(sample, {"e": client}, 3, TOKENIZER)
        assert [TOKENIZER.decode(one.token_ids) for one in found] == ["s:s;u:go;a:"] * 3
        assert not service._open(), "they are ended"
        info = await client.info()
        with pytest.raises(ConfigError, match=r"environments.e: task 1 cannot be played: .*no such task"):
            await probes.with_first_prompts([EnvironmentSource("e", 0)[1]], {"e": client}, 1, TOKENIZER)
    config = section("odd_environments:saying", options={"second": {"role": "user"}})
    async with served(config) as (_, url), client_of(url) as client:
        problem = r"task 0 cannot be played on when the student answers 'I do not know.': .*turn 1: .*None"
        with pytest.raises(ConfigError, match=problem):
            await probes.with_first_prompts([EnvironmentSource("e", 0)[0]], {"e": client}, 1, TOKENIZER)
    assert probes.makes_same_tokens(tokenizers.fingerprint(TOKENIZER), info).problem is None
    assert probes.makes_same_tokens("0" * 96, info).problem
    endless = probes.enough_tasks(run_config(tmp_path), "e", info)
    assert endless.problem == "prompts.tasks is not set: set it to 9 or less"
    assert probes.first_fits(found, 11).problem
    assert probes.first_fits(found, 12).problem is None
