"""The command `gradwire explain`: rank, line and parameter that caused a failure, on one screen."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.errors import ArgumentError

if TYPE_CHECKING:  # imported when the command runs, so that its help does not import PyTorch
    from rich.console import Console

    from gradwire.recorder.verdict import Finding, Verdict

_FOUND = 1  # exit code if something failed
_INTERRUPTED = 130
_SHOWN = 3  # number of findings shown; later ones are mostly consequences

EXAMPLES = """\b
Examples:
    gradwire explain --live all          # a job that hangs on this host
    gradwire run --nproc-per-node 4 --recorder dumps train.py
    gradwire explain dumps
    gradwire explain /tmp --prefix nccl_trace_rank_    # dumps of PyTorch's flight recorder
    gradwire explain dumps --json | jq .findings[0].ranks
"""


@click.command(epilog=EXAMPLES)
@click.argument(
    "directory", type=click.Path(path_type=Path, exists=True, file_okay=False), required=False
)
@click.option("--prefix", help="Prefix of file names.  [default: the most common one]")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option(
    "--live",
    metavar="DIR|PID|all",
    help="Ask running ranks first: those that write to DIR, of PID's job, or all of this host.",
)
@click.option(
    "--every", type=float, metavar="SECONDS", help="Repeat --live with this interval until Ctrl-C."
)
def explain(
    directory: Path | None, prefix: str | None, as_json: bool, live: str | None, every: float | None
) -> None:
    """Name the rank and the cause of a failure from the dumps in DIRECTORY.

    Reads dumps of gradwire's recorder and of PyTorch's flight recorder (Gloo, NCCL). With --live,
    asks a job that runs or hangs, and lets it go on. The exit code is 0 if nothing failed and 1
    otherwise.
    """
    if (directory is None) == (live is None):
        raise click.UsageError("pass DIRECTORY, or --live with a directory, a process ID or all")
    if every is not None and (live is None or every <= 0):
        raise click.UsageError("--every is the interval of --live: pass a positive number with it")
    try:
        if live is None:
            assert directory is not None
            sys.exit(_explain(directory, prefix, as_json))
        while True:
            code = _explain_live(live, as_json)
            if every is None:
                sys.exit(code)
            time.sleep(every)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _explain(directory: Path, prefix: str | None, as_json: bool, *, live: bool = False) -> int:
    from rich.console import Console

    from gradwire.recorder.verdict import explain as explain_dumps

    verdict = explain_dumps(directory, prefix, live=live)
    if as_json:
        click.echo(json.dumps(verdict.as_dict(), indent=2))
    else:
        show_verdict(Console(highlight=False), verdict)
    return 0 if verdict.healthy else _FOUND


def _explain_live(target: str, as_json: bool) -> int:
    from gradwire.cli import live

    found = live.directories(target)
    code = 0
    for path in found:
        live.ask(path)
        if not as_json:
            click.echo(f"{path}:")
        code = max(code, _explain(path, None, as_json, live=True))
    if found:
        return code
    pids = [int(target)] if target.isdecimal() else live.ranks_without_recorder()
    for pid in pids:
        click.echo(live.without_recorder(pid))
    if not pids:
        raise ArgumentError(
            "no process of this user on this host records, or is a rank: start the job with "
            "`gradwire run`, or with GRADWIRE_RECORDER=dumps in its environment"
        )
    return code


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
    for number, remedy in enumerate(finding.remedies):
        console.print(f"{'Remedy:' if not number else '       '} {remedy}", markup=False)
