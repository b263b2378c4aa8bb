"""What turns cost: letters to sort in single completions, in episodes, and in episodes of which few sleep.

All three ways train on the same number of the student's answers in a step: three prompts of the quickstart,
each completed by itself, are one episode of three turns. The student says less behind earlier turns, which it
was not made with: compare tokens per second with that in mind. Trials take turns: noise hurts all alike.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

from distill.bench import pipeline
from distill.bench.runner import Figures, Row, TrialCache, comparison
from distill.tasks.sort_letters import ASK, EOS, SortLetters

TURNS: Final = 3
BATCH: Final = 32
"""Episodes of a step."""
STEPS: Final = 160
SLEEP_SECONDS: Final = 30
SLEEPS_EVERY: Final = 250
"""One episode in so many sleeps before its last turn."""
TAIL: Final = 8 * BATCH
"""None of the last episodes sleeps: the end of the run would wait for it."""
TEMPLATE: Final = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}" + EOS + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + ASK + "{% endif %}"
)
ONCE, EPISODES, SLEEPERS = "single completions", "episodes", f"1 of {SLEEPS_EVERY} sleeps {SLEEP_SECONDS} s"
_LEARNED: Final = ("seconds_to_target", "reverse_kl", "pass_rate")
"""Not measured: no trial is evaluated."""
ROWS: Final = {
    **{key: row for key, row in pipeline.ROWS.items() if key not in _LEARNED},
    "tokens": Row("tokens generated in all", ",.0f"),
    "too_old": Row("rollouts dropped as too old", ".0f"),
}


async def play(task: int, talk: Any, sleep: float = 0.0) -> float:
    """Ask for rows of letters. The share that is sorted right."""
    letters, right = SortLetters(), 0
    sleeps = sleep > 0 and task % SLEEPS_EVERY == SLEEPS_EVERY - 1 and task < STEPS * BATCH - TAIL
    for turn in range(TURNS):
        if sleeps and turn == TURNS - 1:
            await asyncio.sleep(sleep)
        prompt = letters.prompt(0, task * TURNS + turn)
        answer = await talk.say(prompt.text.removesuffix(ASK))
        right += letters.passes(prompt, answer.token_ids)
    return right / TURNS


def run(folder: Path, seeds: int = 3) -> Figures:
    """Run what is missing in `folder`; every trial, and the medians. Raises DistillError when a run fails."""
    folder = folder.absolute()
    cache = TrialCache(folder / "trials.jsonl")
    (folder / "template.jinja").write_text(TEMPLATE)
    trials = pipeline.side_by_side(cache, folder, ways(folder), seeds, STEPS, figures)
    return {"medians": {way: pipeline.summary(of, ROWS) for way, of in trials.items()}, "trials": trials}


def ways(folder: Path) -> dict[str, list[str]]:
    """Overrides of the quickstart."""
    template = folder / "template.jinja"
    common = [*pipeline.OVERLAPPED, "rollout.max_in_flight=256"]
    turns = [
        f"rollout.batch={BATCH}",
        f"student.chat_template={template}",
        f"teachers.sorter.chat_template={template}",
        'prompts={type="environment", environment="letters"}',
    ]
    letters = 'environments.letters={environment="distill.bench.episodes:play", env={OMP_NUM_THREADS="1"}'
    sleeps = f"options={{sleep={SLEEP_SECONDS}}}"
    return {
        ONCE: [*common, f"rollout.batch={BATCH * TURNS}"],
        EPISODES: [*common, *turns, f"{letters}}}"],
        SLEEPERS: [*common, *turns, f"{letters}, {sleeps}}}"],
    }


def figures(run_dir: Path, profile: pipeline.CpuProfile) -> Figures:
    """Of a finished run."""
    rollouts = json.loads((run_dir / "summary.json").read_text())["rollout"]
    more = {"too_old": rollouts["dropped"].get("too_old", 0), "tokens": rollouts["tokens_total"]}
    return pipeline.measure(run_dir, profile) | more


def table(report: Figures) -> str:
    """The medians side by side, as Markdown, and what a turn costs beyond a single completion."""
    found = report["medians"]
    cpu = "cpu_ms_per_step "
    roles = sorted({name.removeprefix(cpu) for of in found.values() for name in of if name.startswith(cpu)})
    rows = ROWS | {cpu + role: Row(f"CPU ms per step: {role}", ".0f") for role in roles}
    once, turns = found[ONCE], found[EPISODES]
    more = {role: (turns.get(cpu + role, 0.0) - once.get(cpu + role, 0.0)) / BATCH / TURNS for role in roles}
    costs = ", ".join(f"{role} {ms:+.2f}" for role, ms in more.items())
    together = f"together {sum(more.values()):+.2f}"
    ended = f"CPU ms for a turn beyond those for a single completion: {costs}; {together}"
    return "\n".join([*comparison(found, rows), "", ended])
