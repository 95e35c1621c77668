"""The command `gradwire explain`: rank, line and parameter that caused a failure, on one screen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.errors import ArgumentError

if TYPE_CHECKING:  # imported when the command runs, so that its help does not import PyTorch
    from rich.console import Console

    from gradwire.recorder.verdict import Finding, Verdict

_FOUND = 1  # exit code if something failed
_SHOWN = 3  # number of findings shown; later ones are mostly consequences

EXAMPLES = """\b
Examples:
    gradwire run --nproc-per-node 4 --recorder dumps train.py
    gradwire explain dumps
    gradwire explain /tmp --prefix nccl_trace_rank_    # dumps of PyTorch's flight recorder
    gradwire explain dumps --json | jq .findings[0].ranks
"""


@click.command(epilog=EXAMPLES)
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--prefix", help="Prefix of file names.  [default: the most common one]")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def explain(directory: Path, prefix: str | None, as_json: bool) -> None:
    """Name the rank and the cause of a failure from the dumps in DIRECTORY.

    Reads dumps of gradwire's recorder and of PyTorch's flight recorder (Gloo, NCCL). The exit code
    is 0 if nothing failed and 1 otherwise.
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
    """Print a verdict, the cause first."""
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
        console.print(f"Remedy: {finding.remedy}", markup=False)
