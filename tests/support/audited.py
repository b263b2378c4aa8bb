"""The audit of records in memory."""

from collections.abc import Mapping

from distill.record.audit import AuditReport, audit_of
from distill.record.facts import Records
from distill.run_log.records import LineageOpened
from student_trainer.ledger import Lineage


def check(records: Records, lines: Mapping[int, Mapping[int, list[str]]]) -> AuditReport:
    """Audit records against what all ranks trained on: lineage → step after it → ids."""
    records = list(records)
    ranks = max((one.ranks for _, one in records if isinstance(one, LineageOpened)), default=1)

    def shown(ids: list[str]) -> dict[int, tuple[tuple[str, ...], str]]:
        return {rank: (tuple(ids) if rank == 0 else (), "") for rank in range(ranks)}

    ledger = {n: Lineage(shown={step: shown(ids) for step, ids in one.items()}) for n, one in lines.items()}
    return audit_of(records, ledger, lambda: ledger)
