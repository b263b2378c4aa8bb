"""The figures of metrics.jsonl as Prometheus metrics, whose names and labels follow from the figures' own.

A figure of `NAMES` gets the name there, with its variable words as labels; any other, such as one that only
some objectives have, its own name with "_" between the words. Before each stands "distill_". A name that ends
in "_total" is a counter from the start of this process on; the others are gauges.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Family = CounterMetricFamily | GaugeMetricFamily

NAMES: Final = {
    "busy_seconds/{role}": "busy_seconds_total",
    "dropped/{reason}": "dropped_rollouts_total",
    "eval/{set}/{what}": "eval_set_{what}",
    "requeued/{reason}": "requeued_rollouts_total",
    "reverse_kl/{teacher}": "teacher_reverse_kl",
    "rollouts/late": "late_rollouts_total",
    "seconds/{part}": "step_seconds",
    "sync/updates": "replica_updates_total",
    "sync/versions": "published_versions_total",
    "teachers/{teacher}/{what}": "scoring_{what}_total",
    "tokens/generated": "generated_tokens_total",
    "tokens/generated_by_teacher": "generated_by_teacher_tokens_total",
    "trainer_starts": "trainer_starts_total",
    "waited_seconds/{role}/{on}": "waited_seconds_total",
}
"""Pattern of a figure → metric. A word in braces is part of the name where the name has it, else a label."""


class Figures(Collector):
    """Reads the figures at every scrape."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        """`read`: name → value. What counters hold now is from before this process."""
        self._read, self._before = read, dict(read())

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        for figure, value in self._read().items():
            pattern, name, labels = described(figure)
            kind: type[Family] = GaugeMetricFamily
            if name.endswith("_total"):
                kind, value = CounterMetricFamily, value - self._before.get(figure, 0.0)
            family = families.setdefault(name, kind(name, f"{pattern} of metrics.jsonl", labels=[*labels]))
            family.add_metric([*labels.values()], value)
        return families.values()


def described(figure: str) -> tuple[str, str, dict[str, str]]:
    """Pattern, metric and labels of a figure."""
    words = figure.split("/")
    for pattern, name in NAMES.items():
        pairs = list(zip(pattern.split("/"), words, strict=False))
        if pattern.count("/") == figure.count("/") and all(p[0] == "{" or p == word for p, word in pairs):
            variable = {p[1:-1]: word for p, word in pairs if p[0] == "{"}
            labels = {key: word for key, word in variable.items() if f"{{{key}}}" not in name}
            return pattern, f"distill_{name.format(**variable)}", labels
    return figure, f"distill_{re.sub('[^A-Za-z0-9_]', '_', figure)}", {}
