"""The audit of a record, with what a trainer in memory trained on."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from distill.record.audit import AuditReport, audit_of
from distill.record.reader import open_tables
from student_trainer.ledger import Lineage


def check(folder: Path, lines: Mapping[int, Mapping[int, list[str]]]) -> AuditReport:
    """Audit a run's record against what all ranks trained on: lineage → step after it → ids."""
    with closing(open_tables(folder)) as tables:
        ranks = dict(tables.execute("SELECT number, ranks FROM lineage"))

        def shown(lineage: int, ids: list[str]) -> dict[int, tuple[tuple[str, ...], str]]:
            return {rank: (tuple(ids) if rank == 0 else (), "") for rank in range(ranks.get(lineage, 1))}

        ledger = {
            number: Lineage(shown={step: shown(number, ids) for step, ids in steps.items()})
            for number, steps in lines.items()
        }
        return audit_of(tables, ledger, ledger)
