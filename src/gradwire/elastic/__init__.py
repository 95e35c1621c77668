"""Elastic data parallelism: training that continues when processes are killed or join."""

from gradwire.elastic.members import serve_store, supervise
from gradwire.elastic.training import Run, Samples, Shard, ShardLoader, Step, join

__all__ = ["Run", "Samples", "Shard", "ShardLoader", "Step", "join", "serve_store", "supervise"]
