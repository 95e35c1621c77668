"""Training loss by step and by second, for one method and seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.language import Language, corpus
from benchmarks.methods import METHODS, Groups

__all__ = ["Batches", "Course", "Task", "reached", "train"]


@dataclass(frozen=True)
class Task:
    """A training task and its length.

    Args:
        layers, width: Size of the network.
        passages, length: Size of each rank's batch.
        steps: After which losses are compared, and after which torch's is the one to reach.
        limit: Steps after which a method has not reached it.
        every: Steps between validations; a multiple of all methods' cycles, so that ranks are
            together.
        held_out: Passages to validate on, which ranks share.
        seeds: Each begins with other parameters and other batches.
    """

    layers: int = 2
    width: int = 208
    passages: int = 2
    length: int = 32
    steps: int = 320
    limit: int = 416
    every: int = 16
    held_out: int = 128
    seeds: tuple[int, ...] = (0, 1, 2)

    def network(self, seed: int) -> Language:
        """The network, equal on all ranks."""
        torch.manual_seed(seed)
        return Language(self.layers, self.width, self.length)


@dataclass(frozen=True)
class Course:
    """A training's validations, equal on all ranks.

    Attributes:
        losses: On held-out text, in nats a character.
        seconds: Since the beginning, validations not counted.
    """

    losses: list[float]
    seconds: list[float]


class Batches:
    """This rank's batches of a seed."""

    def __init__(self, task: Task, seed: int) -> None:
        self._task, self._corpus = task, corpus()
        self._generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())

    def next(self) -> Tensor:
        """The next batch."""
        return self._corpus.batch(self._generator, self._task.passages, self._task.length)


def train(
    task: Task, name: str, seed: int, groups: Groups, *, loss: float = math.inf, least: int = 0
) -> Course:
    """Train until the loss is reached, or the limit.

    Args:
        task: The training task.
        name: Name of the method.
        seed: Seed of parameters and batches.
        groups: The groups.
        loss: To reach.
        least: Steps to take even if it is reached.
    """
    network = task.network(seed)
    step = METHODS[name].make(network, groups)
    batches, course = Batches(task, seed), Course([], [])
    held_out = corpus().held_out(task.held_out, task.length)
    own = held_out[dist.get_rank() :: dist.get_world_size()]
    taken, seconds = 0, 0.0
    while taken < task.limit and (taken < least or not course.losses or course.losses[-1] > loss):
        dist.barrier()
        start = perf_counter()
        for _ in range(task.every):
            step(batches.next())
        dist.barrier()
        taken, seconds = taken + task.every, seconds + perf_counter() - start
        course.seconds.append(seconds)
        course.losses.append(_validate(network, own) / task.held_out)
    return course


def _validate(network: Language, own: Tensor) -> float:
    """The sum of all passages' losses; each rank's are this rank's own model's."""
    with torch.no_grad():
        total = network(own) * len(own)
    dist.all_reduce(total)
    return float(total)


def reached(losses: Sequence[float], loss: float, at: Sequence[float]) -> float:
    """Return the position at which a falling loss curve first crosses a value; infinity if never.

    Args:
        losses: Losses in order.
        loss: Loss to reach.
        at: Position of each loss, in steps or seconds.

    Example:
        >>> reached([3.0, 2.0, 1.0], 1.5, [10, 20, 30])
        25.0
    """
    for number, value in enumerate(losses):
        if value <= loss:
            if number == 0:
                return float(at[0])
            before, begun = losses[number - 1], at[number - 1]
            return begun + (at[number] - begun) * (before - loss) / (before - value)
    return math.inf
