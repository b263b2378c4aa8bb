"""Prometheus metrics of one teacher process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Counters of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"teacher_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "Answers by HTTP status", ("status",))
        self.sequences = counter("sequences", "Sequences marked")
        self.refused = counter("refused_sequences", "Sequences that could not be marked")
        self.tokens = counter("tokens", "Tokens computed, prompt and completion")
        self.positions = counter("positions", "Positions marked")
        self.written = counter("written_tokens", "Completion tokens written")
        self.dropped = counter(
            "dropped_sequences", "Sequences and prompts not computed because nobody waited any more"
        )
        self.busy = counter("busy_seconds", "Time the engine computed")
        self.held_tokens = Gauge(
            "teacher_held_tokens", "Tokens waiting or not yet answered", registry=registry
        )
        self.latency = Histogram("teacher_request_seconds", "From arrival to answer", registry=registry)

    def batch(self, sequences: int, tokens: int, positions: int, seconds: float) -> None:
        """Note one batch."""
        self.sequences.inc(sequences)
        self.tokens.inc(tokens)
        self.positions.inc(positions)
        self.busy.inc(seconds)
