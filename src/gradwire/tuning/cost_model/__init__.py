"""Cost model: predictions of communication time from links, messages and backward times."""

from gradwire.hooks import Collective, Message
from gradwire.tuning.cost_model.links import (
    Burst,
    Cluster,
    Curve,
    Link,
    collective_seconds,
    find_burst,
    fit_link,
)
from gradwire.tuning.cost_model.timeline import Choice, Cost, choose, end_of_step, undisturbed

__all__ = [
    "Burst",
    "Choice",
    "Cluster",
    "Collective",
    "Cost",
    "Curve",
    "Link",
    "Message",
    "choose",
    "collective_seconds",
    "end_of_step",
    "find_burst",
    "fit_link",
    "undisturbed",
]
