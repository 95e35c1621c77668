"""The demo on one rank; rank 0 sends the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.cli.demo.options import DemoOptions
from gradwire.cli.demo.task import load_digits
from gradwire.cli.demo.timing import time_steps
from gradwire.cli.demo.train import Epoch, same_bits, train
from gradwire.cli.launch import Send
from gradwire.cli.rank_env import RankEnv, join_group
from gradwire.collectives.wire import backend_of

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
