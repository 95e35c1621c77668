"""The command `gradwire doctor`: trials of backends and checks of this machine."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:  # imported when the command runs, so that its help does not import PyTorch
    from rich.console import Console
    from rich.table import Table

    from gradwire.cli.doctor.checks import Check
    from gradwire.cli.doctor.trial import Trial

BACKENDS = ("shm", "gloo", "nccl")
_PROBLEM = 1
_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}

EXAMPLES = """\b
Examples:
    gradwire doctor
    gradwire doctor --nproc 4
    gradwire doctor --backend gloo      # one backend only
    gradwire doctor --json | jq .backends
"""


@click.command(epilog=EXAMPLES, context_settings={"show_default": True})
@click.option("--nproc", type=click.IntRange(min=2), default=2, help="Processes per trial.")
@click.option(
    "--backend", "names", multiple=True, type=click.Choice(BACKENDS), help="Try only this backend."
)
@click.option(
    "--gradients/--no-gradients", default=True, help="Check gradients of all collectives."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def doctor(nproc: int, names: Sequence[str], gradients: bool, as_json: bool) -> None:
    """Try each backend between processes, and check limits and settings of this machine.

    The exit code is 0 if all backends that this machine supports work with right gradients and no
    check found a problem, and 1 otherwise. If a trial fails while the load average exceeds the
    number of cores, the result is unclear.
    """
    from rich.console import Console

    progress = Console(stderr=True)  # shows nothing unless it is a terminal
    with progress.status("checking limits and settings ..."):
        checks = run_checks(nproc)
    earlier = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    trials = []
    try:  # processes and folders of trials are removed on SIGTERM as well
        for name in names or BACKENDS:
            with progress.status(f"trying {name} in {nproc} processes, for at most 90 s ..."):
                trials.append(try_backend(name, nproc, gradients=gradients))
    finally:
        signal.signal(signal.SIGTERM, earlier)
    if as_json:
        found = {"backends": list(map(asdict, trials)), "checks": list(map(asdict, checks))}
        click.echo(json.dumps(found | {"problems": problems(trials, checks)}, indent=2))
    else:
        _show(Console(highlight=False), trials, checks)
    sys.exit(_PROBLEM if problems(trials, checks) else 0)


def run_checks(nproc: int) -> list[Check]:
    """Run all checks for `nproc` processes on this machine."""
    from gradwire.cli.doctor import checks

    return checks.run_checks(nproc)


def try_backend(name: str, nproc: int, *, gradients: bool) -> Trial:
    """Try a backend between processes."""
    from gradwire.cli.doctor import trial

    return trial.try_backend(name, nproc, gradients=gradients)


def problems(trials: Sequence[Trial], checks: Sequence[Check]) -> list[str]:
    """Return the names of failed backends and checks."""
    from gradwire.cli.doctor.checks import BAD

    failed = [t.backend for t in trials if t.tried and (not t.works or t.wrong or t.warnings)]
    return failed + [check.name for check in checks if check.state == BAD]


def _show(console: Console, trials: Sequence[Trial], checks: Sequence[Check]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console.print(_backends(trials))
    for trial in trials:
        _explain(console, trial)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=False)
    for check in checks:
        said = escape(f"{check.found}\n{check.remedy}".rstrip())
        table.add_row(f"[{_STYLES[check.state]}]{check.state}[/]", check.name, said)
    console.print(table)
    found = problems(trials, checks)
    text = f"[red]Problems[/]: {', '.join(found)}" if found else "[green]No problems.[/]"
    console.print(f"\n{text}")


def _backends(trials: Sequence[Trial]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("backend")
    table.add_column("works")
    for name in ("all_reduce, 40 bytes", "all_reduce, 16 MiB", "gradients right"):
        table.add_column(name, justify="right")
    for trial in trials:
        if not trial.works:
            works = "[red]no[/]" if trial.tried else "not available"
            works = "[yellow]unclear[/]" if trial.busy else works
            table.add_row(trial.backend, works, "", "", "")
            continue
        right, of = trial.gradients
        counted = f"{right} of {of}" if right or trial.wrong else "not checked"
        latency, bandwidth = f"{trial.latency_us:.0f} µs", f"{trial.bandwidth_mb:.0f} MB/s"
        table.add_row(trial.backend, "[green]yes[/]", latency, bandwidth, counted)
    return table


def _explain(console: Console, trial: Trial) -> None:
    said = [trial.reason] if trial.reason else []
    said += trial.warnings + [f"{name}: {why}" for name, why in trial.wrong.items()]
    for text in said:
        console.print(f"  {trial.backend}: {text}", style="dim", markup=False)
