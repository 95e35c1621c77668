"""The demo while it runs: a line per epoch, and on a terminal a moving bar below."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from gradwire.cli.demo.data import TEST_IMAGES, TRAIN_IMAGES
from gradwire.cli.demo.model import build_model, parameter_count
from gradwire.cli.demo.options import DemoOptions, DevicesOptions
from gradwire.cli.demo.rank import Engine, Round
from gradwire.cli.demo.timing import ROUNDS
from gradwire.cli.demo.train import Epoch

__all__ = ["View"]

_LINES = 12  # about how many epochs get a line


def _workers(options: DemoOptions | DevicesOptions) -> str:
    if isinstance(options, DevicesOptions):
        return f"{options.replicas} replicas"
    return "1 process" if options.nproc == 1 else f"{options.nproc} processes"


def _headline(options: DemoOptions | DevicesOptions) -> str:
    if isinstance(options, DevicesOptions):
        return f"one network in {_workers(options)} on one CPU, by DataParallel"
    hook = "" if options.hook == "none" else f", hook {options.hook}"
    return f"one network in {_workers(options)}, gradients averaged{hook}"


def _twin(options: DemoOptions | DevicesOptions) -> str:
    where = "without replicas" if isinstance(options, DevicesOptions) else "in one process"
    return f"the same training {where}, to compare with"


class View:
    """Shows what a demo sends, as it comes.

    Args:
        console: Where to.
        options: Of the demo.
    """

    def __init__(self, console: Console, options: DemoOptions | DevicesOptions) -> None:
        self._console = console
        self._options = options
        self._every = math.ceil(options.epochs / _LINES)
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            refresh_per_second=5,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(f"starting {_workers(options)}", total=None)

    def __enter__(self) -> View:
        self._introduce()
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, news: Any) -> None:
        """Show one thing that rank 0 sent; what has no env here is left to others."""
        if isinstance(news, Engine):
            self._console.print(f"[dim]  engine   {news.name} carries the gradients[/]")
        elif isinstance(news, Epoch):
            self._show_epoch(news)
        elif isinstance(news, Round):
            if news.number == 1:
                self._console.print("[dim]timing steps ...[/]")
            self._bar.update(self._task, description="timing", completed=news.number, total=ROUNDS)

    def _introduce(self) -> None:
        options = self._options
        numbers = parameter_count(build_model(options.seed, torch.device("cpu")))
        self._console.print(
            f"[bold]gradwire demo[/]: {_headline(options)}\n"
            f"[dim]  data     {TRAIN_IMAGES} handwritten digits, 8 x 8 pixels, to learn from; "
            f"{TEST_IMAGES} to test\n"
            f"  network  2 convolutions and 2 linear layers, {numbers:,} parameters\n"
            f"  twin     {_twin(options)}[/]"
        )

    def _show_epoch(self, epoch: Epoch) -> None:
        if epoch.number == 1:
            heads = "   epoch     loss   test accuracy   largest difference to the twin"
            self._console.print(f"\n[bold]{heads}[/]")
        total = self._options.epochs
        self._bar.update(self._task, description="training", completed=epoch.number, total=total)
        if epoch.number in (1, total) or epoch.number % self._every == 0:
            self._console.print(
                f"{f'{epoch.number}/{total}':>8}   {epoch.loss:6.4f}   "
                f"{epoch.correct / TEST_IMAGES:>13.1%}   {epoch.difference.absolute:>30.1e}",
            )
