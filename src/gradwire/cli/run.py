"""The command `gradwire run`: torchrun's parser and agent, with additional options."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from gradwire.errors import ArgumentError, printable

_MISSING = "PROGRAM is missing: pass a Python file, or -m and a module"
_ELASTIC = "--elastic"
_FAILED, _INTERRUPTED = 1, 130


@click.command(
    add_help_option=False,  # --help after another option is the parser's or the program's
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", metavar="PROGRAM [ARGUMENTS...]", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Run an unmodified training program on gradwire, as torchrun does.

    The options are those of torchrun and of gradwire. With --elastic as the first option, ranks are
    members of an elastic run: see `gradwire run --elastic --help`.

    \b
    gradwire:
      --backend shm         replace Gloo by shm for the ranks of a host
      --compat              replace PyTorch's classes and functions by gradwire's
      --recorder DIRECTORY  directory of dumps, which all ranks write on failures
                            and at the end; by default a temporary one, kept after
                            a failure; 0 for none
      --timeline FILE       write a trace of all ranks to this JSON file

    \b
    torchrun (the most common options; `torchrun --help` lists all of them):
      --nproc-per-node      number of processes on this host; or cpu, gpu, auto
      --nnodes              number of hosts, or MIN:MAX
      --node-rank           number of this host, if the rendezvous does not assign it
      --rdzv-backend        rendezvous of hosts: c10d or static
      --rdzv-endpoint       HOST:PORT, the same on all hosts
      --rdzv-id             name of the job, the same on all hosts
      --standalone          one host, on a free port
      --max-restarts        number of restarts of all ranks after a failure
      -m                    run PROGRAM as a module

    \b
    examples:
      gradwire run --nproc-per-node 2 --backend shm --compat train.py --epochs 3
          use gradwire's DistributedDataParallel and shm in a program for PyTorch
      gradwire run --nproc-per-node 2 train.py
          print which rank caused a failure, and why; while it hangs:
          gradwire explain --live all
      gradwire run --nproc-per-node 2 --compat --timeline run.json train.py
          write a timeline for: gradwire timeline run.json
      gradwire run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 train.py
          run on two hosts, with the same command on both

    \b
    With other launchers (Ray, Slurm, Lightning), set environment variables:
    GRADWIRE_COMPAT=1, GRADWIRE_BACKEND=shm, GRADWIRE_RECORDER=DIRECTORY,
    GRADWIRE_TIMELINE=FILE.
    """
    if arguments and arguments[0] == _ELASTIC:
        sys.exit(_run_elastic(arguments[1:]))
    if not arguments:
        raise click.UsageError(_MISSING)
    if arguments[0] in ("-h", "--help"):
        click.echo(context.get_help())
        return
    options = parse_options(arguments)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from gradwire.cli.run_launch import run_program

    chosen = options.recorder
    try:
        run_program(options)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    except ChildFailedError as error:
        click.echo("\n".join(map(printable, str(error).splitlines())), err=True)
        _show_verdict(options.recorder, error.get_first_failure()[0], kept=bool(chosen))
        sys.exit(_FAILED)
    except SignalException as error:
        click.echo("Interrupted; all ranks of this host have been stopped.", err=True)
        _show_verdict(options.recorder, kept=bool(chosen), live=True)
        sys.exit(128 + error.sigval)
    if options.recorder and options.recorder != chosen:
        shutil.rmtree(options.recorder, ignore_errors=True)


def _run_elastic(arguments: tuple[str, ...]) -> int:
    from gradwire.cli.run_launch import empty
    from gradwire.elastic.__main__ import main

    try:
        return main(arguments, prog=f"gradwire run {_ELASTIC}", prepare=empty)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _show_verdict(
    directory: str | None, torchruns: int | None = None, *, kept: bool, live: bool = False
) -> None:
    """Print the verdict on a failed run, last, where it is seen first; keep records of a cause."""
    if not directory:
        return
    from rich.console import Console

    from gradwire.cli.explain import show_verdict
    from gradwire.recorder.verdict import explain

    try:
        verdict = explain(Path(directory), live=live)
    except ArgumentError:  # such as a program that fails before it imports PyTorch
        healthy = True
    else:
        show_verdict(Console(highlight=False, stderr=True), verdict, torchruns)
        healthy = verdict.healthy
    if kept or not healthy:
        text = f"The records are kept; to read them again:  gradwire explain {directory}"
        click.echo(text, err=True)
    else:
        shutil.rmtree(directory, ignore_errors=True)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog, parser.usage = "gradwire run", "gradwire run [OPTIONS] PROGRAM [ARGUMENTS...]"
    parser.allow_abbrev = False  # abbreviations would change with torchrun's options
    parser.error = _refuse  # type: ignore[method-assign]
    parser.add_argument("--backend", choices=["shm"])
    parser.add_argument("--compat", action="store_true")
    parser.add_argument("--recorder", metavar="DIRECTORY")
    parser.add_argument("--timeline", metavar="FILE")
    parser.add_argument(_ELASTIC, action="store_true")
    options = parser.parse_args(list(arguments))
    if options.elastic:
        _refuse(f"{_ELASTIC} is not the first option: write `gradwire run {_ELASTIC} ...`")
    return options


def _refuse(message: str) -> NoReturn:
    raise click.UsageError(_MISSING if "training_script" in message else message)
