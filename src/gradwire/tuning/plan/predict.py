"""A step's time for each link, number of ranks and hook: from a profile and measured hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from gradwire.tuning.candidates import PLAIN, Candidate, Computing, interpolated, largest_of
from gradwire.tuning.cost_model import Cluster, choose, end_of_step
from gradwire.tuning.measure import measure_cluster
from gradwire.tuning.meter import agree_on_largest
from gradwire.tuning.plan.profile import Profile, profile
from gradwire.tuning.trial import MIN_GAIN

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


def predict_here(group: ProcessGroup, found: Profile, candidates: Sequence[Candidate]) -> Row:
    """A step's time on the group's own link; every rank calls.

    What is measured is collectives of sizes of their own, and what hooks compute: no step.
    """
    buckets = [*found.buckets, *([] if found.plain is None else found.plain.buckets)]
    cluster = measure_cluster(group, largest_of(candidates, buckets, group.size()))
    own = measure(found, candidates, (group.size(),))
    numbers = [x for line in own.points.values() for _, c in line for x in (c.before, c.after)]
    agreed = iter(agree_on_largest(group, numbers))
    speeds = Speeds(
        {
            key: [(numel, Computing(next(agreed), next(agreed))) for numel, _ in line]
            for key, line in own.points.items()
        }
    )
    return predict(found, candidates, speeds, cluster)


def profile_here(
    group: ProcessGroup, model: nn.Module, inputs: Sequence[Any], optimizer: Optimizer | None
) -> Profile:
    """The slowest rank's profile, while all ranks run theirs: they may share cores."""
    agree_on_largest(group, [0.0])  # all begin together
    own = profile(model, inputs, optimizer)
    agreed = iter(agree_on_largest(group, _numbers(own)))
    return _with(own, agreed)


def _numbers(found: Profile) -> list[float]:
    plain = [] if found.plain is None else _numbers(found.plain)
    return [found.forward, found.update, *found.ready, *plain]


def _with(found: Profile, numbers: Iterator[float]) -> Profile:
    forward, update = next(numbers), next(numbers)
    ready = tuple(next(numbers) for _ in found.ready)
    plain = None if found.plain is None else _with(found.plain, numbers)
    return replace(found, forward=forward, update=update, ready=ready, plain=plain)
