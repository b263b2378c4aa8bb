"""Limits of time that must agree across modules, as configured where nothing else is."""

from __future__ import annotations

import pytest

from distill import guardian, registry, waits
from distill.aio import LOOK_SECONDS, look_seconds
from distill.batching import batcher
from distill.config import RolloutConfig, RunConfigSection
from distill.environments import client as environments
from distill.evaluation import schedule
from distill.launch import run, supervise
from distill.rollout import broadcasts
from distill.trainer_api.session import TrainerSession
from student_trainer import controller_client, loop
from student_trainer.config import TrainerSettings
from sync.base import durable
from sync.base.settings import WeightsConfig
from sync.wire import client, peers, server
from teacher_service.client import REQUEST_SECONDS

HEALTH, GRACE, START = (
    RunConfigSection.model_fields[key].default
    for key in ("health_timeout_seconds", "grace_seconds", "start_seconds")
)
STALL = RolloutConfig.model_fields["stall_timeout_seconds"].default
UPDATE = WeightsConfig.model_fields["timeout_seconds"].default
COLLECTIVE = TrainerSettings.model_fields["init_timeout_seconds"].default
LEASE = registry.LEASE_SECONDS
POLL, RANKS_POLL, SILENCE = TrainerSession.poll_seconds, controller_client._POLL_SECONDS, loop._POLL_SECONDS


@pytest.mark.parametrize(
    ("shorter", "times", "longer", "reason"),
    [
        (LOOK_SECONDS, 4, HEALTH, "a stop of the looking process is no stall"),
        (look_seconds(HEALTH), 4, HEALTH, "one heartbeat that is late kills no trainer"),
        (LOOK_SECONDS, 4, STALL, "a replica is looked at before it is judged"),
        (STALL, 1, UPDATE, "a stall ends an update before its time"),
        (HEALTH, 1, STALL, "a dead process is not a slow one"),
        (HEALTH, 1, schedule.STALL_SECONDS, "an evaluator is started again before it is given up"),
        (broadcasts.MEMBER_SECONDS, 2, UPDATE, "the others go on in time without a member that is silent"),
        (UPDATE, 2, waits.ROOT_SECONDS, "an update fails, and its repetition, by itself"),
        (REQUEST_SECONDS, 2, waits.ROOT_SECONDS, "a teacher's request fails, and its repetition, by itself"),
        (HEALTH, 1, REQUEST_SECONDS, "a dead teacher is started again meanwhile"),
        (schedule.STALL_SECONDS, 1, waits.ROOT_SECONDS, "an evaluation is given up by itself"),
        (POLL, 1, RANKS_POLL, "a rank gets Wait, not a timeout"),
        (RANKS_POLL, 1, COLLECTIVE, "ranks that wait for one do not time out"),
        (loop.SETTLE_SECONDS, 1, COLLECTIVE, "the same, while they vote and a version is on its way"),
        (POLL, 2, SILENCE, "a poll, a restart of the controller, a poll"),
        (SILENCE, 1, controller_client._EVENT_SECONDS, "a poll notices a controller that is gone"),
        (durable.RETRY_SECONDS, 2, SILENCE, "a full disk is not a dead controller"),
        (client.IDLE_SECONDS, 2, server.KEEP_ALIVE_SECONDS, "no request on a connection that is closing"),
        (peers.SECONDS, 4, HEALTH, "several probes of /health fail before a kill"),
        (batcher.LATE_POLL_SECONDS, 1, waits.CONTINUED_SECONDS, "a wait for late rollouts has one beginning"),
        (registry.FOLLOW_SECONDS, 1, LEASE, "an address is known before the next lease ends"),
        (guardian.ORPHAN_GRACE_SECONDS, 1, supervise.GUARDIAN_SECONDS, "orphans end in a guardian's time"),
        (controller_client.FINAL_REPORT_SECONDS, 1, run.STOP_SHARE * GRACE, "a report arrives before a kill"),
        (supervise.GUARDIAN_SECONDS, 1, GRACE, "a stop is over in its time"),
        (supervise.LONGEST_PAUSE_SECONDS, 1, START, "a restart is up in its time"),
        (environments.MARGIN_SECONDS, 1, HEALTH, "a call fails before the process is killed"),
    ],
)
def test_limits_of_time_agree(shorter: float, times: int, longer: float, reason: str) -> None:
    assert times * shorter <= longer, reason
