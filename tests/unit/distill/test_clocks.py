"""Limits of time that must agree across modules, in one table, and what must hold between them."""

from __future__ import annotations

from typing import Final

import pytest

from distill import guardian, registry, waits
from distill.aio import LOOK_SECONDS, look_seconds
from distill.batching import batcher
from distill.config import RolloutConfig, RunConfigSection
from distill.environments import client as environments
from distill.evaluation import schedule
from distill.launch import run, supervise
from distill.rollout import broadcasts
from distill.rollout.replica_pool import ReplicaPool
from distill.trainer_api.session import TrainerSession
from student_trainer import controller_client, loop
from student_trainer.config import TrainerSettings
from sync.base import durable
from sync.base.settings import WeightsConfig
from sync.wire import client, peers, server
from teacher_service.client import REQUEST_SECONDS

HEALTH: Final = RunConfigSection.model_fields["health_timeout_seconds"].default
GRACE: Final = RunConfigSection.model_fields["grace_seconds"].default
START: Final = RunConfigSection.model_fields["start_seconds"].default
CLOCKS: Final = {
    # between two looks
    "look for a stall": LOOK_SECONDS,
    "look at a child": supervise.POLL_SECONDS,
    "look at a serving replica": ReplicaPool.poll_seconds,
    "look for late rollouts": batcher.LATE_POLL_SECONDS,
    "look for disk space": durable.RETRY_SECONDS,
    "look at the run's disk": run.DISK_POLL_SECONDS,
    "a wait goes on": waits.CONTINUED_SECONDS,
    # requests
    "probe of /health": peers.SECONDS,
    "idle connection, client": client.IDLE_SECONDS,
    "idle connection, server": server.KEEP_ALIVE_SECONDS,
    "long poll of the controller": TrainerSession.poll_seconds,
    "long poll of a rank": controller_client._POLL_SECONDS,
    "silence of the controller": loop._POLL_SECONDS,
    "vote of the ranks": loop.SETTLE_SECONDS,
    "event of the trainer": controller_client._EVENT_SECONDS,
    "collective of the ranks": TrainerSettings.model_fields["init_timeout_seconds"].default,
    "request to a teacher": REQUEST_SECONDS,
    "environment's margin": environments.MARGIN_SECONDS,
    # stalls
    "heartbeat": look_seconds(HEALTH),
    "run.health_timeout_seconds": HEALTH,
    "rollout.stall_timeout_seconds": RolloutConfig.model_fields["stall_timeout_seconds"].default,
    "silence of a broadcast's member": broadcasts.MEMBER_SECONDS,
    "weights.timeout_seconds": WeightsConfig.model_fields["timeout_seconds"].default,
    "evaluator's silence": schedule.STALL_SECONDS,
    "root of the chain": waits.ROOT_SECONDS,
    # leases
    "follow addresses": registry.FOLLOW_SECONDS,
    "look at leases": registry.LEASE_SECONDS / 5,
    "renew a lease": registry.LEASE_SECONDS / 3,
    "lease": registry.LEASE_SECONDS,
    # start and end
    "orphans' grace": guardian.ORPHAN_GRACE_SECONDS,
    "guardian": supervise.GUARDIAN_SECONDS,
    "trainer's last report": controller_client.FINAL_REPORT_SECONDS,
    "trainer's share of run.grace_seconds": run.STOP_SHARE * GRACE,
    "run.grace_seconds": GRACE,
    "pause before a restart": supervise.LONGEST_PAUSE_SECONDS,
    "run.start_seconds": START,
}
"""What passes or is allowed at most → seconds, as configured where nothing else is."""
RELATIONS: Final = [
    ("look for a stall", 4, "run.health_timeout_seconds", "a stop of the looking process is no stall"),
    ("heartbeat", 4, "run.health_timeout_seconds", "one heartbeat that is late kills no trainer"),
    ("look for a stall", 4, "rollout.stall_timeout_seconds", "a replica is looked at before it is judged"),
    ("rollout.stall_timeout_seconds", 1, "weights.timeout_seconds", "a stall ends an update before its time"),
    ("run.health_timeout_seconds", 1, "rollout.stall_timeout_seconds", "a dead process is not a slow one"),
    ("run.health_timeout_seconds", 1, "evaluator's silence", "it is started again before it is given up"),
    ("silence of a broadcast's member", 2, "weights.timeout_seconds", "the others go on without it in time"),
    ("weights.timeout_seconds", 2, "root of the chain", "an update fails, and its repetition, by itself"),
    ("request to a teacher", 2, "root of the chain", "it fails, and its repetition, by itself"),
    ("run.health_timeout_seconds", 1, "request to a teacher", "a dead teacher is started again meanwhile"),
    ("evaluator's silence", 1, "root of the chain", "an evaluation is given up by itself"),
    ("long poll of the controller", 1, "long poll of a rank", "a rank gets Wait, not a timeout"),
    ("long poll of a rank", 1, "collective of the ranks", "ranks that wait for one do not time out"),
    ("vote of the ranks", 1, "collective of the ranks", "the same, while a version is on its way"),
    ("long poll of the controller", 2, "silence of the controller", "a poll, a restart, a poll"),
    ("silence of the controller", 1, "event of the trainer", "a poll notices a controller that is gone"),
    ("look for disk space", 2, "silence of the controller", "a full disk is not a dead controller"),
    ("idle connection, client", 2, "idle connection, server", "no request on a connection that is closing"),
    ("probe of /health", 4, "run.health_timeout_seconds", "several probes fail before a kill"),
    ("look for late rollouts", 1, "a wait goes on", "a wait that is looked at keeps its beginning"),
    ("follow addresses", 1, "lease", "an address is known before the next lease ends"),
    ("look at leases", 1, "renew a lease", "none ends unseen"),
    ("renew a lease", 3, "lease", "two renewals may be lost"),
    ("orphans' grace", 1, "guardian", "a guardian ends what is below it in its time"),
    ("trainer's last report", 1, "trainer's share of run.grace_seconds", "it arrives before the kill"),
    ("guardian", 1, "run.grace_seconds", "a stop is over in its time"),
    ("pause before a restart", 1, "run.start_seconds", "a restart is up in its time"),
    ("environment's margin", 1, "run.health_timeout_seconds", "a call fails before the process is killed"),
]
"""Shorter, how often it fits, longer, what for."""


@pytest.mark.parametrize(("shorter", "times", "longer", "reason"), RELATIONS)
def test_limits_of_time_agree(shorter: str, times: int, longer: str, reason: str) -> None:
    assert times * CLOCKS[shorter] <= CLOCKS[longer], reason
