"""A hook that measures, and then takes what is fastest of what it may; or nothing."""

from gradwire.hooks.auto.hook import Auto, auto
from gradwire.hooks.auto.measure import measure_cluster

__all__ = ["Auto", "auto", "measure_cluster"]
