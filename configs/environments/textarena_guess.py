"""Guess the number of TextArena, 1 to 20 in five guesses, as an environment of the verifiers library.

    [environments.guess]
    type = "verifiers"
    environment = "textarena_guess"          # this file, in run.code_folder
    python = ".venv-environments/bin/python" # `make environments`

The first prompt is "?", a hint is "higher" or "lower", and an answer is "[7]" (rules of TextArena): what is
no guess, lies outside, or was guessed before ends the game. The reward is 1 for the number, else 0. Task i
always has the same number.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf
from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv

from distill.environments.verifiers_plugins import DirectHarness

__all__ = ["DirectHarness", "GuessEnvironment", "GuessTaskset"]


class GuessConfig(vf.TasksetConfig):
    """`options.taskset` of the section."""

    highest: int = 20
    guesses: int = 5


class GuessData(vf.TaskData):
    """One game."""

    seed: int
    highest: int
    guesses: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    """One game."""


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    """Games without end, one for every seed."""

    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        """Games 0, 1, …"""
        shape = {"highest": self.config.highest, "guesses": self.config.guesses}
        for seed in itertools.count():
            yield GuessTask(GuessData(prompt="?", seed=seed, **shape), self.config.task)


class GuessEnvironmentConfig(vf.EnvConfig):
    """The student plays in this process: no sandbox is needed for words."""

    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class GuessEnvironment(vf.Env[GuessEnvironmentConfig]):
    """Lets the student guess until the game is over."""

    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        """One game."""
        game, reward = _new_game(task.data), 0.0
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and re.search(r"\[\d+\]", segment.last_reply):
                hints = game.state.game_state["guess_history"]
                before = len(hints)
                over, _ = game.step(segment.last_reply)
                if over or len(hints) == before:  # TextArena itself forgives one guess that does not count
                    reward = float(game.state.rewards == {0: 1})
                    break
                segment = await talk.turn(hints[-1][1])
        talk.trace.record_reward("won", reward)


def _new_game(data: GuessData) -> GuessTheNumberEnv:
    """TextArena draws from Python's global randomness: nothing awaits between seed and reset."""
    before = random.getstate()
    game = GuessTheNumberEnv(1, data.highest, data.guesses - 1)  # it counts them from 0
    random.seed(data.seed)
    game.reset(1)
    random.setstate(before)
    return game
