"""Elastic data parallelism: training that goes on whichever of its processes die."""

from gradwire.elastic.joining import join
from gradwire.elastic.loader import ShardLoader
from gradwire.elastic.run import Run
from gradwire.elastic.samples import Samples
from gradwire.elastic.shards import Shard
from gradwire.elastic.step import Step
from gradwire.elastic.supervise import serve_store, supervise

__all__ = ["Run", "Samples", "Shard", "ShardLoader", "Step", "join", "serve_store", "supervise"]
