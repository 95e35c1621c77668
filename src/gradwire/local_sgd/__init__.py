"""Fewer exchanges: ranks take steps of their own, and average their parameters now and then."""

from gradwire.local_sgd.exchange import assign_fragments, due
from gradwire.local_sgd.outer import LocalSGD, diloco

__all__ = ["LocalSGD", "assign_fragments", "diloco", "due"]
