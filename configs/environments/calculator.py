"""Sums with a calculator: a tool that answers in this process, as an environment of the verifiers library.

    [environments.calculator]
    type = "verifiers"
    environment = "calculator"               # this file, in run.code_folder
    python = ".venv-environments/bin/python" # `make environments`

    user: 47*83+5=      student: call 47*83      user: 3901
                        student: call 3901+5     user: 3906      student: 3906

`call EXPRESSION` computes one operation of two whole numbers, by + - * or /, which rounds down. What the tool
cannot compute is answered with "error: …" and its reason: an error is a turn like any other, and the student
goes on. Anything else is the final answer; the reward is 1 when it is right. After `calls` calls the episode
is over.

A `Toolset` of verifiers would run in a process of its own and speak MCP; a tool this small needs neither.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

from distill.environments.verifiers_plugins import DirectHarness

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
__all__ = ["CalculatorEnvironment", "DirectHarness", "SumTaskset"]


class SumConfig(vf.TasksetConfig):
    """`options.taskset` of the section."""

    size: int = 1000
    """Tasks."""
    highest: int = 99
    calls: int = 4


class SumData(vf.TaskData):
    """One sum."""

    answer: int
    calls: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """One sum."""


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """`size` sums of the form a*b+c."""

    def load(self) -> Iterator[SumTask]:
        """Sums 0, 1, …"""
        for seed in range(self.config.size):
            rng = random.Random(seed)
            a, b, c = (rng.randint(1, self.config.highest) for _ in range(3))
            data = SumData(prompt=f"{a}*{b}+{c}=", answer=a * b + c, calls=self.config.calls)
            yield SumTask(data, self.config.task)


class CalculatorEnvironmentConfig(vf.EnvConfig):
    """The tool runs in this process: no sandbox is needed for arithmetic."""

    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class CalculatorEnvironment(vf.Env[CalculatorEnvironmentConfig]):
    """Answers calls until the student gives its answer."""

    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        """One sum."""
        errors = 0
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(task.data.calls):
                if segment.terminated or not segment.last_reply.startswith("call"):
                    break
                try:
                    found = str(computed(segment.last_reply.removeprefix("call")))
                except ValueError as error:
                    found, errors = f"error: {error}", errors + 1
                segment = await talk.turn(found)
            right = not segment.terminated and segment.last_reply.strip() == str(task.data.answer)
        talk.trace.record_reward("right", float(right))
        talk.trace.record_metric("tool_errors", float(errors))


def computed(expression: str) -> int:
    """Value of one operation. Raises ValueError, with the reason, for anything else."""
    found = re.fullmatch(r"\s*(-?\d{1,9})\s*([-+*/])\s*(-?\d{1,9})\s*", expression)
    if found is None:
        raise ValueError(f"{expression.strip()!r:.40} is not one operation of two whole numbers")
    first, sign, second = int(found[1]), found[2], int(found[3])
    if sign == "/" and second == 0:
        raise ValueError("division by zero")
    return OPERATIONS[sign](first, second)
