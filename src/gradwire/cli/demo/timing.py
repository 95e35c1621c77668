"""Time per step: the model alone, in gradwire's class and in torch's, taken in turns.

They take turns step by step, so that whatever else disturbs the machine disturbs them alike;
a step lasts as long as its slowest rank's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from gradwire.cli.demo.data import Digits
from gradwire.cli.demo.model import build_model, build_optimizer, train_step
from gradwire.cli.demo.options import DemoOptions
from gradwire.cli.demo.wrap import HOOKS, wrap_ours, wrap_torch
from gradwire.cli.rank_env import RankEnv

__all__ = ["ROUNDS", "TIMED_ROUNDS", "Step", "StepTimes", "take_turns", "time_steps"]

_WARM_UP_ROUNDS = 15  # first steps allocate, and the classes rearrange their buckets
TIMED_ROUNDS = 100
ROUNDS = _WARM_UP_ROUNDS + TIMED_ROUNDS

Step = Callable[[], object]


@dataclass(frozen=True)
class StepTimes:
    """Median seconds per step.

    Args:
        compute: Of the model alone.
        ours: Of the model in gradwire's class.
        torch: Of the model in torch's class, or None where it cannot run the hook.
    """

    compute: float
    ours: float
    torch: float | None


def time_steps(
    options: DemoOptions,
    env: RankEnv,
    group: dist.ProcessGroup,
    digits: Digits,
    on_round: Callable[[int], None],
) -> StepTimes:
    """Take the medians of `ROUNDS` rounds; calls `on_round` with the number of each, once done."""
    steps = _contestants(options, env, group, digits)
    device = digits.train_images.device
    rounds = take_turns(steps, lambda step: _timed(step, group, device), on_round)
    slowest = torch.tensor(rounds, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    compute, ours, *torchs = slowest.median(dim=0).values.tolist()
    return StepTimes(compute, ours, torchs[0] if torchs else None)


def take_turns(
    steps: Sequence[Step], timed: Callable[[Step], float], on_round: Callable[[int], None]
) -> list[list[float]]:
    """Each step's seconds in each round after the warm-up.

    Args:
        steps: What is timed.
        timed: Does a step and gives its seconds.
        on_round: Called with the number of each of `ROUNDS` rounds, once done.
    """
    rounds: list[list[float]] = []
    for number in range(1, ROUNDS + 1):
        first = number % len(steps)  # nobody always comes after the same other
        turn = [*range(first, len(steps)), *range(first)]
        taken = {which: timed(steps[which]) for which in turn}
        rounds.append([taken[which] for which in range(len(steps))])
        on_round(number)
    return rounds[_WARM_UP_ROUNDS:]


def _contestants(
    options: DemoOptions, env: RankEnv, group: dist.ProcessGroup, digits: Digits
) -> list[Step]:
    hook = HOOKS[options.hook]
    device = digits.train_images.device
    mine = slice(env.rank, options.batch_size, env.world_size)
    images, labels = digits.train_images[mine], digits.train_labels[mine]
    models = [
        build_model(options.seed, device),
        wrap_ours(build_model(options.seed, device), group, hook),
        wrap_torch(build_model(options.seed, device), group, hook),
    ]
    return [
        partial(
            train_step,
            model,
            build_optimizer(model, options.batch_size),
            images,
            labels,
            env.world_size / options.batch_size,
        )
        for model in models
        if model is not None
    ]


def _timed(step: Step, group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of one step that all ranks begin together."""
    dist.barrier(group)
    begin = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begin
