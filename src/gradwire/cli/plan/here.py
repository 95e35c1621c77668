"""The link that this process is on: every rank measures, and all get the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from gradwire.cli.plan.predict import Row, Speeds, measure, predict
from gradwire.cli.plan.profile import Profile, profile
from gradwire.hooks.auto.candidates import Candidate, Computing, largest_of
from gradwire.hooks.auto.measure import measure_cluster
from gradwire.hooks.auto.meter import agree_on_largest

__all__ = ["predict_here", "profile_here"]


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
