"""The figures of a run as Prometheus metrics: `distill_run_` and the figure's name, "_" between its words.

    rollout/issued            counter   distill_run_rollout_issued_total
    rollout/dropped/REASON    counter   distill_run_rollout_dropped_total{reason="…"}
    buffer/age_mean           gauge     distill_run_buffer_age_mean

Words in capitals become labels. What only rises is a counter from the start of this process on, so that a
resume shows no jump.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from distill.metrics.names import FIGURES, Figure

Family = CounterMetricFamily | GaugeMetricFamily

COUNTERS: Final = (
    *("rollout/issued", "rollout/scored", "rollout/batched", "rollout/late", "rollout/tokens_total"),
    *("rollout/tokens_total_by_teacher", "rollout/dropped/", "rollout/dropped_tokens/", "rollout/requeued/"),
    *("teacher/", "train/starts", "sync/versions", "sync/updates", "perf/busy_seconds/"),
    *("perf/idle_seconds/", "perf/waited_seconds/", "rollout/environment_tokens"),
)
"""Figures that only rise, or how their names begin; a rollback takes trained tokens back."""
_LABELS: Final = {"NAME": "teacher"}
_OWN_NAMES: Final = {
    "train/reverse_kl/NAME": "train_reverse_kl_by_teacher",  # a metric has the same labels everywhere
    "train/tokens_total": "train_tokens_overall",  # "_total" is for counters
    "train/tokens_total_by_teacher": "train_tokens_overall_by_teacher",
}


class Metric(NamedTuple):
    """What a figure is called in Prometheus; a counter's name gets "_total" from the client library."""

    name: str
    labels: dict[str, str]
    counter: bool
    meaning: str


class Figures(Collector):
    """Reads the figures at every scrape."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        """`read`: name → value. What counters hold now is from before this process."""
        self._read, self._before = read, dict(read())

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        for figure, value in self._read().items():
            row = metric(figure)
            kind: type[Family] = CounterMetricFamily if row.counter else GaugeMetricFamily
            family = families.get(row.name) or kind(row.name, row.meaning, labels=[*row.labels])
            since = self._before.get(figure, 0.0) if row.counter else 0.0
            family.add_metric([*row.labels.values()], value - since)
            families[row.name] = family
        return families.values()


@cache
def metric(figure: str) -> Metric:
    """The metric of a figure; one without a row in `FIGURES`, such as an objective's own, has no labels."""
    row = next(
        (candidate for candidate in FIGURES if candidate.names(figure)),
        Figure(figure, "–", "see metrics.jsonl"),
    )
    pattern = row.name
    pairs = list(zip(pattern.split("/"), figure.split("/"), strict=True))
    words = [fixed for fixed, _ in pairs if not fixed.isupper()]
    labels = {_LABELS.get(fixed, fixed.lower()): word for fixed, word in pairs if fixed.isupper()}
    counter = figure.startswith(COUNTERS)
    name = _OWN_NAMES.get(pattern, "_".join(words))
    name = name.replace("_total", "") if counter else name
    name = f"distill_run_{re.sub('[^A-Za-z0-9_]', '_', name)}"
    return Metric(name, labels, counter, f"{row.meaning} ({row.unit})")
