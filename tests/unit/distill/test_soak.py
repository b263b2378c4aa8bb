"""A long run in small: whatever grew with the rollouts would show here, counted in objects and bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median

import pytest

from distill.bench.soak import MIB, Blocks, Size, Usage, soak
from distill.run_log.audit import AuditReport, audit
from distill.run_log.journal import Journal
from distill.run_log.records import Rollout, Snapshot

SIZE = Size(rollouts=6_400, batch=64, tokens=8, width=0, checkpoint_every=7)
"""Samples are taken every 10 steps: few of them meet a checkpoint."""
INTERVAL = SIZE.batch * SIZE.checkpoint_every
"""Rollouts between two checkpoints."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak")


@pytest.fixture(scope="module")
def usages(folder: Path) -> list[Usage]:
    return asyncio.run(soak(folder, SIZE, Blocks(), segment_bytes=MIB // 4))


@pytest.fixture(scope="module")
def report(folder: Path, usages: list[Usage]) -> AuditReport:
    return audit(folder)


def test_the_controllers_memory_does_not_grow_with_the_rollouts(usages: list[Usage]) -> None:
    """Medians, as a sample may fall into the encoding of a snapshot."""
    early, late = (median(one.objects for one in half) for half in (usages[1:5], usages[5:]))
    assert late - early < (usages[-1].rollouts - usages[1].rollouts) / 4, "a quarter of an object a rollout"


def test_the_journal_that_a_restart_needs_does_not_grow(usages: list[Usage]) -> None:
    assert max(one.journal_mib for one in usages[5:]) < 2 * max(one.journal_mib for one in usages[1:5])


def test_what_stays_of_a_rollout_is_some_bytes(usages: list[Usage]) -> None:
    first, last = usages[1], usages[-1]
    rollouts = last.rollouts - first.rollouts
    assert (last.archive_mib - first.archive_mib) * MIB < 32 * rollouts
    assert (last.others_mib - first.others_mib) * MIB < 96 * rollouts


def test_a_restart_replays_what_came_after_the_oldest_kept_checkpoint(
    folder: Path, usages: list[Usage]
) -> None:
    records = [record for _, record in Journal(folder / "journal").replay()]
    assert isinstance(records[0], Snapshot)
    assert sum(isinstance(record, Rollout) for record in records) <= 3 * INTERVAL


def test_the_audit_still_proves_all_of_the_run(report: AuditReport) -> None:
    assert report.ok, report
    assert report.trained == SIZE.rollouts


def test_hidden_states_of_any_width_are_trained_on(tmp_path: Path) -> None:
    wide = Size(rollouts=64, batch=32, tokens=8, width=16, checkpoint_every=1)
    usages = asyncio.run(soak(tmp_path, wide, Blocks()))
    assert usages[-1].rollouts == wide.rollouts
