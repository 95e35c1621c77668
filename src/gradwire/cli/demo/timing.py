"""Time per step of the bare model, of gradwire's wrapper and of torch's.

Steps alternate between them, so that other work on the machine slows all of them equally. The time
of a step is that of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from gradwire.cli.demo.options import DemoOptions
from gradwire.cli.demo.task import Digits, build_model, build_optimizer, train_step
from gradwire.cli.demo.wrap import wrap_ours, wrap_torch
from gradwire.cli.rank_env import RankEnv

_WARM_UP_ROUNDS = 15  # first steps allocate memory and rebuild buckets
TIMED_ROUNDS = 100
ROUNDS = _WARM_UP_ROUNDS + TIMED_ROUNDS

COMPUTE, OURS, TORCH = "compute", "gradwire", "torch's DDP"


def time_steps(
    options: DemoOptions,
    env: RankEnv,
    group: dist.ProcessGroup | None,
    digits: Digits,
    on_round: Callable[[int], None],
) -> dict[str, float]:
    """Return median seconds per step: `COMPUTE` of the bare model, `OURS`, and `TORCH` if it runs.

    `on_round` is called with the number of each of `ROUNDS` completed rounds.
    """
    device = digits.train_images.device
    model, inner, torchs = (build_model(options.seed, device) for _ in range(3))
    models = {COMPUTE: model, OURS: wrap_ours(inner, options, group)}
    if (theirs := wrap_torch(torchs, options, group)) is not None:
        models[TORCH] = theirs
    mine = slice(env.rank, options.batch_size, env.world_size)
    images, labels = digits.train_images[mine], digits.train_labels[mine]
    weight = env.world_size / options.batch_size
    steps = [
        partial(train_step, m, build_optimizer(m, options.batch_size), images, labels, weight)
        for m in models.values()
    ]
    rounds = []
    for number in range(1, ROUNDS + 1):
        first = number % len(steps)  # rotate the order of models
        order = [*range(first, len(steps)), *range(first)]
        taken = {which: _seconds(steps[which], group, device) for which in order}
        rounds.append([taken[which] for which in range(len(steps))])
        on_round(number)
    slowest = torch.tensor(rounds[_WARM_UP_ROUNDS:], dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(models, slowest.median(dim=0).values.tolist(), strict=True))


def _seconds(
    step: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device
) -> float:
    """Return the time of one step that all ranks begin together."""
    if group is not None:
        dist.barrier(group)
    begin = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begin
