"""A step's time for each link, number of ranks and hook: from a profile and measured hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradwire.cli.plan.profile import Profile
from gradwire.cost_model import Cluster, Cost, Link, choose, end_of_step
from gradwire.hooks.auto.candidates import PLAIN, Candidate, Computing, interpolated

__all__ = ["Row", "Speeds", "measure", "predict"]

FEW, MORE = 2, 8
"""Ranks for which computing is measured; the second where it grows with them, on a line."""
MIN_GAIN = 0.1


@dataclass(frozen=True)
class Row:
    """One link and number of ranks.

    Attributes:
        mbit: The link's rate, in Mbit/s.
        ranks: How many.
        seconds: Of a step, by the hook for all buckets.
        chosen: What `auto` would take: for how many buckets each hook.
        chosen_seconds: Of a step, with that.
    """

    mbit: float
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


def measure(profile: Profile, candidates: Sequence[Candidate]) -> Speeds:
    """Run each candidate on gradients like the model's, with nothing sent."""
    sizes = [sum(p.numel() for p in bucket) for bucket in profile.buckets]
    chosen = dict.fromkeys((sizes.index(min(sizes)), sizes.index(max(sizes))))
    with torch.no_grad():
        return Speeds(
            {
                (c.name, ranks): [(sizes[i], c.measure(profile.buckets[i], ranks)) for i in chosen]
                for c in candidates
                for ranks in ((FEW, MORE) if c.grows_with_world else (FEW,))
            }
        )


def predict(
    profile: Profile,
    candidates: Sequence[Candidate],
    speeds: Speeds,
    *,
    ranks: int,
    mbit: float,
    latency: float,
) -> Row:
    """A step's time by each candidate, and by what would be chosen for each bucket."""
    cluster = Cluster(ranks, Link(latency, mbit * 1e6 / 8))
    costs: dict[str, list[Cost]] = {c.name: [] for c in candidates}
    for bucket in profile.buckets:
        numel = sum(p.numel() for p in bucket)
        packing = speeds.of(PLAIN, numel, ranks).before
        for c in candidates:
            computing = speeds.of(c.name, numel, ranks)
            costs[c.name].append(c.cost(bucket, computing, packing, ranks))
    seconds = {
        name: profile.forward + end_of_step(profile.ready, of_hook, cluster)
        for name, of_hook in costs.items()
    }
    gain = MIN_GAIN * seconds[PLAIN]
    choice = choose(profile.ready, costs, cluster, min_gain=gain)
    return Row(mbit, ranks, seconds, Counter(choice.names), profile.forward + choice.seconds)
