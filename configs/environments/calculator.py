"""Sums with a calculator: a tool served over MCP, as an environment of the verifiers library.

    [environments.calculator]
    type = "verifiers"
    environment = "calculator"               # this file, in run.code_folder
    python = ".venv-environments/bin/python" # `make environments`
    [environments.calculator.options]
    renderer = { tool_parser = "qwen3" }     # how the student calls a tool
    agent = { runtime = { type = "subprocess" } }

    user     47*83+5=
    student  <tool_call>{"name": "compute", "arguments": {"expression": "47*83"}}</tool_call>
    tool     3901
    student  3906

`compute` works out one operation of two whole numbers, by + - * or /, which rounds down. What it cannot
compute is answered with the reason: an error is a turn like any other, and the student goes on. An answer
without a call is the last; the reward is 1 when it is right. All episodes of a process share one server of
tools: verifiers starts this file as a module, and `DirectHarness` calls it.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

from distill.environments.verifiers_plugins import DirectHarness

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
__all__ = ["DirectHarness", "SumTaskset"]


class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """The tools. Their docstrings and annotations are what the chat template shows the student."""

    TOOL_PREFIX = None

    @vf.tool
    def compute(self, expression: str) -> str:
        """The value of one operation of two whole numbers, such as 47*83."""
        return str(computed(expression))


class SumConfig(vf.TasksetConfig):
    """`options.taskset` of the section."""

    size: int = 1000
    """Tasks."""
    lowest: int = 1
    highest: int = 99
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class SumData(vf.TaskData):
    """One sum."""

    answer: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """One sum."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right last answer."""
        return float((trace.last_reply or "").strip() == str(self.data.answer))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        """Of the tool."""
        return float(sum(message.role == "tool" for message in trace.messages))


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """`size` sums of the form a*b+c."""

    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        """Started once, for all episodes."""
        return [Calculator(config.tools)]

    def load(self) -> Iterator[SumTask]:
        """Sums 0, 1, …"""
        for seed in range(self.config.size):
            rng = random.Random(seed)
            a, b, c = (rng.randint(self.config.lowest, self.config.highest) for _ in range(3))
            yield SumTask(SumData(prompt=f"{a}*{b}+{c}=", answer=a * b + c), self.config.task)


def computed(expression: str) -> int:
    """Value of one operation. Raises ValueError, with the reason, for anything else."""
    found = re.fullmatch(r"\s*(-?\d{1,9})\s*([-+*/])\s*(-?\d{1,9})\s*", expression)
    if found is None:
        raise ValueError(f"{expression.strip()!r:.40} is not one operation of two whole numbers")
    first, sign, second = int(found[1]), found[2], int(found[3])
    if sign == "/" and second == 0:
        raise ValueError("division by zero")
    return OPERATIONS[sign](first, second)


if __name__ == "__main__":
    Calculator.run()
