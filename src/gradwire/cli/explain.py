"""The command `gradwire explain`: which rank, which line, which parameter, in one screen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.errors import ArgumentError

if TYPE_CHECKING:  # imported when the command runs: its help does without PyTorch
    from rich.console import Console

    from gradwire.recorder.verdict import Finding, Verdict

_FOUND = 1  # the exit code where something failed
_SHOWN = 3  # findings; later ones are mostly consequences

EXAMPLES = """\b
Examples:
    gradwire run --nproc-per-node 4 --recorder dumps train.py
    gradwire explain dumps
    gradwire explain /tmp --prefix nccl_trace_rank_    # PyTorch's own dumps
    gradwire explain dumps --json | jq .findings[0].ranks
"""


@click.command(epilog=EXAMPLES)
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--prefix", help="What the files' names begin with; found out if not given.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def explain(directory: Path, prefix: str | None, as_json: bool) -> None:
    """Name the rank and the cause, from the dumps in DIRECTORY.

    Reads the dumps of gradwire's recorder and those of PyTorch's flight recorder (Gloo, NCCL).
    Ends with 0 if nothing failed, and with 1 if something did.
    """
    from rich.console import Console

    from gradwire.recorder.verdict import explain as explain_dumps

    try:
        verdict = explain_dumps(directory, prefix)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(verdict.as_dict(), indent=2))
    else:
        show_verdict(Console(highlight=False), verdict)
    sys.exit(0 if verdict.healthy else _FOUND)


def show_verdict(console: Console, verdict: Verdict) -> None:
    """Print it: the cause first."""
    for number, finding in enumerate(verdict.findings[:_SHOWN]):
        if number:
            console.print("\nalso", style="dim")
        _show(console, finding, "bold red" if number == 0 and not verdict.healthy else "bold")
    dumps = f"{len(verdict.dumps)} dumps of {verdict.world_size} ranks"
    console.print("\n" + "; ".join([dumps, *verdict.notes]), style="dim", markup=False)


def _show(console: Console, finding: Finding, style: str) -> None:
    from rich.padding import Padding

    console.print(finding.kind.upper(), style=style, markup=False)
    console.print(finding.summary, markup=False)
    for line in finding.details:
        console.print(Padding(line, (0, 0, 0, 2)), style="dim", markup=False)
    for place in finding.places:
        console.print(Padding(place, (0, 0, 0, 2)), style="cyan", markup=False, soft_wrap=True)
    if finding.remedy:
        console.print(f"To do: {finding.remedy}", markup=False)
