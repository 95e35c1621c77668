"""The demo on one rank; rank 0 sends the results.

For the time per step, steps of the bare model and of the wrappers alternate, so that other work on
the machine slows all of them equally. The time of a step is that of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from gradwire.cli.demo.options import DemoOptions
from gradwire.cli.demo.train import (
    Digits,
    Epoch,
    build_model,
    build_optimizer,
    load_digits,
    same_bits,
    train,
    train_step,
    wrap_ours,
    wrap_torch,
)
from gradwire.cli.launch import RankEnv, Send, join_group
from gradwire.collectives import backend_of

_WARM_UP_ROUNDS = 15  # first steps allocate memory and rebuild buckets
TIMED_ROUNDS = 100
ROUNDS = _WARM_UP_ROUNDS + TIMED_ROUNDS

COMPUTE, OURS, TORCH, ON_GLOO = "compute", "gradwire", "torch's DDP", "torch on Gloo"


def time_steps(
    options: DemoOptions,
    env: RankEnv,
    group: dist.ProcessGroup | None,
    digits: Digits,
    on_round: Callable[[int], None],
) -> dict[str, float]:
    """Return median seconds per step: `COMPUTE` of the bare model, `OURS`, and those of PyTorch.

    `TORCH` is on the same backend, if it can run the hook; `ON_GLOO` is added on shm.

    `on_round` is called with the number of each of `ROUNDS` completed rounds.
    """
    device = digits.train_images.device
    model, inner, torchs, on_gloo = (build_model(options.seed, device) for _ in range(4))
    models = {COMPUTE: model, OURS: wrap_ours(inner, options, group)}
    if (theirs := wrap_torch(torchs, options, group)) is not None:
        models[TORCH] = theirs
        if group is not None and options.backend == "shm":
            slower = wrap_torch(on_gloo, options, dist.new_group(backend="gloo"))
            assert slower is not None
            models[ON_GLOO] = slower
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


_TIMEOUT = timedelta(minutes=2)  # longer than an epoch of the twin, which other ranks wait for


@dataclass(frozen=True)
class Backend:
    """Message: backend that the group uses, which is Gloo if ranks cannot share memory."""

    name: str


@dataclass(frozen=True)
class Round:
    """Message: number of completed rounds of timing; every fifth is sent."""

    number: int


@dataclass(frozen=True)
class Result:
    """Message: result of the demo.

    Args:
        last: Last epoch.
        same_bits: True if all ranks have bitwise equal parameters.
        times: Result of `time_steps`.
    """

    last: Epoch
    same_bits: bool
    times: Mapping[str, float]


def run_rank(options: DemoOptions, env: RankEnv, send: Send) -> None:
    """Train, compare and time on one rank; rank 0 sends Backend, Epochs, Rounds and Result.

    Raises:
        DistributedError: A rank failed.
    """
    group = join_group(env, options.backend, _TIMEOUT)
    device = env.device(options.backend)
    if env.rank == 0:
        send(Backend(backend_of(group, torch.empty(0, dtype=torch.float32, device=device)).name))
    _run(options, env, group, device, send)
    dist.destroy_process_group()


def run_devices(options: DemoOptions, send: Send) -> None:
    """Run the demo without other ranks: DataParallel on replicas on the CPU."""
    _run(options, RankEnv(0, 1, 0, 1), None, torch.device("cpu"), send)


def _run(
    options: DemoOptions,
    env: RankEnv,
    group: dist.ProcessGroup | None,
    device: torch.device,
    send: Send,
) -> None:
    torch.set_num_threads(1)  # the network is too small for more
    digits = load_digits(options.seed, device)
    model, last = train(options, env, group, digits, on_epoch=send)
    same = group is None or same_bits(model, group)

    def on_round(number: int) -> None:
        if env.rank == 0 and number % 5 == 1:  # showing every round would disturb the timing
            send(Round(number))

    times = time_steps(options, env, group, digits, on_round)
    if last is not None:
        send(Result(last, same, times))
