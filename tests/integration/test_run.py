"""Whole runs through the command line, every engine real, on random models of three architectures.

| run | student | prompts | objective | weights | trainer |
| --- | --- | --- | --- | --- | --- |
| roles alone | Qwen3, tied | task, in groups | topk and reward | snapshots | by URL, 1 rank |
| interrupted | Qwen2, biases | dataset | student_topk | snapshots | 1 rank, then 2 |
| experts | Qwen3-MoE, fused in memory | JSONL, chat template, rewarded | full | snapshots | 2 ranks |

Broadcasts to several replicas of an untied Llama: test_broadcast_survival.py; adapters: test_lora.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import dashboard
import forked
import httpx
import numpy as np
import psutil
import pytest
import torch
from flat_tensors import digest as digest_of_array
from ports import free_port, healthy
from published import Moving
from recorded import rollouts_of, rows_of
from run_on_letters import BATCH, ENGINE_ARGS
from tiny_models import language_model
from trace_processor import Trace
from vllm_replica import Server, prompt_logprobs, update
from waiting import until
from whole_run import DISTILL, ROOT, over, steps_of, written

from distill.metrics.page import ROWS
from distill.metrics.summary import digest_of_all
from distill.metrics.trace import write_trace
from distill.prompts.stream import group_of
from distill.record.audit import audit
from distill.registry import EXIT_REFUSED
from distill.tasks.sort_letters import EOS, EOS_ID, PAD, PAD_ID, VOCABULARY
from student_trainer.launch import ranks_of
from sync.base.address import TOKEN_VARIABLE
from sync.base.jsonl import read_lines
from sync.weights.snapshots.checkpoint import read_folder
from sync.weights.snapshots.checkpoint import tensor_digest as digest
from sync.weights.stores.store import DirectoryStore
from sync.wire import ReplicaState, Servers, Version, unpack
from sync.wire.client import BlockingPeer, Peer

pytestmark = [pytest.mark.engine, pytest.mark.run, pytest.mark.filterwarnings("ignore")]
STEPS, MANY, GRACE_SECONDS = 5, 100, 120
BOTH_ENDS = {"type": "task", "task": "sort_letters"}
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def save_model(kind: str, folder: Path, tied: bool, width: int = 64, **more: Any) -> None:
    """Random weights in bf16, biases too, and a tokenizer of one token per character with a chat template.

    The tokenizer is a Qwen2Tokenizer without merges: whatever a Qwen2 folder holds, that is what is loaded.
    """
    from transformers.models.qwen2 import Qwen2Tokenizer

    size = {"vocab_size": len(VOCABULARY), "hidden_size": width, "intermediate_size": 96}
    size |= {"head_dim": width // 2, "initializer_range": 0.02, "tie_word_embeddings": tied}
    ends = {"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    model = language_model(kind, **size, **ends, **more).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Qwen2Tokenizer(vocab=ids, merges=[], unk_token=PAD, pad_token=PAD, eos_token=EOS)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Students `qwen3`, `qwen2` and `experts`, and their `teacher`."""
    folder = tmp_path_factory.mktemp("models")
    save_model("Qwen3", folder / "qwen3", tied=True)
    save_model("Qwen2", folder / "qwen2", tied=False)
    save_model("Qwen3Moe", folder / "experts", tied=False, **EXPERTS)
    save_model("Qwen3", folder / "teacher", tied=True, width=128)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """[prompts] for "chat" and "dataset", 40 rows each."""
    from datasets import Dataset

    folder, letters = tmp_path_factory.mktemp("prompts"), "abcdefgh" * 7
    texts = [letters[row : row + 3 + row % 4] + "abcde"[row // 8] for row in range(40)]
    chats = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in texts]
    (folder / "chat.jsonl").write_text("\n".join(chats))
    (folder / "dataset").mkdir()
    Dataset.from_dict({"question": texts}).to_parquet(folder / "dataset/train.parquet")
    return {
        "chat": {"type": "jsonl", "path": str(folder / "chat.jsonl")},
        "dataset": {"type": "dataset", "path": str(folder / "dataset"), "field": "question"},
    }


class Command:
    """A `distill` command in a session of its own, as a terminal starts it; leaving the context kills it.

    `env`: variables over those of this process; an empty one is left out.
    """

    def __init__(self, log: Path, *words: str, env: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as output:
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
            env = {name: value for name, value in env.items() if value}
            self.process = forked.start([*DISTILL, *words], env, output, new_session=True, cwd=log.parent)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def end(self, seconds: float = 1200.0) -> int:
        """Its exit status."""
        return self.process.wait(seconds)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self.process.kill()
        self.process.wait()


class Listeners:
    """Who listens where among the processes of a run, of all looks at it.

    The launcher's server, and those with --port on their command line, speak HTTP.
    """

    def __init__(self, launcher: int) -> None:
        self.addresses: dict[str, set[str]] = {}
        """Address → the processes that listened there."""
        self.answers: dict[int, tuple[int, int, int]] = {}
        """Port of a server → what /health answers: to us, for another host, to a page in a browser."""
        self._launcher = launcher

    def look(self) -> None:
        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(self._launcher)
            for process in [launcher, *launcher.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    self._look(process)

    def _look(self, process: psutil.Process) -> None:
        guardian = process.parent()  # knows the command line that a title hides
        words = " ".join([*process.cmdline(), *(guardian.cmdline() if guardian else [])])
        serves = re.findall(r"--port[ =](\d+)", words)
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                self.addresses.setdefault(one.laddr.ip, set()).add(words)
                if process.pid == self._launcher or str(one.laddr.port) in serves:
                    self._ask(one.laddr.port)

    def _ask(self, port: int) -> None:
        if port in self.answers:
            return
        options = ({}, {"host": f"a.page.example:{port}"}, {"origin": "http://a.page.example"})
        with contextlib.suppress(httpx.TransportError), httpx.Client(trust_env=False) as client:
            url = f"http://127.0.0.1:{port}/health"
            first, *others = (client.get(url, headers=headers).status_code for headers in options)
            if first == 200:
                self.answers[port] = (first, others[0], others[1])


class Run:
    """One configuration and its folder."""

    def __init__(self, folder: Path, models: Path, student: str, prompts: Mapping[str, Any]) -> None:
        self.folder, self.run_dir, self.config = folder, folder / "run", folder / "run.toml"
        self.models = models
        self.served = 0
        """Servers that were seen to refuse what comes from a browser's page."""
        sections: dict[str, Any] = {
            "run": {"grace_seconds": GRACE_SECONDS},
            "student": {"path": models / student, "engine_args": ENGINE_ARGS},
            "teachers": {"teacher": {"path": str(models / "teacher")}},
            "rollout": {"batch": BATCH, "max_tokens": 8},
            "trainer": {"lr": 1e-3},
            "prompts": prompts,
        }
        written(self.config, STEPS, sections)

    def command(
        self, name: str, *overrides: str, more: tuple[str, ...] = (), env: Mapping[str, str] | None = None
    ) -> Command:
        words = name, str(self.config), *over(*overrides), *more
        return Command(self.folder / f"{name}.log", *words, env=env)

    def finish(self, *overrides: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
        """Run to the end, on loopback alone; its summary."""
        with self.command("run", *overrides, more=more) as running:
            seen = Listeners(running.process.pid)
            ended = lambda: seen.look() or running.process.poll() is not None  # noqa: E731
            until(ended, 1200.0, lambda: running.said, poll_seconds=0.2)
            assert running.end() == 0, self.logs(running)
            self.served = len(seen.answers)
            assert all(ip_address(address).is_loopback for address in seen.addresses), seen.addresses
            assert set(seen.answers.values()) == {(200, 403, 403)}, seen.answers
        return self.summary()

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def figures(self) -> list[dict[str, Any]]:
        """Of every step; an evaluation of the model folder may be written before the first."""
        return [line for line in read_lines(self.run_dir / "metrics.jsonl") if "train/loss" in line]

    def logs(self, command: Command) -> str:
        parts = [command.said]
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text()[-3000:]}")
        return "\n".join(parts)


def check_result(
    run: Run, summary: Mapping[str, Any], served: Sequence[str] = ("student-0",), steps: int = STEPS
) -> None:
    """All steps, equal weights everywhere, and a folder of exactly those weights that transformers loads; in
    most tensors training changed an element."""
    from transformers import AutoModelForCausalLM

    assert (summary["completed"], summary["steps"]) == (True, steps)
    assert summary["train"]["tokens_total"] > 0
    assert summary["rollout"]["batched"] == steps * BATCH
    assert summary["weights_identical_by_replica"] == dict.fromkeys(served, True)
    assert summary["weights_identical"] is True
    final = run.run_dir / "final"
    end = dict(read_folder(final))
    assert digest_of_all({name: digest(tensor) for name, tensor in end.items()}) == summary["weights_digest"]
    model, loaded = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not any(loaded.values()), loaded
    assert model.dtype == torch.bfloat16
    config = json.loads((run.run_dir / "config.json").read_text())
    start = dict(read_folder(Path(config["student"]["path"])))
    assert start.keys() == end.keys()
    assert sum(not torch.equal(start[name], end[name]) for name in start) > len(start) / 2


def check_trace(run: Run) -> None:
    """Perfetto's trace processor reads every span of every role, in the order of a rollout's life."""
    trace = Trace(write_trace(run.run_dir))
    assert trace.problems() == []
    recorded = Counter((span["role"], span["what"]) for span in read_lines(run.run_dir / "timeline.jsonl"))
    begins: dict[tuple[str, str], list[float]] = {}
    for role, what, _, start, _ in trace.slices():
        begins.setdefault((role, what), []).append(start)
    assert {stage: len(starts) for stage, starts in begins.items()} == recorded
    life = [("student-0", "generate"), ("teacher teacher", "score")]
    life += [("trainer", "train"), ("trainer", "publish")]
    first = [min(begins[stage]) for stage in life]
    assert first == sorted(first)


def wait_for(condition: Callable[[], Any], command: Command) -> None:
    until(condition, 1200.0, lambda: command.said, command.process, 0.1)


def exported(urls: Sequence[str], token: str) -> set[str]:
    """Names of what these servers show to Prometheus."""
    headers = {"authorization": f"Bearer {token}"}
    answers = [httpx.get(f"{url}/metrics", headers=headers, trust_env=False, timeout=60) for url in urls]
    lines = "\n".join(one.raise_for_status().text for one in answers)
    return set(re.findall(r"^([a-z_:]+)[ {]", lines, re.MULTILINE))


def marked(mark: str) -> list[psutil.Process]:
    """Living processes whose command line or environment holds `mark`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = [*process.cmdline(), *process.environ().values()]
            if process.status() != psutil.STATUS_ZOMBIE and any(mark in word for word in words):
                found.append(process)
    return found


def test_each_role_alone_registers_with_a_token_while_replicas_join_and_leave(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No URL but the controller's is written; the trainer's two machines are two launchers that meet there.

    Completions of a prompt are trained in groups, against their mean reward; late ones by freshness.
    """
    run, env = Run(tmp_path, models, "qwen3", BOTH_ENDS), {TOKEN_VARIABLE: "a token of the tests"}
    monkeypatch.setenv(TOKEN_VARIABLE, env[TOKEN_VARIABLE])
    controller, spare = free_port(), free_port()
    keys = [
        f"controller.port={controller}",
        "evaluation.prompts=4",
        "trainer.ranks=1",
        "trainer.nodes=2",
        f"run.steps={MANY}",
        "rollout.per_prompt=2",
        "rollout.completion_timeout_seconds=60",
        'rollout.on_timeout="keep"',
        'buffer.late={type="freshness", hard_limit=9, half_life=2}',
        'objective={type="topk", k=4, task={baseline="group"}}',
    ]
    there = ("--controller", f"http://127.0.0.1:{controller}")
    peer = BlockingPeer(there[1], env[TOKEN_VARIABLE])
    with contextlib.ExitStack() as roles:

        def start(name: str, *more: str) -> Command:
            return roles.enter_context(run.command(name, *keys, more=(*there, *more), env=env))

        servers = {name: start(name) for name in ("teacher", "evaluator")}
        servers["student-0"] = start("student")
        second = "--index", "1"  # told of no controller: it is added by its URL, while the run is young
        late = run.command("student", *keys, f"student.port={spare - 1}", more=second, env=env)
        servers["student-1"] = roles.enter_context(late)
        wait_for(lambda: healthy(f"http://127.0.0.1:{spare}"), servers["student-1"])
        trainers = [start("train", "--node", str(node)) for node in range(2)]
        control = roles.enter_context(run.command("control", *keys, env=env))

        def trained() -> bool:
            assert all(one.process.poll() is None for one in trainers), trainers[0].said
            return steps_of(run.run_dir) >= 2  # version 1 was out before that was reported

        wait_for(trained, control)
        ranks = [rank for one in trainers for rank in ranks_of(one.process.pid)]
        assert len(ranks) == 2
        for rank in ranks:  # the run is not over before the one has joined and the other left
            rank.suspend()
        with Command(tmp_path / "add.log", "servers", "add", f"http://127.0.0.1:{spare}", *there) as adding:
            assert adding.end() == 0, adding.said
        wait_for(lambda: phases(peer) == {"student-0": "serving", "student-1": "serving"}, control)
        urls = {one.name: one.url for one in peer.call("/v1/servers", None, Servers).servers}
        places = [urls.pop(f"trainer-{node}") for node in range(2)]  # where ranks meet: no servers
        assert urls.keys() == {"student-0", "student-1", "teacher-teacher", "evaluator"}
        assert None not in places
        shown, everyone = dashboard.metrics() - dashboard.OCCASIONAL, [there[1], *urls.values()]
        evaluated = "distill_run_eval_reverse_kl"  # version 0, beside the first steps
        wait_for(lambda: evaluated in exported(everyone[:1], env[TOKEN_VARIABLE]), control)
        assert shown - exported(everyone, env[TOKEN_VARIABLE]) == set()
        with Command(tmp_path / "remove.log", "servers", "remove", "student-0", *there) as removing:
            assert removing.end() == 0, removing.said
        assert servers.pop("student-0").end() == EXIT_REFUSED
        for rank in ranks:
            rank.resume()
        assert control.end() == 0, control.said + trainers[0].said
        for trainer in trainers:
            assert trainer.end() == 0, trainer.said
        check_result(run, run.summary(), ("student-1",), MANY)
        assert run.summary()["after"]["completions"] == 4
        check_policies(run)
        student, teacher, evaluator = (urls[name] for name in ("student-1", "teacher-teacher", "evaluator"))
        placed = [f'student.urls=["{student}"]', f'teachers.teacher.urls=["{teacher}"]']
        placed.append(f'evaluation.placement.urls=["{evaluator}"]')
        check_that_no_other_run_gets_them(run, [*keys, *placed], str(student), env)
        for server in servers.values():
            assert server.process.poll() is None, server.said
            server.process.terminate()
        for server in servers.values():
            assert server.end() in (0, -signal.SIGTERM, 128 + signal.SIGTERM), server.said
    until(lambda: not marked(str(tmp_path)), say=lambda: str(marked(str(tmp_path))), poll_seconds=0.2)


def check_that_no_other_run_gets_them(
    run: Run, joined: Sequence[str], left: str, env: Mapping[str, str]
) -> None:
    """A new run of the same name, with URLs of servers that the last one left up, ends with their names."""
    nobody = f"http://127.0.0.1:{free_port()}"
    mine = rf"it serves run 'run' \(id {run.summary()['run']['id']}, model \w+\) and was asked for run 'run'"
    alone, probed = ("evaluation=false",), ("--engines",)
    cases = [
        ("control", left, alone, (), rf"student-0: {left}/distill/v1/state answered 421: {mine} \(id \w+\)"),
        ("control", nobody, (), (), rf"/v1/probe answered 421: {mine} \(id \w+\): start a fresh server"),
        ("preflight", left, (), probed, rf"{left}/distill/v1/generate answered 421: {mine} \(no id\): start"),
    ]
    for number, (name, student, keys, more, words) in enumerate(cases):
        folder = run.folder / f"another-{number}"
        folder.mkdir()
        other = Run(folder, run.models, "qwen3", BOTH_ENDS)
        place = ("controller.port=0", f'student.urls=["{student}"]', *keys)
        with other.command(name, *joined, *place, more=more, env=env) as refused:
            assert refused.end() == 1, refused.said
            assert re.search(words, refused.said), refused.said
        assert steps_of(other.run_dir) == 0


def phases(peer: BlockingPeer) -> dict[str, str]:
    servers = peer.call("/v1/servers", None, Servers).servers
    return {one.name: one.phase for one in servers if one.phase}


def check_policies(run: Run) -> None:
    """The audit, whole groups, the bound on record, and what the replica that joined late began with."""
    report = audit(run.run_dir)
    assert report.ok, report
    assert report.oldest <= 9
    bounds = rows_of(run.run_dir, "SELECT max_staleness, hard_limit, half_life, completions FROM opening")
    assert bounds == [(4, 9, 2.0, 2)]
    members = rows_of(run.run_dir, "SELECT step, rollout FROM member")
    assert len({step for step, _ in members}) == MANY
    assert {*Counter((step, group_of(rollout)) for step, rollout in members).values()} == {2}
    applied = rows_of(run.run_dir, "SELECT replica, step FROM applied ORDER BY at")
    assert next(step for replica, step in applied if replica == "student-1") >= 1
    assert applied[-1] == ("student-1", MANY)


def test_a_qwen2_with_biases_is_interrupted_as_by_a_terminal_and_resumed_on_more_ranks(
    tmp_path: Path, models: Path, prompts: dict[str, dict[str, Any]]
) -> None:
    """What may change takes effect; a secret is on no command line and in no file."""
    run = Run(tmp_path, models, "qwen2", prompts["dataset"])
    settings = ('objective={type="student_topk", k=4}', "evaluation.prompts=4")
    secret = f"planted-{os.getpid()}"
    settings += (f"trainer.env.A_PASSWORD={secret}", f"student.env.A_TOKEN={secret}")
    with run.command("run", *settings, "run.steps=100000", env={"OMP_NUM_THREADS": ""}) as running:
        wait_for(lambda: steps_of(run.run_dir) >= 2, running)
        assert "cores: student 1, trainer 1, teacher teacher 1, evaluator 1\n" in running.said
        family = [running.process.pid, *(p.pid for p in psutil.Process(running.process.pid).children(True))]
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in family]
        assert [line for line in lines if secret in line] == []
        assert sum("--module\0student_trainer" in line or "trainer run rank" in line for line in lines) > 0
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.end() == 130, run.logs(running)
        assert "go on with --resume" in running.said
    until(lambda: not marked(str(tmp_path)), say=lambda: str(marked(str(tmp_path))), poll_seconds=0.2)
    reached = run.summary()["steps"]
    latest = (run.run_dir / "checkpoints/latest").read_text().strip()
    assert Version.parse(latest).step == reached

    settings += ("trainer.ranks=2", "trainer.lr=2e-4", f"run.steps={reached + 2}")
    with run.command("run", *settings, more=("--resume", "--dry-run")) as told:
        assert told.end() == 0, told.said
        assert f"goes on from {latest}" in told.said
        assert "resumed with trainer.lr: 0.001 -> 0.0002 (takes effect)" in told.said
        assert "formats: config.json 1, run.db and arrays/ 2, checkpoints/ 1" in told.said
    summary = run.finish(*settings, more=("--resume",))
    assert run.served == 4, "controller, teacher, replica, evaluator"
    assert "trainer.lr: 0.001 -> 0.0002 (takes effect)" in (tmp_path / "run.log").read_text()
    assert [line["train/lr"] for line in run.figures()] == [1e-3] * reached + [2e-4] * 2
    rates = [json.loads((run.run_dir / f"config{n}.json").read_text())["trainer"]["lr"] for n in (".0", "")]
    assert rates == [1e-3, 2e-4]
    shown = [p for p in tmp_path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    assert shown == []
    assert summary["lineages"] > Version.parse(latest).lineage + 1
    assert summary["rollout"]["batched"] >= (reached + 2) * BATCH
    check_result(run, {**summary, "rollout": {"batched": (reached + 2) * BATCH}}, steps=reached + 2)
    assert summary["before"]["version"] == str(Version(0, 0))
    assert summary["after"]["reverse_kl"] > 0
    assert summary["buffer"]["age_max"] <= summary["buffer"]["age_limit"]
    improved = Version.parse(summary["best"]["version"]).step > 0
    for name, there in {"best/config.json": improved, "report.png": True, "timeline.jsonl": True}.items():
        assert (run.run_dir / name).is_file() == there, name
    page = (run.run_dir / "report.html").read_text()
    titles = [title for title, _, _ in ROWS if f"<td>{title}</td>" in page]
    assert titles == [title for title, place, _ in ROWS if not place.endswith((".pass_rate", ".reward"))]
    spans = {span["what"] for span in read_lines(run.run_dir / "timeline.jsonl")}
    assert {"generate", "score", "train", "update", "stage", "pause", "apply"} <= spans
    checked = audit(run.run_dir)
    assert checked.ok, checked
    assert checked.trained == (reached + 2) * BATCH


def test_fused_experts_go_out_under_their_checkpoint_names(
    tmp_path: Path, models: Path, prompts: dict[str, dict[str, Any]]
) -> None:
    """Every shard of a fused tensor holds experts in part; what arrives are a checkpoint's own tensors.

    The trainer takes the routes that the replica recorded, across its swaps of weights. After fifty random
    versions of the final model publisher, follower and late joiner hold the same bits.
    """
    run = Run(tmp_path, models, "experts", {**prompts["chat"], "reward_fn": "operator:ne"})
    settings = ("trainer.ranks=2", "objective.type=full", "evaluation.prompts=4")
    summary = run.finish(*settings, "rollout.routing_replay=true")
    check_result(run, summary)
    assert (summary["sync"]["versions"], summary["after"]["completions"]) == (STEPS + 1, 4)
    assert audit(run.run_dir).ok
    rollouts = rollouts_of(run.run_dir)
    assert len({span.version for one in rollouts for span in one.spans}) > 1
    for one in rollouts:
        assert one.routes.shape == (one.prompt.shape[0] + one.length - 1, 2, EXPERTS["num_experts_per_tok"])
        assert int(unpack(one.routes).max()) < EXPERTS["num_experts"]
    assert abs(run.figures()[0]["train/rho_mean"] - 1) < 0.01
    check_trace(run)
    names = {name for name, _ in read_folder(run.run_dir / "final")}
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert not [name for name in names if "gate_up_proj" in name]
    asyncio.run(check_that_weights_arrive(run.run_dir / "final", tmp_path / "proof"))


async def check_that_weights_arrive(model: Path, work: Path) -> None:
    """Fifty random deltas reach a replica one by one, and one that joins behind the last: what either passed
    to its loader has the publisher's digests, and both score prompts alike, bit for bit. The late one alone
    then gets a projection doubled: both comparisons must fail."""
    published, random = Moving(model, work, DirectoryStore(work / "store")), np.random.default_rng(0)
    published.publish("full")
    prompts = random.integers(0, len(VOCABULARY), (64, 32)).tolist()
    with contextlib.ExitStack() as stack:
        short = {"max-model-len": 64}
        servers = [stack.enter_context(Server(model, work, i, engine_args=short)) for i in range(2)]
        for server in servers:
            server.wait()
        async with servers[0].peer() as follower, servers[1].peer() as late:
            for _ in range(50):
                for array in published.arrays.values():
                    moved = random.random(array.size) < random.choice([0.0, 0.001, 0.01, 0.1, 0.5])
                    array ^= np.where(moved, random.integers(1, 4, array.size), 0).astype(array.dtype)
                version = published.publish("delta").version
                await update(follower, version.step)
            await update(late, version.step)
            expected = {name: digest_of_array(array) for name, array in published.arrays.items()}
            assert [await digests_of(peer) for peer in (follower, late)] == [expected, expected]
            scores = [await prompt_logprobs(server, prompts) for server in servers]
            assert scores[0] == scores[1]
            name = next(n for n, at in published.places.items() if at.kind == "bf16" and "proj" in n)
            published.arrays[name] += np.where(published.arrays[name] & 0x7F80, 0x80, 0).astype(np.uint16)
            await update(late, published.publish("delta").version.step)
            assert await digests_of(late) != expected
            assert await prompt_logprobs(servers[1], prompts) != scores[0]


async def digests_of(peer: Peer) -> dict[str, str] | None:
    return (await peer.call("/distill/v1/state?digests=1", None, ReplicaState)).digests
