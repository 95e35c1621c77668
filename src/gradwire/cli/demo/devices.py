"""The demo's mode "devices": one process, and gradwire.devices.DataParallel on several replicas.

The replicas share the CPU, so that it runs everywhere; each has a share of every batch, and their
gradients are summed. The twin is the same training without replicas.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from gradwire.cli.demo.data import Digits, batches, load_digits
from gradwire.cli.demo.model import build_model, build_optimizer, train_step
from gradwire.cli.demo.options import DevicesOptions
from gradwire.cli.demo.rank import Round
from gradwire.cli.demo.timing import Step, take_turns
from gradwire.cli.demo.train import Epoch, correct, largest_difference, train_twin
from gradwire.cli.launch import Send
from gradwire.devices import DataParallel

__all__ = ["DevicesResult", "run_devices"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class DevicesResult:
    """What the demo found.

    Args:
        last: The last epoch.
        plain: Median seconds of a step of the bare network.
        parallel: Of one in DataParallel.
    """

    last: Epoch
    plain: float
    parallel: float


def run_devices(options: DevicesOptions, send: Send) -> None:
    """Train, compare and time; `send` every Epoch and Round and the DevicesResult."""
    torch.set_num_threads(1)  # more threads only get into each other's way in so small a network
    digits = load_digits(options.seed, _CPU)
    last = _train(options, digits, send)

    def on_round(number: int) -> None:
        if number % 5 == 1:  # showing each one would disturb the timing
            send(Round(number))

    rounds = take_turns(_steps(options, digits), _timed, on_round)
    plain, parallel = torch.tensor(rounds).median(dim=0).values.tolist()
    send(DevicesResult(last, plain, parallel))


def _train(options: DevicesOptions, digits: Digits, send: Send) -> Epoch:
    seed, batch_size = options.seed, options.batch_size
    model, twin = build_model(seed, _CPU), build_model(seed, _CPU)
    parallel = DataParallel(model, ["cpu"] * options.replicas)
    optimizer, twin_optimizer = (build_optimizer(m, batch_size) for m in (model, twin))
    for number in range(1, options.epochs + 1):
        losses = []
        for batch in batches(seed, number, batch_size):
            images, labels = digits.train_images[batch], digits.train_labels[batch]
            losses.append(train_step(parallel, optimizer, images, labels, 1 / batch_size))
        train_twin(twin, twin_optimizer, digits, seed, number, batch_size)
        loss = torch.stack(losses).mean().item()
        epoch = Epoch(number, loss, correct(model, digits), largest_difference(model, twin))
        send(epoch)
    return epoch


def _steps(options: DevicesOptions, digits: Digits) -> list[Step]:
    """A step of the bare network, and one in DataParallel."""
    plain, inner = (build_model(options.seed, _CPU) for _ in range(2))
    images = digits.train_images[: options.batch_size]
    labels = digits.train_labels[: options.batch_size]
    return [
        partial(
            train_step,
            model,
            build_optimizer(model, options.batch_size),
            images,
            labels,
            1 / options.batch_size,
        )
        for model in (plain, DataParallel(inner, ["cpu"] * options.replicas))
    ]


def _timed(step: Step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin
