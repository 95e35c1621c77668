"""Prediction of a step's time for a link, a number of ranks and each hook."""

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
"""Numbers of ranks for which computing is measured; the second if it grows with the ranks."""


@dataclass(frozen=True)
class Row:
    """Prediction for one link and number of ranks.

    Attributes:
        mbit: Rate of the link in Mbit/s; None for the measured link.
        ranks: Number of ranks.
        seconds: Seconds of a step, by the hook for all buckets.
        chosen: Number of buckets for which `auto` would choose each hook.
        chosen_seconds: Seconds of a step with that choice.
    """

    mbit: float | None
    ranks: int
    seconds: Mapping[str, float]
    chosen: Mapping[str, int]
    chosen_seconds: float

    @property
    def pays(self) -> bool:
        """Return True if any hook gains enough."""
        return set(self.chosen) != {PLAIN}


@dataclass(frozen=True)
class Speeds:
    """Computing time of each candidate for the smallest and the largest bucket.

    Attributes:
        points: Number of elements and computing time, by candidate and number of ranks.
    """

    points: Mapping[tuple[str, int], Sequence[tuple[int, Computing]]]

    def of(self, name: str, numel: int, ranks: int) -> Computing:
        """Return the interpolated time for a bucket of `numel` elements."""
        line = [(n, interpolated(p, numel)) for (c, n), p in self.points.items() if c == name]
        return interpolated(line, ranks)


def measure(
    profile: Profile, candidates: Sequence[Candidate], ranks: Sequence[int] = (FEW, MORE)
) -> Speeds:
    """Measure the computing time of each candidate on gradients like the model's.

    Args:
        profile: Profile of the model.
        candidates: Candidates.
        ranks: Assumed numbers of ranks. Only the first is used for candidates whose computing time
            does not depend on it.
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
    """Predict a step's time with each candidate, and with the best choice for each bucket."""
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
    """Predict a step's time on a group's link. Every rank must call this.

    The prediction is made from measured collectives and computing times. No step is measured.
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
    """Return the slowest rank's profile, measured on all ranks at once: they may share cores."""
    agree_on_largest(group, [0.0])  # a barrier
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
