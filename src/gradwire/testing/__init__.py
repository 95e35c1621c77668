"""Tools to test code that runs on several ranks, and hooks without any."""

from gradwire.testing.adjoint_check import adjoint_check
from gradwire.testing.fake_bucket import FakeBucket
from gradwire.testing.gradcheck import gradcheck
from gradwire.testing.ranks import run_ranks
from gradwire.testing.report import GradientError
from gradwire.testing.run import RankError

__all__ = ["FakeBucket", "GradientError", "RankError", "adjoint_check", "gradcheck", "run_ranks"]
