"""The command `gradwire timeline`: summary and page of a trace."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradwire.errors import ArgumentError

if TYPE_CHECKING:  # imported when the command runs, so that its help does not import PyTorch
    from rich.console import Console
    from rich.table import Table

    from gradwire.recorder.trace import Summary

_FILE = click.Path(path_type=Path, dir_okay=False)
_WIDE = 100  # columns of a terminal in which the table has space between its own
_SHOWN = 5  # number of buckets shown

EXAMPLES = """\b
Examples:
    gradwire run --nproc-per-node 2 --compat --timeline run.json train.py
    gradwire timeline run.json
    gradwire timeline run.json --html run.html
    gradwire timeline run.json --json | jq .ranks
"""


@click.command(epilog=EXAMPLES)
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--html", type=_FILE, help="Write a self-contained HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def timeline(trace: Path, html: Path | None, as_json: bool) -> None:
    """Summarize TRACE, written by gradwire.timeline() or `gradwire run --timeline`.

    Prints exposed communication per step, the slowest buckets, the rank that others waited for, and
    the bytes that each rank sent. Perfetto (https://ui.perfetto.dev) opens TRACE directly.
    """
    from rich.console import Console

    from gradwire.recorder.trace import page_of, read_trace, summarize

    try:
        data = read_trace(trace)
        summary = summarize(data)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    try:
        if html is not None:
            html.write_text(page_of(data, trace.name), encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"cannot write the file: {error}") from error
    if as_json:
        click.echo(json.dumps(asdict(summary), indent=2))
    else:
        _show(Console(highlight=False), summary)


def _show(console: Console, summary: Summary) -> None:
    from gradwire.recorder.trace import HEADINGS

    ranks = _table(*HEADINGS)
    ranks.padding = (0, int(console.width >= _WIDE))
    for rank in summary.ranks:
        ranks.add_row(*rank.row)
    console.print(summary.verdict, style="bold")
    console.print()
    console.print(ranks)
    if summary.buckets:
        console.print()
        console.print(_buckets(summary))
    if summary.left_out:
        console.print(
            f"\n[yellow]Truncated[/]: {summary.left_out:,} records at the end are missing, since "
            "each rank keeps its first 200,000."
        )
    console.print(
        "\nTimes in ms: medians per step, and sums over the run. Clock error: "
        f"{summary.clock_error_us:.3g} µs.",
        style="dim",
    )


def _buckets(summary: Summary) -> Table:
    from rich.markup import escape

    table = _table("bucket", "MB", "packing", "in flight", "waited for it", "parameters")
    for bucket in summary.buckets[:_SHOWN]:
        more = f", … ({len(bucket.parameters)})" if bucket.parameters[3:] else ""
        times = (bucket.mb, bucket.packing, bucket.in_flight, bucket.waiting)
        names = escape(", ".join(bucket.parameters[:3]) + more)
        table.add_row(str(bucket.index), *(f"{time:.2f}" for time in times), names)
    return table


def _table(first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name == "parameters" else "right")
    return table
