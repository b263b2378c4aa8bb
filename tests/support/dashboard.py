"""What the Grafana dashboard reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

FILE = Path(__file__).parents[2] / "configs/grafana.json"
OCCASIONAL = {
    *("distill_run_rollout_dropped_total", "distill_run_rollout_requeued_total"),
    "distill_run_train_mismatch_kl",
}
"""What a healthy run need not show: faults, and a figure of tokens of age 0, which a step may not have."""


def metrics() -> set[str]:
    """Names of the metrics in its queries."""
    panels = json.loads(FILE.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return {name for query in queries for name in re.findall(r"([a-z_:]+)\{", query)}
