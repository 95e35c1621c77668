"""The command `gradwire check`: mistakes of a training program that raise no error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.errors import ArgumentError

if TYPE_CHECKING:  # imported when the command runs, so that its help does not import PyTorch
    from gradwire.check import Outcome

_FOUND = 1
_UNCHECKED = 2

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
    exit code is 0 if it was checked and nothing was found, 1 if something was found, and 2 if it
    could not be checked: it failed, made no progress, or nothing of it is compared.
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
    steps = min((len(outcome.run.of("stepped", rank)) for rank in outcome.run.ranks), default=0)
    compared = steps and (outcome.run.replicas() or outcome.run.alone())
    checked = compared and not outcome.failed and not outcome.stalled
    result = "nothing found by " if checked and not findings else ""
    notes = [f"{result}{len(checks)} checks of {len(outcome.run.ranks)} ranks, {steps} steps"]
    notes += _notes(outcome, steps)
    if as_json:
        report: dict[str, object] = {"findings": list(map(asdict, findings)), "notes": notes}
        report |= {"steps": steps, "ranks": nproc_per_node}
        report |= {"failed": outcome.failed, "stalled": outcome.stalled}
        click.echo(json.dumps(report, indent=2))
    else:
        width = shutil.get_terminal_size().columns
        for finding in findings:
            ranks = ", ".join(map(str, finding.ranks))
            places = [f"ranks {ranks}", f"after {finding.step} steps", finding.tensor]
            click.secho(finding.check.upper(), fg="red", bold=True)
            click.echo(click.wrap_text(f"{finding.finds}: {finding.summary}", width))
            if finding.line:
                click.secho(finding.line, fg="cyan")  # alone, so that terminals open it
            click.secho("; ".join(filter(None, places)), fg="cyan")
            click.echo(click.wrap_text(f"Remedy: {finding.remedy}", width) + "\n")
        for note in notes:
            click.secho(note, dim=True)
    sys.exit(_FOUND if findings else 0 if checked else _UNCHECKED)


def _notes(outcome: Outcome, steps: int) -> list[str]:
    """Return what could not be checked."""
    run = outcome.run
    errors = [(e["time"], rank, e["error"]) for rank in run.ranks for e in run.of("error", rank)]
    notes = [f"rank {rank} failed: {error}" for _, rank, error in sorted(errors)]  # cause first
    silent = outcome.failed.keys() - {rank for _, rank, _ in errors}
    notes += [f"rank {r} failed with exit code {outcome.failed[r]}" for r in sorted(silent)]
    if outcome.stalled:
        notes.append("the ranks made no progress and were ended; see gradwire run --recorder")
    if not steps:
        notes.append("nothing was checked: not every rank stepped an optimizer")
    elif not run.replicas():
        seen = "only optimizers' parameters were compared" if run.alone() else "nothing was checked"
        notes.append(f"{seen}: no DistributedDataParallel was called on several ranks")
    blind = {e["probe"]: e["error"] for rank in run.ranks for e in run.of("blind", rank)}
    return [*notes, *(f"{probe} could not observe: {error}" for probe, error in blind.items())]
