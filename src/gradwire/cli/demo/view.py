"""Progress of the demo: a line per epoch, and a progress bar on terminals."""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from gradwire.cli.demo.options import DEVICES, TEST_IMAGES, TRAIN_IMAGES, DemoOptions
from gradwire.cli.demo.rank import Backend, Round
from gradwire.cli.demo.task import build_model, parameter_count
from gradwire.cli.demo.timing import ROUNDS
from gradwire.cli.demo.train import Epoch

_LINES = 12  # approximate number of epochs with a line


def _texts(options: DemoOptions) -> tuple[str, str, str]:
    """Return the workers, the headline and the twin's setup."""
    if options.mode == DEVICES:
        workers = f"{options.shares} replicas"
        return workers, f"{workers} on one CPU, by DataParallel", "without replicas"
    workers = "1 process" if options.shares == 1 else f"{options.shares} processes"
    hook = "" if options.hook == "none" else f", hook {options.hook}"
    return workers, f"{workers}, gradients averaged{hook}", "in one process"


class View:
    """Display of the demo's setup and messages.

    Args:
        console: Console to print to.
        options: Options of the demo.

    Attributes:
        progress: Progress bar, entered while the demo runs.
    """

    def __init__(self, console: Console, options: DemoOptions) -> None:
        self._console = console
        self._options = options
        self._every = math.ceil(options.epochs / _LINES)
        self.progress = Progress(
            SpinnerColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            refresh_per_second=5,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task(f"starting {_texts(options)[0]}", total=None)
        self._introduce()

    def show(self, message: Any) -> None:
        """Show a message of rank 0: Backend, Epoch or Round."""
        if isinstance(message, Backend):
            self._console.print(f"[dim]  backend  {message.name}[/]")
        elif isinstance(message, Epoch):
            self._show_epoch(message)
        elif isinstance(message, Round):
            if message.number == 1:
                self._console.print("[dim]timing steps ...[/]")
            self.progress.update(
                self._task, description="timing", completed=message.number, total=ROUNDS
            )

    def _introduce(self) -> None:
        options = self._options
        _, headline, twin = _texts(options)
        numbers = parameter_count(build_model(options.seed, torch.device("cpu")))
        self._console.print(
            f"[bold]gradwire demo[/]: one network in {headline}\n"
            f"[dim]  data     {TRAIN_IMAGES} handwritten digits, 8 x 8 pixels, to learn from; "
            f"{TEST_IMAGES} to test\n"
            f"  network  2 convolutions and 2 linear layers, {numbers:,} parameters\n"
            f"  twin     the same training {twin}, to compare with[/]"
        )

    def _show_epoch(self, epoch: Epoch) -> None:
        if epoch.number == 1:
            heads = "   epoch     loss   test accuracy   largest difference to the twin"
            self._console.print(f"\n[bold]{heads}[/]")
        total = self._options.epochs
        self.progress.update(
            self._task, description="training", completed=epoch.number, total=total
        )
        if epoch.number in (1, total) or epoch.number % self._every == 0:
            self._console.print(
                f"{f'{epoch.number}/{total}':>8}   {epoch.loss:6.4f}   "
                f"{epoch.correct / TEST_IMAGES:>13.1%}   {epoch.difference.absolute:>30.1e}",
            )
