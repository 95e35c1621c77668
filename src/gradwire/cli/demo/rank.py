"""The whole demo as one rank runs it; rank 0 sends what is worth showing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.cli.demo.data import load_digits
from gradwire.cli.demo.options import DemoOptions
from gradwire.cli.demo.timing import StepTimes, time_steps
from gradwire.cli.demo.train import Epoch, same_bits, train
from gradwire.cli.launch import Send
from gradwire.cli.rank_env import RankEnv, join_group
from gradwire.collectives.engines import engine

__all__ = ["Engine", "Result", "Round", "run_rank"]

_SILENCE = timedelta(minutes=2)  # longer than any epoch of the twin, for which the others wait


@dataclass(frozen=True)
class Engine:
    """What carries the ranks' messages: shm gives way to Gloo where ranks share no memory."""

    name: str


@dataclass(frozen=True)
class Round:
    """How many rounds of timing are done; one in five is told."""

    number: int


@dataclass(frozen=True)
class Result:
    """What the demo found.

    Args:
        last: The last epoch.
        same_bits: Whether all ranks ended with the same parameters, to the last bit.
        times: Of a step.
    """

    last: Epoch
    same_bits: bool
    times: StepTimes


def run_rank(options: DemoOptions, env: RankEnv, send: Send) -> None:
    """Train, compare and time on one rank; on rank 0, `send` what there is to show.

    That is the Engine, every Epoch, Rounds and the Result.

    Raises:
        DistributedError: Ranks could not work together.
    """
    torch.set_num_threads(1)  # more threads only get into each other's way in so small a network
    group = join_group(env, options.backend, _SILENCE)
    device = env.device(options.backend)
    if env.rank == 0:
        send(Engine(engine(group, torch.empty(0, device=device))))
    digits = load_digits(options.seed, device)
    model, last = train(options, env, group, digits, on_epoch=send)
    same = same_bits(model, group)

    def on_round(number: int) -> None:
        if env.rank == 0 and number % 5 == 1:  # showing each one would disturb the timing
            send(Round(number))

    times = time_steps(options, env, group, digits, on_round)
    if last is not None:
        send(Result(last, same, times))
    dist.destroy_process_group()
