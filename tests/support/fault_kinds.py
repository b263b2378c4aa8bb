"""Six kinds of faults: whom each hits, and how long a run takes until it has recovered.

kill        SIGKILL: a server, one rank of the trainer, the controller (then the run is resumed), or all of
            them at once
stop        SIGSTOP for good: a role's process, vLLM's engine where it has a process of its own, the
            deepspeed launcher (and a rank is killed, unnoticed by it); the controller for a while
slow        a process runs for a tenth of the time, for a while: a role's, or the controller
cut         every connection is reset: to a role's server, or to the controller from the trainer
malformed   a stretch of an answer arrives overwritten: a replica's, a teacher's, an environment's
disk        the disk of the run's folder is full for a while
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

from faults import CUT, MALFORMED
from kill_target import CONTROLLER, DEEPSPEED, ENGINE_OF, KillTarget, kind_of

from distill.topology import EVALUATOR, TRAINER
from sync.base.errors import DistillError

ALL, DISK = "all at once", "the run's folder"
HEALTH_SECONDS = 20.0
"""run.health_timeout_seconds of the run that is hit: a stopped process is detected that late."""
STOP_SECONDS = 1.5 * HEALTH_SECONDS
"""Of the controller: by the clock it would take every other process for stalled."""
FAULT_SECONDS = 5.0
"""Length of a temporary fault: slowness, a full disk."""


def targets(
    rng: random.Random, kinds: Sequence[str], roles: Sequence[str], helpers: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Rounds of all kinds, without end, each with the next of its targets; of several processes any one."""
    names = sorted([*roles, *helpers])
    processes = sorted({kind_of(role) for role in roles})
    servers = [process for process in processes if process != kind_of(TRAINER)]
    hit = {
        "kill": [*processes, CONTROLLER, ALL],
        "stop": [*processes, *sorted({kind_of(helper) for helper in helpers}), CONTROLLER],
        "slow": [*processes, CONTROLLER],
        "cut": [*servers, CONTROLLER],
        "malformed": [server for server in servers if server != EVALUATOR],
        "disk": [DISK],
    }
    turns = [itertools.cycle([(kind, of) for of in rng.sample(hit[kind], len(hit[kind]))]) for kind in kinds]
    while True:
        for turn in rng.sample(turns, len(turns)):
            kind, of = next(turn)
            yield kind, rng.choice([name for name in names if kind_of(name) == of] or [of])


def _kill(target: KillTarget, rng: random.Random, role: str) -> float:
    roles, began = target.roles(), time.monotonic()
    if role in (CONTROLLER, ALL):
        target.kill_launcher(everything=role == ALL)
        target.start(resume=True)
        target.wait_at_work(roles)
    else:
        target.wait(lambda: role in target.roles(), f"a process of {role}")
        target.kill(role, rng)
        target.wait_at_work([role])
    return time.monotonic() - began


def _stop(target: KillTarget, rng: random.Random, role: str) -> float:
    """Raises DistillError when the controller, continued, kills healthy processes."""
    if role == CONTROLLER:
        before = target.processes()
        seconds = _temporary(target, role, lambda: target.pause(role, STOP_SECONDS))
        if gone := before - target.processes():
            raise DistillError(f"the controller was stopped for a while, and when continued it killed {gone}")
        return seconds
    target.wait(lambda: role in [*target.roles(), *target.helpers()], f"a process of {role}")
    began = time.monotonic()
    target.suspend(role, rng)
    if role == DEEPSPEED:
        target.kill(TRAINER, rng)
    target.wait_at_work([TRAINER if role == DEEPSPEED else role.removeprefix(ENGINE_OF)])
    return time.monotonic() - began


def _temporary(target: KillTarget, role: str, fault: Callable[[], None]) -> float:
    """A fault that kills no process: seconds from its end to the recovery."""
    roles = target.roles()
    fault()
    began = time.monotonic()
    target.wait_at_work([role] if role in roles else roles, anew=False)
    return time.monotonic() - began


INJECT: dict[str, Callable[[KillTarget, random.Random, str], float]] = {
    "kill": _kill,
    "stop": _stop,
    "slow": lambda run, _, role: _temporary(run, role, lambda: run.slow(role, FAULT_SECONDS)),
    "cut": lambda run, _, role: _temporary(run, role, lambda: run.relay(role, CUT)),
    "malformed": lambda run, _, role: _temporary(run, role, lambda: run.relay(role, MALFORMED)),
    "disk": lambda run, _, role: _temporary(run, role, lambda: run.fill_disk(FAULT_SECONDS)),
}
