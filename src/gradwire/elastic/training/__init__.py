"""Training loop of an elastic run: steps, shards, gradients, state and checkpoints."""

from gradwire.elastic.training.joining import join
from gradwire.elastic.training.loader import ShardLoader
from gradwire.elastic.training.run import Run
from gradwire.elastic.training.samples import Samples, Shard
from gradwire.elastic.training.step import Step

__all__ = ["Run", "Samples", "Shard", "ShardLoader", "Step", "join"]
