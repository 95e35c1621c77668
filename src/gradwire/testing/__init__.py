"""Tools to test code that runs on several ranks, and hooks without any."""

from gradwire.testing.fake_bucket import FakeBucket
from gradwire.testing.gradcheck import GradientError, adjoint_check, gradcheck
from gradwire.testing.ranks import RankError, run_ranks

__all__ = ["FakeBucket", "GradientError", "RankError", "adjoint_check", "gradcheck", "run_ranks"]
