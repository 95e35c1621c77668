"""The whole demo as one rank runs it; rank 0 sends the results."""

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
from gradwire.collectives.wire.backends import backend_of

_TIMEOUT = timedelta(minutes=2)  # longer than any epoch of the twin, for which the others wait


@dataclass(frozen=True)
class Backend:
    """The backend that the group uses: Gloo in place of shm if ranks cannot share memory."""

    name: str


@dataclass(frozen=True)
class Round:
    """How many rounds of timing are done; one in five is sent."""

    number: int


@dataclass(frozen=True)
class Result:
    """The demo's result.

    Args:
        last: The last epoch.
        same_bits: Whether all ranks ended with the same parameters, to the last bit.
        times: As of `time_steps`.
    """

    last: Epoch
    same_bits: bool
    times: Mapping[str, float]


def run_rank(options: DemoOptions, env: RankEnv, send: Send) -> None:
    """Train, compare and time on one rank; rank 0 sends the Backend, Epochs, Rounds and the Result.

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
    """`run_rank` without other ranks: DataParallel on replicas, all on the CPU."""
    _run(options, RankEnv(0, 1, 0, 1), None, torch.device("cpu"), send)


def _run(
    options: DemoOptions,
    env: RankEnv,
    group: dist.ProcessGroup | None,
    device: torch.device,
    send: Send,
) -> None:
    torch.set_num_threads(1)  # the network is too small to gain from more
    digits = load_digits(options.seed, device)
    model, last = train(options, env, group, digits, on_epoch=send)
    same = group is None or same_bits(model, group)

    def on_round(number: int) -> None:
        if env.rank == 0 and number % 5 == 1:  # to show each one would disturb the timing
            send(Round(number))

    times = time_steps(options, env, group, digits, on_round)
    if last is not None:
        send(Result(last, same, times))
