"""The command `gradwire run`: torchrun's own parser and agent, with gradwire's options beside."""

from __future__ import annotations

import sys

import click

from gradwire.cli.run.options import SHORT_HELP, parse_options
from gradwire.errors import ArgumentError

__all__ = ["run"]

ELASTIC = "--elastic"
_FAILED = 1
_INTERRUPTED = 130


def _run_elastic(arguments: tuple[str, ...]) -> int:
    from gradwire.elastic.__main__ import main as elastic_main

    try:
        return elastic_main(arguments, prog=f"gradwire run {ELASTIC}")
    except KeyboardInterrupt:
        return _INTERRUPTED


@click.command(
    add_help_option=False,  # the parser has its own, with torchrun's options
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Run a training program as torchrun does, unedited, on gradwire.

    With --elastic before all other options, as the members of an elastic run.
    """
    if arguments and arguments[0] == ELASTIC:
        sys.exit(_run_elastic(arguments[1:]))
    if not arguments:
        raise click.UsageError("PROGRAM is missing: name a Python file, or -m and a module")
    if arguments[0] in ("-h", "--help"):
        click.echo(SHORT_HELP)
        return
    options = parse_options(arguments)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from gradwire.cli.run.launch import run_program

    try:
        run_program(options)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    except ChildFailedError as error:
        click.echo(str(error), err=True)
        if options.recorder:
            click.echo(f"See why:  gradwire explain {options.recorder}", err=True)
        sys.exit(_FAILED)
    except SignalException as error:
        click.echo("Interrupted; every rank of this host has been ended.", err=True)
        sys.exit(128 + error.sigval)
