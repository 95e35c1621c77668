"""The command `gradwire check`: mistakes of a training program that raise no error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.errors import ArgumentError

if TYPE_CHECKING:  # imported when the command runs, so that its help does not import PyTorch
    from gradwire.check import Finding, Outcome

_FOUND = 1
_FAILED = 2

EXAMPLES = """\b
Examples:
    gradwire check train.py --epochs 2
    gradwire check --nproc-per-node 4 --steps 50 train.py
    gradwire check --skip batch-norm --json train.py > findings.json
    gradwire check --list
"""


@click.command(
    epilog=EXAMPLES,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)
@click.option(
    "--nproc-per-node", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks."
)
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Optimizer steps to observe, after which the ranks are ended; 0 for the whole program.",
)
@click.option("--only", multiple=True, metavar="NAME", help="Run only this check; repeatable.")
@click.option("--skip", multiple=True, metavar="NAME", help="Leave this check out; repeatable.")
@click.option("--list", "listing", is_flag=True, help="List the checks, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds without progress after which the ranks are ended.",
)
@click.option("-m", "module", is_flag=True, help="Run PROGRAM as a module.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [ARGUMENTS...]")
def check(
    nproc_per_node: int,
    steps: int,
    only: Sequence[str],
    skip: Sequence[str],
    listing: bool,
    as_json: bool,
    timeout: float,
    module: bool,
    program: tuple[str, ...],
) -> None:
    """Run PROGRAM [ARGUMENTS...] on several ranks and report mistakes that raise no error.

    The program is not edited, and its results do not change. What it prints goes to stderr. The
    exit code is 0 if nothing was found, 1 if something was, and 2 if the program failed and nothing
    was found.
    """
    from gradwire.check import CHECKS, choose, conclude

    try:
        checks = choose(CHECKS, only, skip)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    if listing:
        for one in checks if only or skip else CHECKS:
            request = " (with --only)" if one.on_request else ""
            click.echo(f"{one.name}{request}\n  finds:   {one.finds}\n  if:      {one.evidence}")
            click.echo(f"  remedy:  {one.remedy}")
        return
    if not program:
        raise click.UsageError("PROGRAM is missing: pass a Python file, or -m and a module")
    if not module and not Path(program[0]).is_file():
        raise click.UsageError(f"PROGRAM is {program[0]!r}, which is not a file: pass its path")
    from gradwire.check import run_checked

    outcome = run_checked(["-m"] * module + list(program), nproc_per_node, steps, timeout)
    findings = conclude(outcome.run, checks)
    notes = _notes(outcome, len(checks))
    if as_json:
        found = list(map(asdict, findings))
        click.echo(json.dumps({"findings": found, "notes": notes}, indent=2))
    else:
        _show(findings, notes)
    sys.exit(_FOUND if findings else _FAILED if outcome.failed else 0)


def _show(findings: Sequence[Finding], notes: Sequence[str]) -> None:
    from rich.console import Console
    from rich.padding import Padding

    console = Console(highlight=False)
    for finding in findings:
        console.print(finding.check.upper(), style="bold red", markup=False)
        console.print(f"{finding.finds}: {finding.summary}", markup=False)
        ranks = ", ".join(map(str, finding.ranks))
        places = [f"ranks {ranks}", f"after {finding.step} steps", finding.tensor]
        for place in (finding.line, "; ".join(filter(None, places))):
            if place:
                console.print(Padding(place, (0, 0, 0, 2)), style="cyan", markup=False)
        console.print(f"Remedy: {finding.remedy}\n", markup=False)
    for note in notes:
        console.print(note, style="dim", markup=False)


def _notes(outcome: Outcome, checks: int) -> list[str]:
    """Return what was checked, and what could not be."""
    run = outcome.run
    steps = [len(run.of("stepped", rank)) for rank in run.ranks]
    notes = [f"{checks} checks of {len(run.ranks)} ranks, {min(steps, default=0)} steps"]
    notes += [
        f"rank {rank} failed with exit code {code}"
        + "".join(f": {e['error']}" for e in run.of("error", rank)[:1])
        for rank, code in outcome.failed.items()
    ]
    if outcome.stalled:
        notes.append("the ranks made no progress and were ended; see gradwire run --recorder")
    if run.ranks and not run.replicas():
        notes.append("no DistributedDataParallel was seen on several ranks: most checks need one")
    blind = {e["probe"]: e["error"] for rank in run.ranks for e in run.of("blind", rank)}
    return [*notes, *(f"{probe} could not observe: {error}" for probe, error in blind.items())]
