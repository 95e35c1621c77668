"""Choice of communication hooks by measurement and prediction (provisional).

`hooks.auto` finds this package by name, and the command `gradwire plan` runs it. No other package
imports it.
"""

from gradwire.tuning.candidates import PLAIN as PLAIN
from gradwire.tuning.candidates import Candidate as Candidate
from gradwire.tuning.candidates import candidate as candidate
from gradwire.tuning.cost_model import Cluster as Cluster
from gradwire.tuning.cost_model import Link as Link
from gradwire.tuning.hook import Auto, auto
from gradwire.tuning.measure import measure_cluster

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = ["Auto", "auto", "measure_cluster"]
