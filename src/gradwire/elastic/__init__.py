"""Elastic data parallelism: training that continues when processes are killed or join."""

from gradwire.elastic.loader import ShardLoader
from gradwire.elastic.shards import Samples, Shard
from gradwire.elastic.steps import Run, Step, join
from gradwire.elastic.supervisor import serve_store, supervise

__all__ = ["Run", "Samples", "Shard", "ShardLoader", "Step", "join", "serve_store", "supervise"]
