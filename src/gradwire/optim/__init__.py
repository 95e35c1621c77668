"""Optimizers for replicated models: `ShardedOptimizer` divides step and state over the ranks."""

from gradwire.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
