"""A long run in small: whatever grew with the rollouts would show here, counted in objects and bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from distill.bench.soak import MIB, Blocks, Mark, Size, soak
from distill.run_log.audit import AuditReport, audit
from distill.run_log.journal import Journal
from distill.run_log.records import Rollout, Snapshot

SIZE = Size(rollouts=6_400, batch=64, tokens=8, width=0, checkpoint_every=10)
INTERVAL = SIZE.batch * SIZE.checkpoint_every
"""Rollouts between two checkpoints."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak")


@pytest.fixture(scope="module")
def marks(folder: Path) -> list[Mark]:
    return asyncio.run(soak(folder, SIZE, Blocks(), segment_bytes=MIB // 4))


@pytest.fixture(scope="module")
def report(folder: Path, marks: list[Mark]) -> AuditReport:
    return audit(folder)


def test_the_controllers_memory_does_not_grow_with_the_rollouts(marks: list[Mark]) -> None:
    grown = max(mark.objects for mark in marks[5:]) - min(mark.objects for mark in marks[1:5])
    assert grown < (marks[-1].rollouts - marks[1].rollouts), "less than an object a rollout"


def test_the_journal_that_a_restart_needs_does_not_grow(marks: list[Mark]) -> None:
    assert max(mark.journal_mib for mark in marks[5:]) < 2 * max(mark.journal_mib for mark in marks[1:5])


def test_what_stays_of_a_rollout_is_some_bytes(marks: list[Mark]) -> None:
    first, last = marks[1], marks[-1]
    rollouts = last.rollouts - first.rollouts
    assert (last.archive_mib - first.archive_mib) * MIB < 32 * rollouts
    assert (last.others_mib - first.others_mib) * MIB < 96 * rollouts


def test_a_restart_replays_what_came_after_the_oldest_kept_checkpoint(
    folder: Path, marks: list[Mark]
) -> None:
    records = [record for _, record in Journal(folder / "journal").replay()]
    assert isinstance(records[0], Snapshot)
    assert sum(isinstance(record, Rollout) for record in records) <= 3 * INTERVAL


def test_the_audit_still_proves_all_of_the_run(report: AuditReport) -> None:
    assert report.ok, report
    assert report.trained == SIZE.rollouts
