"""Cost model: predictions of communication time from links, messages and backward times."""

from gradwire.cost_model.bursts import Burst, find_burst
from gradwire.cost_model.choose import Choice, choose
from gradwire.cost_model.links import Cluster, Curve, Link, fit_link
from gradwire.cost_model.messages import Collective, Message, collective_seconds
from gradwire.cost_model.timeline import Cost, end_of_step, undisturbed

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
