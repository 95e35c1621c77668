"""What the demo found: two tables, and whether the result is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from gradwire.cli.demo.data import TEST_IMAGES
from gradwire.cli.demo.devices import DevicesResult
from gradwire.cli.demo.options import DemoOptions
from gradwire.cli.demo.rank import Result
from gradwire.cli.demo.timing import TIMED_ROUNDS
from gradwire.cli.demo.train import TOLERANCE, Difference, Epoch
from gradwire.cli.demo.wrap import HOOKS

__all__ = ["devices_failures", "failures", "show_devices_result", "show_result"]


def failures(result: Result, options: DemoOptions) -> list[str]:
    """What is wrong with the result, a sentence each; empty when all is right."""
    found = []
    if not result.same_bits:
        found.append("the processes ended with different parameters")
    if not HOOKS[options.hook].lossy:
        found += _too_far(result.last.difference, "one process")
    return found


def devices_failures(result: DevicesResult) -> list[str]:
    """What is wrong with the result of the mode "devices"."""
    return _too_far(result.last.difference, "the network without replicas")


def _too_far(difference: Difference, from_: str) -> list[str]:
    if difference.is_rounding:
        return []
    return [
        f"the difference to {from_} ({difference.relative:.1e}) is more than rounding "
        f"({TOLERANCE:.0e})"
    ]


def show_result(console: Console, result: Result, options: DemoOptions) -> None:
    """Print the result and what it means."""
    parts = [
        (_training(result, options), _explained_difference(options)),
        (_step_times(result), _explained_times(result, options)),
    ]
    _print(console, parts, failures(result, options))


def show_devices_result(console: Console, result: DevicesResult) -> None:
    """Print the result of the mode "devices" and what it means."""
    table = _training_table(result.last)
    _add_difference(table, result.last.difference)
    parts = [
        (table, _ROUNDING),
        (
            _times_table({"gradwire": result.parallel}, result.plain, "replicas"),
            f"Medians of {TIMED_ROUNDS} steps, taken in turns. Compute is a step of the bare "
            "network; replicas is what a step takes longer than that: cutting and joining, "
            "parameters to the replicas, gradients back. The replicas share this CPU, so that "
            "there is nothing to win here; torch's DataParallel refuses the CPU.",
        ),
    ]
    _print(console, parts, devices_failures(result))


def _print(console: Console, parts: Sequence[tuple[Table, str]], failures: Sequence[str]) -> None:
    for table, explanation in parts:
        console.print()
        console.print(table)
        console.print(explanation, style="dim")
    for failure in failures:
        console.print(f"\n[bold red]FAILED[/]: {failure}")


def _training(result: Result, options: DemoOptions) -> Table:
    table = _training_table(result.last)
    table.add_row(
        "parameters in all processes",
        "equal" if result.same_bits else "differ",
        "to the last bit" if result.same_bits else "[red]they must not[/]",
    )
    lossy = f"not rounding: {options.hook} is lossy" if HOOKS[options.hook].lossy else ""
    _add_difference(table, result.last.difference, lossy)
    return table


def _training_table(last: Epoch) -> Table:
    table = _table("training", "", "")
    table.columns[2].justify = "left"
    table.add_row(
        "test accuracy",
        f"{last.correct / TEST_IMAGES:.1%}",
        f"{last.correct} of {TEST_IMAGES} digits recognized",
    )
    table.add_row("training loss", f"{last.loss:.4f}", "mean over the last epoch")
    return table


def _add_difference(table: Table, difference: Difference, excuse: str = "") -> None:
    """Two rows on the twin, with a verdict or, where rounding is not expected, an excuse."""
    verdict = "[green]rounding[/]" if difference.is_rounding else "[red]more than rounding[/]"
    table.add_row("largest difference to the twin", f"{difference.absolute:.1e}", excuse or verdict)
    table.add_row("largest relative difference", f"{difference.relative:.1e}")


_ROUNDING = (
    "A sum in another order is rounded differently, in float32 at the 7th digit. A relative "
    f"difference (its length over the parameter's) up to {TOLERANCE:.0e} counts as rounding; a "
    "gradient lost in a single step would make 1e-04 or more."
)


def _explained_difference(options: DemoOptions) -> str:
    if HOOKS[options.hook].lossy:
        return (
            f"The hook {options.hook} sends less than it is given, to be faster on slow networks. "
            "The twin loses nothing, and so ends elsewhere."
        )
    return _ROUNDING


def _step_times(result: Result) -> Table:
    steps = {"gradwire": result.times.ours}
    if result.times.torch is not None:
        steps["torch's DDP"] = result.times.torch
    return _times_table(steps, result.times.compute, "exposed communication")


def _times_table(steps: Mapping[str, float], compute: float, rest: str) -> Table:
    table = _table("time per step", "whole step", "compute", rest)
    for name, step in steps.items():
        parts = (step, compute, step - compute)
        table.add_row(name, *(f"{seconds * 1e3:.2f} ms" for seconds in parts))
    return table


def _explained_times(result: Result, options: DemoOptions) -> str:
    text = (
        f"Medians of {TIMED_ROUNDS} steps, taken in turns. Compute is a step of the bare network; "
        "exposed communication is what a step takes longer than that."
    )
    if result.times.torch is None:
        trouble = HOOKS[options.hook].torch_trouble
        text += f" With {options.hook}, torch's DDP is left out: it {trouble}."
    return text


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
