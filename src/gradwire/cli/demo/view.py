"""Display of the demo: a line per epoch, progress bars on terminals, and two tables of results."""

from __future__ import annotations

import math
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from gradwire.cli.demo.options import DEVICES, TEST_IMAGES, TRAIN_IMAGES, DemoOptions
from gradwire.cli.demo.rank import COMPUTE, ROUNDS, TIMED_ROUNDS, TORCH, Backend, Result, Round
from gradwire.cli.demo.train import TOLERANCE, Epoch, build_model, is_lossy, torch_limit

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
        network = build_model(options.seed, torch.device("cpu"))
        numbers = sum(parameter.numel() for parameter in network.parameters())
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


_ROUNDING = (
    "Sums in different orders round differently, in float32 at the 7th digit. A relative "
    f"difference (norm of the difference over norm of the parameter) up to {TOLERANCE:.0e} counts "
    "as rounding; a gradient lost in a single step would cause 1e-04 or more."
)

_LOSSY = (
    "The hook {} compresses gradients for slow networks. The twin's gradients are not compressed, "
    "so its parameters differ."
)


def failures(result: Result, options: DemoOptions) -> list[str]:
    """Return descriptions of errors in the result; empty if it is right."""
    found = []
    if not result.same_bits:
        found.append("the processes ended with different parameters")
    difference = result.last.difference
    if not is_lossy(options) and not difference.is_rounding:
        twin = "the network without replicas" if options.mode == DEVICES else "one process"
        found.append(
            f"the difference to {twin} ({difference.relative:.1e}) is more than rounding "
            f"({TOLERANCE:.0e})"
        )
    return found


def show_result(console: Console, result: Result, options: DemoOptions) -> None:
    """Print the result with explanations."""
    for table, explanation in (
        (
            _training(result, options),
            _LOSSY.format(options.hook) if is_lossy(options) else _ROUNDING,
        ),
        (_times(result, options), _explained_times(result, options)),
    ):
        console.print()
        console.print(table)
        console.print(explanation, style="dim")
    for failure in failures(result, options):
        console.print(f"\n[bold red]FAILED[/]: {failure}")


def _training(result: Result, options: DemoOptions) -> Table:
    last, difference = result.last, result.last.difference
    table = _table("training", "", "")
    table.columns[2].justify = "left"
    accuracy = f"{last.correct / TEST_IMAGES:.1%}"
    table.add_row("test accuracy", accuracy, f"{last.correct} of {TEST_IMAGES} digits recognized")
    table.add_row("training loss", f"{last.loss:.4f}", "mean over the last epoch")
    if options.mode != DEVICES:
        same = ("equal", "bit for bit") if result.same_bits else ("differ", "[red]must be equal[/]")
        table.add_row("parameters in all processes", *same)
    verdict = "[green]rounding[/]" if difference.is_rounding else "[red]more than rounding[/]"
    if is_lossy(options):
        verdict = f"not rounding: {options.hook} is lossy"
    table.add_row("largest difference to the twin", f"{difference.absolute:.1e}", verdict)
    table.add_row("largest relative difference", f"{difference.relative:.1e}")
    return table


def _times(result: Result, options: DemoOptions) -> Table:
    rest = "replicas" if options.mode == DEVICES else "exposed communication"
    table = _table("time per step", "whole step", "compute", rest)
    compute = result.times[COMPUTE]
    for name, step in result.times.items():
        if name != COMPUTE:
            parts = (step, compute, step - compute)
            table.add_row(name, *(f"{seconds * 1e3:.2f} ms" for seconds in parts))
    return table


def _explained_times(result: Result, options: DemoOptions) -> str:
    text = f"Medians of {TIMED_ROUNDS} alternating steps. Compute is a step of the bare network; "
    if options.mode == DEVICES:
        return text + (
            "replicas is the additional time to scatter and gather the batch, to copy parameters "
            "to the replicas and to add their gradients. The replicas share this CPU and save no "
            "time; torch's DataParallel does not run on the CPU."
        )
    text += "exposed communication is the additional time of a step."
    if TORCH not in result.times:
        text += f" With {options.hook}, torch's DDP is omitted: it {torch_limit(options)}."
    return text


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
