"""Former name of `gradwire.tuning.cost_model`."""

from gradwire.tuning.cost_model import *  # noqa: F403
from gradwire.tuning.cost_model import __all__ as __all__
