"""The command `gradwire run`: torchrun's own parser and agent, with gradwire's options beside."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import click

from gradwire.errors import ArgumentError

_DESCRIPTION = """\
Run a training program in several processes, as torchrun does, and put gradwire behind its names,
without an edit. The options are torchrun's, and gradwire's own below. With --elastic before all
other options, ranks are the members of an elastic run: see `gradwire run --elastic --help`."""
_USAGE = "gradwire run [OPTIONS] PROGRAM [ARGUMENTS...]"
_TORCHRUN = "Those that are used most; `torchrun --help` shows all that can be given here."
_OFTEN_USED = {
    "--nproc-per-node": "number of processes on this host; or cpu, gpu, auto",
    "--nnodes": "number of hosts, or MIN:MAX",
    "--node-rank": "this host's number, without a rendezvous that assigns it",
    "--rdzv-backend": "how hosts find each other: c10d, static",
    "--rdzv-endpoint": "HOST:PORT, the same on all hosts",
    "--rdzv-id": "name of the job, the same on all hosts",
    "--standalone": "one host, on a free port",
    "--max-restarts": "restarts of all ranks after one has failed",
    "-m": "PROGRAM is a module",
}
_EXAMPLES = """\
examples:
  gradwire run --nproc-per-node 2 --backend shm --compat train.py --epochs 3
      DistributedDataParallel and Gloo are gradwire's, in a program that names PyTorch's
  gradwire run --nproc-per-node 2 --recorder dumps train.py
      if a rank fails, dies or hangs: gradwire explain dumps
  gradwire run --nproc-per-node 2 --compat --timeline run.json train.py
      where the time goes: gradwire timeline run.json
  gradwire run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 train.py
      on two hosts; the command is the same on both

Other launchers (Ray, Slurm, Lightning's) take the same from the environment: GRADWIRE_COMPAT=1,
GRADWIRE_BACKEND=shm, GRADWIRE_RECORDER=DIRECTORY, GRADWIRE_TIMELINE=FILE."""
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
        click.echo(short_help())
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


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; ends the interpreter where it is wrong, as argparse does."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog, parser.usage, parser.description = "gradwire run", _USAGE, _DESCRIPTION
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False  # --rec would be another option when torchrun gets one
    _add_own(parser)
    return parser.parse_args(list(arguments))


def _add_own(parser: argparse.ArgumentParser) -> None:
    """Add gradwire's options."""
    ours = parser.add_argument_group("gradwire")
    ours.add_argument(
        "--backend", choices=["shm"], help="put shm in Gloo's place, for the ranks of one host"
    )
    ours.add_argument("--compat", action="store_true", help="put gradwire behind PyTorch's names")
    ours.add_argument(
        "--recorder",
        metavar="DIRECTORY",
        help="where all ranks write what they did, when one fails, hangs or ends",
    )
    ours.add_argument(
        "--timeline", metavar="FILE", help="write a trace of all ranks to this file, as JSON"
    )


def short_help() -> str:
    """Return a help text that needs no PyTorch, whose parser has all of torchrun's options."""
    parser = argparse.ArgumentParser(
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    _add_own(parser)
    theirs = parser.add_argument_group("torchrun", _TORCHRUN)
    for option, text in _OFTEN_USED.items():
        theirs.add_argument(option, metavar="", help=text)
    return parser.format_help()
