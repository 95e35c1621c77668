"""Choice of the communication hook for each bucket among the allowed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from gradwire.cost_model.links import Cluster
from gradwire.cost_model.timeline import Cost, end_of_step

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """Predicted best candidates.

    Attributes:
        names: The candidate of each bucket.
        plain_seconds: Predicted end of the step with the first candidate for all buckets.
        seconds: Predicted end of the step with `names`.
    """

    names: tuple[str, ...]
    plain_seconds: float
    seconds: float


def choose(
    ready: Sequence[float],
    candidates: Mapping[str, Sequence[Cost]],
    cluster: Cluster,
    *,
    min_gain: float = 0.0,
    idle: float = inf,
) -> Choice:
    """Return the candidate for each bucket with which the step ends earliest.

    Start from the best candidate for all buckets, then change single buckets as long as the step
    gets shorter. The choice is deterministic.

    Args:
        ready: See `end_of_step`.
        candidates: Costs of each bucket, by candidate; the first candidate is kept if no other
            choice gains enough.
        cluster: See `end_of_step`.
        min_gain: Minimum gain in seconds over the first candidate.
        idle: See `end_of_step`.

    Example:
        >>> from gradwire.cost_model import Link, Message
        >>> plain = Cost(0.0, (Message("all_reduce", 1e6),), single=True)
        >>> small = Cost(0.1, (Message("all_reduce", 1e5),), after=0.1)
        >>> candidates = {"plain": [plain], "small": [small]}
        >>> slow, fast = (Cluster(2, Link(0.0, bandwidth)) for bandwidth in (1e6, 1e8))
        >>> choose([0.0], candidates, slow).names, choose([0.0], candidates, fast).names
        (('small',), ('plain',))
    """
    names = list(candidates)
    plain = [names[0]] * len(ready)

    def seconds(chosen: Sequence[str]) -> float:
        costs = [candidates[name][i] for i, name in enumerate(chosen)]
        return end_of_step(ready, costs, cluster, idle=idle)

    best, end = plain, seconds(plain)
    before = end
    for name in names[1:]:
        if (alike := seconds([name] * len(ready))) < end:
            best, end = [name] * len(ready), alike
    changed = True
    while changed:
        changed = False
        for bucket in range(len(ready)):
            for name in names:
                other = [*best[:bucket], name, *best[bucket + 1 :]]
                if (after := seconds(other)) < end * (1 - 1e-9):
                    best, end, changed = other, after, True
    if before - end <= min_gain:
        best, end = plain, before
    return Choice(tuple(best), before, end)
