"""Elastic data parallelism: training that goes on whichever of its processes die."""

from gradwire.elastic.run import Run, join
from gradwire.elastic.samples import Samples
from gradwire.elastic.shards import Shard
from gradwire.elastic.step import Step

__all__ = ["Run", "Samples", "Shard", "Step", "join"]
