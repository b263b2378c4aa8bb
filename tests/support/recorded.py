"""What a run's rows say happened, as records."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from distill.record import records as r
from distill.record.records import Record
from distill.record.rollout import Location, Rollout
from distill.record.store import RECORD, Store, open_read_only
from sync.wire import EvalReport, Version


def _version(lineage: int | None, step: int | None) -> Version | None:
    return None if lineage is None or step is None else Version(lineage, step)


def records_of(folder: Path) -> list[Record]:
    """Those of each kind in their order; scored rollouts whole, also where they were dropped later."""
    with closing(open_read_only(folder / RECORD)) as tables:
        return list(_records(folder, tables.execute))


def _records(folder: Path, ask) -> Iterator[Record]:  # type: ignore[no-untyped-def]
    for row in ask(
        "SELECT run, seed, batch, max_staleness, hard_limit, half_life, completions, per_prompt, prompts, "
        "id, supervised FROM opening ORDER BY at"
    ):
        yield r.Opened(*row)
    store = Store(folder, "never")
    for *place, _ in ask(
        "SELECT file, start, size, crc, place, scored FROM rollout WHERE scored ORDER BY scored"
    ).fetchall():
        if (folder / "arrays" / f"{place[0]:08d}.bin").exists():
            rollout = store.read(Location(*place))
            assert isinstance(rollout, Rollout)
            yield rollout
    store.close()
    requeued = defaultdict(list)
    for at, rollout, reason in ask("SELECT at, rollout, reason FROM requeue"):
        requeued[at, reason].append(rollout)
    yield from (r.Requeued(ids, reason) for (_, reason), ids in requeued.items())
    for rollout, reason, detail in ask(
        "SELECT id, reason, detail FROM rollout WHERE status = 'dropped' ORDER BY number"
    ):
        yield r.Dropped([rollout], reason, 0, detail)
    for number, lineage, step, start, origin, branch, ranks, fingerprint in ask(
        "SELECT number, from_lineage, from_step, start, origin, branch, ranks, fingerprint FROM lineage"
    ):
        yield r.LineageOpened(
            number, _version(lineage, step), start, origin, branch, fingerprint, ranks=ranks
        )
    for lineage, step in ask("SELECT lineage, step FROM batch ORDER BY rowid").fetchall():
        members = ask(
            "SELECT rollout, weight FROM member WHERE lineage = ? AND step = ? ORDER BY place",
            (lineage, step),
        ).fetchall()
        weights = [weight for _, weight in members]
        yield r.BatchFormed(
            Version(lineage, step), [id for id, _ in members], weights if min(weights) < 1 else []
        )
    for version in ask("SELECT lineage, step FROM step ORDER BY rowid"):
        yield r.Stepped(Version(*version))
    for lineage, step, *rest in ask(
        "SELECT lineage, step, kind, bytes, full_bytes, seconds FROM version ORDER BY at"
    ):
        yield r.VersionPublished(Version(lineage, step), *rest)
    for replica, lineage, step, *rest in ask(
        "SELECT replica, lineage, step, bytes, stage_seconds, pause_seconds, apply_seconds, seconds FROM "
        "applied ORDER BY at"
    ):
        yield r.VersionApplied(replica, Version(lineage, step), *rest)
    for lineage, step, path in ask("SELECT lineage, step, path FROM checkpoint ORDER BY at"):
        yield r.Checkpointed(Version(lineage, step), path)
    for lineage, step, problem, without in ask(
        "SELECT lineage, step, problem, without FROM rolled_back ORDER BY at"
    ):
        yield r.RolledBack(_version(lineage, step), json.loads(without), problem)
    for (report,) in ask("SELECT report FROM evaluation ORDER BY at"):
        yield r.Evaluated(msgspec.json.decode(report, type=EvalReport))
    for lineage, step, weights, problems in ask(
        "SELECT lineage, step, weights, problems FROM conclusion ORDER BY at"
    ):
        yield r.Concluded(_version(lineage, step), json.loads(weights), json.loads(problems))
