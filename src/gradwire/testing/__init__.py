"""Tools to test code that runs on several ranks."""

from gradwire.testing.failures import RankError
from gradwire.testing.ranks import run_ranks

__all__ = ["RankError", "run_ranks"]
