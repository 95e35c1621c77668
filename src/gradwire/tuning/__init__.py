"""Choice of communication hooks by measurement and prediction (provisional).

`hooks.auto` finds this package by name, and the command `gradwire plan` runs it. No other package
imports it.
"""

from gradwire.tuning.hook import Auto, auto
from gradwire.tuning.measure import measure_cluster

__all__ = ["Auto", "auto", "measure_cluster"]
