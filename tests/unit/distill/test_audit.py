"""The audit finds each planted breach, and nothing in a sound run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from audited import check

from distill.prompts.stream import Prompt
from distill.record.audit import AuditReport, audit
from distill.run_log.journal import Journal
from distill.run_log.records import (
    BatchFormed,
    Checkpointed,
    Concluded,
    Dropped,
    Issued,
    LineageOpened,
    Location,
    Opened,
    Record,
    Rollout,
    Stepped,
    VersionPublished,
    compacted,
)
from student_trainer.ledger import Ledger
from sync.wire import Scored, Version, VersionSpan, pack


def rollout(name: str, version: Version) -> Rollout:
    values, ids = pack(np.zeros(2, "f4")), pack(np.zeros(2, "i4"))
    return Rollout(name, 0, ids, ids, values, [VersionSpan(version, 0, 2)], False, "t", Scored(name, values))


def journal() -> list[Record]:
    """Steps 0 and 1 of lineage 0; lineage 1 resumes at 1, replays step 1 and makes step 2."""
    prompts = [Prompt(name, [1]) for name in "abcdefgh"]
    return [
        Opened("r", 0, 2, 1),
        LineageOpened(0, None, 0, None, 0, "m"),
        Issued(prompts, 0, 8),
        *(rollout(name, Version(0, 0)) for name in "abcd"),
        BatchFormed(Version(0, 0), ["a", "b"]),
        BatchFormed(Version(0, 1), ["c", "d"]),
        Checkpointed(Version(0, 1), "x"),
        LineageOpened(1, Version(0, 1), 1, 0, 2, "m"),
        VersionPublished(Version(0, 1), "delta", 1, 1, 0.0),
        *(rollout(name, Version(0, 1)) for name in "efg"),
        BatchFormed(Version(1, 2), ["e", "f"]),
        Dropped(["g"], "too_old", 0),
    ]


LEDGER = {0: {1: ["a", "b"], 2: ["d", "c"]}, 1: {2: ["c", "d"], 3: ["f", "e"]}}


def audited(records: list[Record], ledger: dict[int, dict[int, list[str]]] = LEDGER) -> AuditReport:
    return check(((Location(0, i), record) for i, record in enumerate(records)), ledger)


def test_a_sound_run_passes() -> None:
    report = audited(journal())
    assert report.ok
    assert (report.prompts, report.scored, report.trained) == (8, 7, 6)
    assert report.open_prompts == ["h"]
    assert report.dropped == {"too_old": 1}
    assert report.oldest == 1


def test_a_rollout_trained_twice_along_the_ancestry_is_found() -> None:
    report = audited(journal(), {**LEDGER, 1: {2: ["c", "d"], 3: ["a", "e"]}})
    assert report.violations["trained_twice"] == ["a"]
    assert report.violations["not_as_batched"] == ["L001-v00000003"]
    assert not report.ok


def test_a_step_left_behind_by_the_branch_is_not_twice() -> None:
    assert audited(journal(), {**LEDGER, 0: {1: ["a", "b"], 2: ["c", "d"]}}).ok


def test_a_step_that_a_crash_cut_off_may_be_half_recorded() -> None:
    half = {**LEDGER, 0: {1: ["a", "b"], 2: ["c"]}}
    assert audited(journal(), half).ok
    reported = [*journal(), Stepped(Version(0, 2))]
    assert audited(reported, half).violations["not_as_batched"] == ["L000-v00000002"]


def test_a_batch_that_the_journal_does_not_know_is_found() -> None:
    records = [r for r in journal() if not (isinstance(r, BatchFormed) and r.version == Version(0, 1))]
    assert audited(records).violations["not_as_batched"] == ["L000-v00000002", "L001-v00000002"]


def test_a_rollout_that_is_nowhere_is_found() -> None:
    """Its batch was left behind by a branch, and its arrays were given up before."""
    records = [compacted(record) for record in journal()]
    records[10], records[15] = (
        LineageOpened(1, Version(0, 1), 1, 0, 1, "m"),
        BatchFormed(Version(1, 1), ["e", "f"]),
    )
    assert audited(records, {0: LEDGER[0], 1: {2: ["e", "f"]}}).violations["lost"] == ["c", "d"]


def test_a_rollout_older_than_the_bound_is_found() -> None:
    records = [Opened("r", 0, 2, 0), *journal()[1:]]
    assert set(audited(records).violations["too_old"]) == {"c", "d", "e", "f"}


def late(*weights: float) -> list[Record]:
    """`journal` under freshness weights; its last batch, of age 1, carries `weights`."""
    records = [Opened("r", 0, 2, 0, 1, 2.0), *journal()[1:]]
    halved = 2 ** (-1 / 2)
    for place, version in enumerate([Version(0, 0), Version(0, 1), Version(1, 2)]):
        at = next(i for i, r in enumerate(records) if isinstance(r, BatchFormed) and r.version == version)
        given = [[], [halved, halved], list(weights)][place]
        records[at] = BatchFormed(version, records[at].ids, given)  # type: ignore[union-attr]
    return records


def test_late_rollouts_up_to_the_hard_limit_pass_with_the_weight_of_their_age() -> None:
    report = audited(late(2**-0.5, 2**-0.5))
    assert report.ok
    assert (report.late, report.oldest) == (4, 1)


def test_a_weight_that_is_not_that_of_the_age_is_found() -> None:
    assert audited(late()).violations["wrong_weight"] == ["e", "f"]
    report = audited(late(2**-0.5, 1.0))
    assert report.violations["wrong_weight"] == ["f"]
    assert not report.ok


def test_beyond_the_hard_limit_no_weight_helps() -> None:
    records = [Opened("r", 0, 2, 0, 0, 2.0), *late(2**-0.5, 2**-0.5)[1:]]
    assert set(audited(records).violations["too_old"]) == {"c", "d", "e", "f"}


@pytest.mark.parametrize("version", [Version(0, 120), Version(3, 1), Version(1, 2)])
def test_a_rollout_of_a_version_that_was_not_published_then_is_found(version: Version) -> None:
    records = journal()
    at = next(i for i, r in enumerate(records) if isinstance(r, Rollout) and r.id == "e")
    records[at] = rollout("e", version)
    report = audited([*records, VersionPublished(Version(1, 2), "delta", 1, 1, 0.0)])
    assert report.violations["impossible_version"] == ["e"]
    assert not report.ok


def test_what_the_end_of_a_run_does_not_show_is_found() -> None:
    whole, away = Concluded(Version(1, 3), {"r0": True}, []), Concluded(None, {"r0": None}, ["it was away"])
    other = Concluded(Version(0, 2), {"r0": False}, ["other weights"])
    assert audited([*journal(), whole]).ok
    report = audited([*journal(), away])
    assert report.violations["unproven"] == ["it was away"]
    assert not report.ok
    assert audited([*journal(), away, whole]).ok
    assert audited([*journal(), other, whole]).violations["unproven"] == ["other weights"]


def test_a_rollout_without_a_record_is_found() -> None:
    report = audited(journal(), {**LEDGER, 1: {2: ["c", "d"], 3: ["zz", "e"]}})
    assert report.violations["not_in_journal"] == ["zz"]


def test_a_journal_without_a_beginning_is_refused() -> None:
    (found,) = audited(journal()[1:]).violations["journal_damaged"]
    assert "does not begin with the opening of a run" in found
    assert audited([]).violations == {"journal_damaged": ["the journal is empty or missing"]}


async def test_a_runs_folder_is_audited(tmp_path: Path) -> None:
    writer = Journal(tmp_path / "journal", "never")
    list(writer.replay())
    for record in journal():
        writer.append(record)
    await writer.commit()
    writer.close()
    for lineage, steps in LEDGER.items():
        start, parent = (Version(0, 0), None) if lineage == 0 else (Version(1, 1), Version(0, 1))
        lines = Ledger(tmp_path / "ledger", start, parent, rank=0)
        for step, ids in steps.items():
            lines.record(step, sorted(ids), f"bits {lineage if step == 3 else step}")
    report = audit(tmp_path)
    assert report.ok
    assert (report.again, report.differing) == (1, [])
    assert report.trained == 6


def test_a_generator_other_than_the_one_that_was_issued_is_found() -> None:
    records = journal()
    place = next(i for i, record in enumerate(records) if isinstance(record, Issued))
    records[place] = Issued(records[place].prompts, 0, 8, [0])  # type: ignore[union-attr]
    assert audited(records).violations["wrong_generator"] == ["a"]
