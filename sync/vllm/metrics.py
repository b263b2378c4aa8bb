"""Metrics of a replica's weights, in prometheus_client's default registry: vLLM's /metrics shows them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Summary

from sync.wire import UpdateReply

_lineage = Gauge("distill_replica_version_lineage", "Lineage of the version that is served")
_step = Gauge("distill_replica_version_step", "Step of the version that is served; 0: the model folder")
_bytes_read = Counter("distill_replica_read_bytes", "Read from the store, or received, for updates")
_stage_seconds = Summary("distill_replica_stage_seconds", "Staging of a version, during generation")
_pause_seconds = Summary("distill_replica_pause_seconds", "Pause of generation by a swap")
_apply_seconds = Summary("distill_replica_apply_seconds", "Loading of a version, part of the pause")
refused = Counter("distill_replica_refused_updates", "Updates after which the old version is served")


def updated(reply: UpdateReply) -> None:
    """Count an update that changed the version."""
    _lineage.set(reply.version.lineage)
    _step.set(reply.version.step)
    _bytes_read.inc(reply.bytes_read)
    _stage_seconds.observe(reply.stage_seconds)
    _pause_seconds.observe(reply.pause_seconds)
    _apply_seconds.observe(reply.apply_seconds)
