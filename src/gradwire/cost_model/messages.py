"""Time of a collective: the sum of its steps over the link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradwire.cost_model.links import Cluster

__all__ = ["Collective", "Message", "collective_seconds"]

Collective: TypeAlias = Literal["all_reduce", "all_gather", "all_to_all"]


@dataclass(frozen=True)
class Message:
    """A collective.

    Attributes:
        collective: Name of the collective.
        nbytes: Bytes of a rank's input tensor.
    """

    collective: Collective
    nbytes: float


def collective_seconds(message: Message, cluster: Cluster) -> float:
    """Return the seconds of a collective, measured or predicted for a ring or pairwise exchange.

    Example:
        >>> from gradwire.cost_model import Link
        >>> cluster = Cluster(4, Link(latency=0.0, bandwidth=1e6))
        >>> collective_seconds(Message("all_reduce", 1e6), cluster)  # 2 (W - 1) / W of its bytes
        1.5
    """
    ranks, link = cluster.ranks, cluster.link
    if ranks == 1:
        return 0.0
    if message.collective in cluster.measured:
        return cluster.measured[message.collective].seconds(message.nbytes)
    share = message.nbytes / ranks
    steps, each = {
        "all_reduce": (2 * (ranks - 1), share),
        "all_gather": (ranks - 1, message.nbytes),
        "all_to_all": (ranks - 1, share),
    }[message.collective]
    return steps * link.seconds(each)
