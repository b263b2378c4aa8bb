"""The audit finds each planted breach in a run's record and in its ledgers, and nothing in a sound run."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_record import LEDGER, WEIGHTED, ledgers, record

from distill.record.audit import AuditReport, audit
from distill.record.store import Store


def audited(folder: Path, change: str = "", trained: dict[int, dict[int, list[str]]] = LEDGER) -> AuditReport:
    db = record(folder)
    db.executescript(f"PRAGMA foreign_keys = OFF; {change}")
    ledgers(folder, trained)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    report = audit(folder)
    assert before == {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return report


def test_a_sound_run_passes(tmp_path: Path) -> None:
    report = audited(tmp_path)
    assert report.violations == {}
    assert (report.prompts, report.scored, report.trained, report.tokens) == (8, 7, 6, 14)
    assert (report.open_prompts, report.dropped, report.oldest) == (["h"], {"too_old": 1}, 1)
    assert (report.again, report.differing) == (1, [])


def test_a_run_that_has_only_begun_passes(tmp_path: Path) -> None:
    """Its servers start and are checked, and nothing is committed yet."""
    Store(tmp_path).close()
    assert audit(tmp_path).ok


def third_step(*ids: str) -> dict[int, dict[int, list[str]]]:
    return {**LEDGER, 1: {2: ["c", "d"], 3: [*ids]}}


OTHERWISE = {"not_as_batched": ["L001-v00000003"]}


@pytest.mark.parametrize(
    ("trained", "violations"),
    [
        ({**LEDGER, 1: {2: ["c", "d"]}}, {"missing_in_ledger": ["L001-v00000003 of rank 0"]}),
        ({0: LEDGER[0]}, {"missing_in_ledger": ["L001-v00000002 to L001-v00000003 of rank 0"]}),
        (third_step("a", "e"), {"trained_twice": ["a"], **OTHERWISE, "too_old": ["a"]}),
        (third_step("e"), OTHERWISE),
        (third_step("e", "f", "g"), OTHERWISE),
        (third_step("e", "zz"), {**OTHERWISE, "not_on_record": ["zz"]}),
    ],
)
def test_what_the_ranks_did_otherwise_is_found(
    tmp_path: Path, trained: dict[int, dict[int, list[str]]], violations: dict[str, list[str]]
) -> None:
    assert audited(tmp_path, trained=trained).violations == violations


def test_a_step_that_a_crash_cut_off_may_be_half_in_the_ledger_unless_it_was_reported(tmp_path: Path) -> None:
    half = {**LEDGER, 0: {1: ["a", "b"], 2: ["c"]}}
    for name, reported in {"cut": "DELETE FROM step WHERE lineage = 0 AND step = 2", "whole": ""}.items():
        (tmp_path / name).mkdir()
        violations = {} if reported else {"not_as_batched": ["L000-v00000002"]}
        assert audited(tmp_path / name, reported, half).violations == violations


def test_late_rollouts_up_to_the_hard_limit_pass_with_the_weight_of_their_age(tmp_path: Path) -> None:
    late = f"UPDATE batch SET max_staleness = 0, half_life = 2.0; {WEIGHTED} WHERE (lineage, step) <> (0, 0)"
    for name, weight in {"right": 2**-0.5, "another": 0.5}.items():
        (tmp_path / name).mkdir()
        report = audited(tmp_path / name, late.format(weight))
        assert report.violations == ({} if name == "right" else {"wrong_weight": ["c", "d", "e", "f"]})
        assert report.late == 4


def test_of_earlier_ends_only_weights_that_differed_count(tmp_path: Path) -> None:
    ends = """INSERT INTO conclusion VALUES (60, 0, 2, '{"r0": false}', '["other weights"]'),
        (61, NULL, NULL, '{"r0": null}', '["it was away"]'), (62, 1, 3, '{"r0": true}', '[]')"""
    assert audited(tmp_path, ends).violations == {"unproven": ["other weights"]}


OTHER_RUN = """UPDATE rollout_row SET spans = '[[0, 120, 0]]' WHERE id = 'e'"""
CHANGES: dict[str, dict[str, list[str]]] = {
    "DELETE FROM rollout_row WHERE id = 'h'": {},  # the newest of all may not be on disk yet
    "DELETE FROM rollout_row WHERE id = 'g'": {"record_damaged": ["rollouts 6 to 6"]},
    "DELETE FROM rollout_row WHERE id IN ('c', 'd')": {
        "record_damaged": [
            "the rows of the run contradict each other (KeyError(2)): restore run.db from a copy, or start a "
            "new run",
            *("rollouts 2 to 3", "rollout row 2 of the batch of L000-v00000001"),
            "rollout row 3 of the batch of L000-v00000001",
        ],
        "not_as_batched": ["L000-v00000002", "L001-v00000002"],
        "not_on_record": ["c", "d", "c", "d"],
    },
    "UPDATE batch SET members = '[[5, 1]]' WHERE lineage = 1": {"lost": ["e"], **OTHERWISE},
    "DELETE FROM opening": {"record_damaged": ["no start of a controller"]},
    "UPDATE batch SET hard_limit = 0 WHERE lineage = 1": {"too_old": ["f", "e"]},
    "UPDATE batch SET members = '[[4, 1], [5, 1, 0.5]]' WHERE lineage = 1": {"wrong_weight": ["f"]},
    OTHER_RUN: {"impossible_version": ["e"]},
    OTHER_RUN.replace("0, 120", "3, 1"): {"impossible_version": ["e"], "too_old": ["e"]},
    "UPDATE rollout_row SET by_teacher = 1, spans = NULL WHERE id = 'e'": {"wrong_generator": ["e"]},
    "UPDATE rollout_row SET own_tokens = 3 WHERE id = 'e'": OTHERWISE,
    "INSERT INTO version VALUES (50, 7, 3, 'full', 1, 1, 0.0)": {"unknown_version": ["lineage 7"]},
    "INSERT INTO step (lineage, step) VALUES (1, 1000000000000)": {
        "missing_in_ledger": ["L001-v00000004 to L001-v1000000000000 of rank 0"]
    },
    """INSERT INTO conclusion VALUES (60, 1, 3, '{"r0": false}', '["other"]')""": {"unproven": ["other"]},
    "UPDATE rollout_row SET id = 'h' WHERE id = 'g'": {"issued_twice": ["h"], "impossible_version": ["h"]},
    "UPDATE lineage SET ranks = 2 WHERE number = 0": {
        "missing_in_ledger": ["L000-v00000001 to L000-v00000002 of rank 1"]
    },
    "UPDATE lineage SET start = 0 WHERE number = 1": {
        "ledger_damaged": [
            "ledger of lineage 1 begins at step 1 from L000-v00000001; "
            "on record is step 0 from L000-v00000001"
        ],
        "missing_in_ledger": ["L001-v00000001 of rank 0"],
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_record_does_not_hold_or_holds_otherwise_is_found(tmp_path: Path, change: str) -> None:
    assert audited(tmp_path, change).violations == CHANGES[change]
