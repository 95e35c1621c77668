"""A step's time for each link, number of ranks and hook: from a profile and measured hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradwire.cli.plan.profile import Profile
from gradwire.cost_model import Cluster, choose, end_of_step
from gradwire.hooks.auto.candidates import PLAIN, Candidate, Computing, interpolated
from gradwire.hooks.auto.trial import MIN_GAIN

__all__ = ["Row", "Speeds", "measure", "predict"]

FEW, MORE = 2, 8
"""Ranks for which computing is measured; the second where it grows with them, on a line."""


@dataclass(frozen=True)
class Row:
    """One link and number of ranks.

    Attributes:
        mbit: The link's rate, in Mbit/s; None: that of the link that was measured.
        ranks: How many.
        seconds: Of a step, by the hook for all buckets.
        chosen: What `auto` would take: for how many buckets each hook.
        chosen_seconds: Of a step, with that.
    """

    mbit: float | None
    ranks: int
    seconds: Mapping[str, float]
    chosen: Mapping[str, int]
    chosen_seconds: float

    @property
    def pays(self) -> bool:
        """Whether any hook is to be taken."""
        return set(self.chosen) != {PLAIN}


@dataclass(frozen=True)
class Speeds:
    """What each candidate computes for the smallest and the largest bucket."""

    points: Mapping[tuple[str, int], Sequence[tuple[int, Computing]]]

    def of(self, name: str, numel: int, ranks: int) -> Computing:
        """For a bucket of this many elements, and this many ranks."""
        line = [(n, interpolated(p, numel)) for (c, n), p in self.points.items() if c == name]
        return interpolated(line, ranks)


def measure(
    profile: Profile, candidates: Sequence[Candidate], ranks: Sequence[int] = (FEW, MORE)
) -> Speeds:
    """Run each candidate on gradients like the model's, with nothing sent.

    Args:
        profile: The model's.
        candidates: The candidates.
        ranks: As if there were so many; the first alone for those that compute the same for any.
    """
    sizes = [sum(p.numel() for p in bucket) for bucket in profile.buckets]
    chosen = dict.fromkeys((sizes.index(min(sizes)), sizes.index(max(sizes))))
    with torch.no_grad():
        return Speeds(
            {
                (c.name, n): [(sizes[i], c.measure(profile.buckets[i], n)) for i in chosen]
                for c in candidates
                for n in (ranks if c.grows_with_world else ranks[:1])
            }
        )


def predict(
    profile: Profile,
    candidates: Sequence[Candidate],
    speeds: Speeds,
    cluster: Cluster,
    mbit: float | None = None,
) -> Row:
    """A step's time by each candidate, and by what would be chosen for each bucket."""
    sizes = [sum(p.numel() for p in bucket) for bucket in profile.buckets]
    ranks = cluster.ranks
    packing = [speeds.of(PLAIN, numel, ranks).before for numel in sizes]
    costs = {
        c.name: c.costs(
            profile.buckets, [speeds.of(c.name, numel, ranks) for numel in sizes], packing, ranks
        )
        for c in candidates
    }
    beside = profile.forward + profile.update
    seconds = {
        name: beside + end_of_step(profile.ready, of_hook, cluster, idle=beside)
        for name, of_hook in costs.items()
    }
    if profile.plain is not None:
        (plain,) = (c for c in candidates if c.name == PLAIN)
        alone = plain.costs(profile.plain.buckets, (), (), ranks)
        seconds[PLAIN] = beside + end_of_step(profile.plain.ready, alone, cluster, idle=beside)
    gain = MIN_GAIN * seconds[PLAIN]
    choice = choose(profile.ready, costs, cluster, min_gain=gain, idle=beside)
    return Row(mbit, ranks, seconds, Counter(choice.names), beside + choice.seconds)
