"""Waits of a run's parties, and that the controller's stages wait in no other way."""

from __future__ import annotations

import ast
import asyncio
import gc
import re
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

import distill
from distill.aio import cancel
from distill.waits import END, Wait, Waits

ROOT: Final = Path(distill.__file__).parent
STAGES: Final = ("batching", "record", "rollout", "trainer_api")
EVALUATION: Final = ("evaluation/schedule.py", "evaluation/generation.py")
MODULES: Final = ("controller.py", "scoring.py", *EVALUATION)
WAITING: Final = re.compile(
    r"\.(wait|wait_for|wrap_future)$|asyncio\.sleep$"
    r"|(engine|_evaluator|_environment|_rewards)\.(generate|update|complete|evaluate|begin|proceed|reward)$"
)
"""A call that waits for a party."""
NOTHING, INSIDE = "its own work: no party waits for this", "called within a wait that has a name"
ALLOWED: Final = {
    "controller._note_root": "pause between two looks for the display",
    "controller._proof": "an interruption, which cuts the end and its waits short",
    "controller._tidy": NOTHING,
    "controller._trainer_done": "the end of the run; StepBatcher names what the trainer waits for",
    "life.begin": INSIDE,
    "life.proceed": INSIDE,
    "guard.run": "pause between two looks at heartbeats",
    "record.flush": NOTHING,
    "replica_pool._serve": "pause between two looks at a replica that serves",
    "generation._played": "pause before an episode begins again",
    "replica_pool.run": "the error of a replica's task, or the end of the run",
    "replica_pool.unless_lost": "the loss that ends the other work",
    "schedule.run": "pause before another try, and versions that are due",
    "scoring._serve": "pause in which a request fills",
    "scoring.run": "pause in which releases are collected",
    "scoring.until_answered": INSIDE,
    "session.batch": "a rank's request; StepBatcher names what the trainer waits for",
}
"""Function with calls that have no name → what they wait for."""


def calls(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Function and text of every call that waits for a party outside `with waits.on(…)`, or a function that
    returns such a wait."""
    named = {
        each.name
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef) and "Wait" in ast.unparse(each.returns or ast.Constant(""))
    }

    def look(node: ast.AST, function: str, inside: bool) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, inside = f"{module}.{node.name}", False
        if isinstance(node, ast.With):
            entered = [ast.unparse(item.context_expr) for item in node.items]
            wait = re.compile(rf"waits\.on\(|wait\(|self\.({'|'.join(named)})\(")
            inside |= any(map(wait.match, entered))
        if isinstance(node, ast.Call) and not inside:
            text = ast.unparse(node)
            if WAITING.search(ast.unparse(node.func)) and text != "asyncio.sleep(0)":
                yield function, text
        for child in ast.iter_child_nodes(node):
            yield from look(child, function, inside)

    yield from look(tree, module, False)


def test_no_stage_waits_for_a_party_without_naming_the_wait() -> None:
    paths = [path for folder in STAGES for path in sorted((ROOT / folder).glob("*.py"))]
    paths += [ROOT / module for module in MODULES]
    bare = [call for path in paths for call in calls(ast.parse(path.read_text()), path.stem)]
    assert [call for call in bare if call[0] not in ALLOWED] == []
    assert {function for function, _ in bare} == set(ALLOWED), "the list names what is there"


def test_the_timeline_is_told_what_a_role_is_blocked_on_by_waits_alone() -> None:
    told = [path for path in ROOT.rglob("*.py") if re.search(r"blocked\(", path.read_text())]
    assert {path.name for path in told} == {"waits.py", "timeline.py"}


def test_a_wait_is_freed_with_its_last_user() -> None:
    user = ModuleType("whoever is told the details")
    freed = weakref.ref(user)
    gc.disable()
    try:
        with Wait(Waits(), "dispatcher", "room", partial(str, user)) as wait:
            assert wait.of() == ("room",)
        del user, wait
        assert freed() is None
    finally:
        gc.enable()


def test_a_wait_goes_on_when_it_is_entered_again_without_progress() -> None:
    on = partial(Wait, Waits())
    with on("dispatcher", "room", progress=1) as first:
        since = first.since
    with on("dispatcher", "room", progress=1) as second:
        assert second.since == since
    with on("dispatcher", "room", progress=2) as third:
        assert third.since > since
    with on("dispatcher", "prompts", progress=2) as other:
        assert other.since > third.since


def test_the_chain_follows_the_longest_wait_of_each_party_to_the_root() -> None:
    on = partial(Wait, waits := Waits())
    with (
        on("trainer", "batch 4", of=lambda: ["generation", "scoring"]),
        on("scoring", "teacher t") as longest,
        on("generation", "r0"),
        on("teacher t", "rollouts", idle=True),
    ):
        assert [wait.who for wait in waits.chain("trainer")] == ["trainer", "scoring"]
        waits.report({"teacher t": ("it loads its model", 3.0)})
        assert waits.root() == "teacher t: it loads its model, for 3 s"
        assert waits.why() == [
            "trainer waits 0 s for batch 4",
            "  ← scoring waits 0 s for teacher t",
            "  ← teacher t: it loads its model, for 3 s",
            "beside it, generation waits 0 s for r0",
        ]
        assert longest in waits.of(["scoring"])


def test_parties_that_wait_for_one_another_are_said_to() -> None:
    on = partial(Wait, waits := Waits())
    with on("trainer", "batch 4", of=lambda: ["r0"]), on("r0", "a version", of=lambda: ["trainer"]):
        assert [wait.who for wait in waits.chain("trainer")] == ["trainer", "r0", "trainer"]
        assert waits.why()[-1] == "  … and so on: they wait for one another"


@pytest.mark.virtual_time
async def test_behind_the_last_step_the_chain_is_that_of_the_runs_end() -> None:
    on, stalled = partial(Wait, waits := Waits()), list[Any]()
    task = asyncio.create_task(waits.watch(stalled.append, seconds=60.0))
    with on("batcher", "trainer"), on(END, "evaluation"):
        for number in range(4):
            with on("evaluation", f"r{number}"):
                await asyncio.sleep(50.0)
                assert waits.why() == [
                    f"the run's end waits {50 * (number + 1)} s for evaluation",
                    f"  ← evaluation waits 50 s for r{number}",
                ]
    assert stalled == []
    await cancel([task])


@pytest.mark.virtual_time
async def test_the_watchdog_tells_of_a_root_that_stays_the_same_and_of_no_other() -> None:
    on, stalled = partial(Wait, waits := Waits()), list[Any]()
    task = asyncio.create_task(waits.watch(stalled.append, seconds=60.0))
    for step in range(10):
        with on("trainer", f"batch {step}"):
            await asyncio.sleep(50.0)
    assert stalled == []
    with on("trainer", "batch 10", of=lambda: ["scoring"]), on("scoring", "teacher t"):
        await asyncio.sleep(80.0)
    assert [[wait.who for wait in chain] for chain in stalled] == [["trainer", "scoring"]]
    await cancel([task])
