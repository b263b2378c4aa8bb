"""A whole run of episodes, every engine real, in which environment, replica and launcher are killed −9.

The environment plays three turns with letters and notes what the student said. The run is made once; each
test looks at one thing that must be true of it afterwards.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import recorded_run
from kill_target import KillTarget
from recorded import rollouts_of, rows_of
from recorded_run import generated
from run_on_letters import BATCH, NAME, command

from distill.record.audit import audit
from distill.record.rollout import Rollout
from distill.tasks.sort_letters import ASK, ASK_ID, EOS
from sync.wire import Array, VersionSpan, unpack

pytestmark = [pytest.mark.engine, pytest.mark.run, pytest.mark.faults, pytest.mark.filterwarnings("ignore")]
STEPS, TURNS = 6, 3
ENVIRONMENT = f"""
import asyncio, json, os, pathlib, random

NOTES = pathlib.Path(__file__).with_name("notes.jsonl")

async def play(task, talk):
    rng, said = random.Random(task), []
    for _ in range({TURNS}):
        reply = await talk.say("".join(rng.sample("abcdefgh", 3)))
        said.append(reply.token_ids)
        await asyncio.sleep(0.02)
    with NOTES.open("a") as notes:
        notes.write(json.dumps([task, said]) + "\\n")
    return float(len(said[0]) > 2)
"""
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}" + EOS + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASK + "{% endif %}"
)


class Played(NamedTuple):
    """What is left of the run."""

    target: KillTarget
    rollouts: list[Rollout]
    """On record when the launcher was killed, those whose arrays were not freed."""
    notes: list[tuple[int, list[list[int]]]]
    """Task and the student's turns of every episode that the environment saw to its end."""
    recorded: Path
    """What a relay between replica and controller kept."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("environment")
    (folder / "letters.py").write_text(ENVIRONMENT)
    (folder / "template.jinja").write_text(TEMPLATE)
    settings = (
        'prompts={type="environment", environment="letters"}',
        'environments.letters={environment="letters:play"}',
        f"student.chat_template={folder / 'template.jinja'}",
        f"teachers.only.chat_template={folder / 'template.jinja'}",
        "rollout.max_tokens=6",
        "run.restarts=20",
        "evaluation={prompts=8}",
    )
    rng, recorded = random.Random(0), folder / "recorded"
    recorded.mkdir()
    python, _, _, _, *words = command(folder, 100_000, *settings)
    recording = [python, str(Path(recorded_run.__file__)), str(recorded), *words]
    with KillTarget(recording, folder / NAME) as target:
        target.start()
        target.wait(lambda: target.step() >= 2, "step 2")
        for role in ("environment-letters", "student-0"):
            target.kill(role, rng)
            target.wait_at_work([role])
        target.kill_launcher()
        killed = rollouts_of(target.run_dir)
        target.resume(STEPS)
        target.end()
        notes = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
        yield Played(target, killed, notes, recorded)


def turn(
    tokens: Array, logprob: Array, spans: list[VersionSpan], part: slice = slice(None)
) -> tuple[Any, ...]:
    """Ids of a part of the tokens, the bytes of their log-probabilities, and the version of each."""
    versions = tuple(span.version for span in spans for _ in range(span.start, span.end))
    return tuple(unpack(tokens)[part].tolist()), unpack(logprob)[part].tobytes(), versions[part]


def test_the_run_completes_with_every_guarantee_kept(played: Played) -> None:
    report, summary = audit(played.target.run_dir), played.target.summary()
    assert report.ok, report
    assert (summary["completed"], summary["weights_identical"]) == (True, True)
    assert report.trained == summary["steps"] * BATCH
    assert (report.open_prompts, played.target.orphans) == ([], 0)
    requeued = {*rows_of(played.target.run_dir, "SELECT reason FROM requeue")}
    losses = {"environment_lost", "replica_lost", "replica_busy"}
    assert requeued <= {*losses, "aborted", "controller_restarted"}


def test_own_tokens_are_byte_for_byte_what_the_environment_was_told(played: Played) -> None:
    said = {(task, json.dumps(turns)) for task, turns in played.notes}
    assert len(played.rollouts) >= BATCH
    for one in played.rollouts:
        tokens, task = unpack(one.tokens).tolist(), int(one.id.split(":")[1])
        own = [tokens[start:end] for start, end in one.own]
        assert (task, json.dumps(own)) in said
        assert len(own) == TURNS
        assert all(tokens[start - 1] == ASK_ID for start, _ in one.own[1:])
        assert [span.start for span in one.spans] == [0, *(span.end for span in one.spans[:-1])]


def test_own_tokens_are_byte_for_byte_what_the_replica_answered(played: Played) -> None:
    answered = {
        (asked.id, tuple(asked.token_ids), *turn(answer.token_ids, answer.logprob, answer.spans))
        for asked, answer in generated(played.recorded)
    }
    for one in played.rollouts:
        before = [*unpack(one.prompt).tolist(), *unpack(one.tokens).tolist()]
        for start, end in one.own:
            asked = tuple(before[: one.prompt.shape[0] + start])
            own = turn(one.tokens, one.logprob, one.spans, slice(start, end))
            assert (one.id, asked, *own) in answered


def test_the_evaluation_plays_the_held_out_tasks(played: Played) -> None:
    after = played.target.summary()["after"]
    assert 0 <= after["pass_rate"] <= 1
    assert after["reverse_kl"] > 0
    assert {task for task, _ in played.notes} >= {*range(8)}, "the first, and no rollout is of them"
    assert min(int(one.id.split(":")[1]) for one in played.rollouts) >= 8
