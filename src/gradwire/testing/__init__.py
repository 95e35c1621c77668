"""Tools to test code that runs on several ranks, and hooks without any."""

from gradwire.testing.failures import RankError
from gradwire.testing.fake_bucket import FakeBucket
from gradwire.testing.ranks import run_ranks

__all__ = ["FakeBucket", "RankError", "run_ranks"]
