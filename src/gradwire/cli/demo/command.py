"""The command `gradwire demo`, which launches processes, or is one of torchrun's processes.

In both cases the messages of rank 0 are shown.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gradwire.cli.demo.options import (
    DEVICES,
    HOOK_NAMES,
    PROCESSES,
    REPLICAS,
    DemoOptions,
    check_backend,
)
from gradwire.errors import ArgumentError

if TYPE_CHECKING:  # imported when the command runs, so that its help does not import PyTorch
    from gradwire.cli.launch import RankEnv, Send

_POSITIVE = click.IntRange(min=1)
_USAGE = 2  # click's exit code for wrong options
_INTERRUPTED = 130  # exit code that shells report after Ctrl-C


@click.command(context_settings={"show_default": True})
@click.option(
    "--mode",
    type=click.Choice([PROCESSES, DEVICES]),
    default=PROCESSES,
    help="DistributedDataParallel in processes, or DataParallel on 4 replicas in one process.",
)
@click.option(
    "--nproc", type=_POSITIVE, show_default="2, or torchrun's", help="Number of processes."
)
@click.option("--backend", default="shm", help="Backend of torch.distributed.")
@click.option("--epochs", type=_POSITIVE, default=12, help="Number of passes over the data.")
@click.option("--hook", type=click.Choice(HOOK_NAMES), default="none", help="Communication hook.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of parameters and order."
)
@click.option("--batch-size", type=int, default=64, help="Images per step, over all processes.")
@click.pass_context
def demo(context: click.Context, /, mode: str, nproc: int | None, **others: Any) -> None:
    """Train a small network on real data, with several processes or several replicas.

    Compares the result with training in one process, and the time per step with PyTorch's
    DistributedDataParallel. Also runs under torchrun:

        torchrun --nproc-per-node 2 -m gradwire demo

    With --mode devices, one process trains with DataParallel on 4 replicas on the CPU.
    """
    from gradwire.cli.launch import RankEnv, exit_rank

    env = None
    try:
        env = RankEnv.from_environment(os.environ)
        if mode == DEVICES:
            _refuse_processes(context, env)
            options = DemoOptions(REPLICAS, mode=DEVICES, **others)
        else:
            options = DemoOptions(_process_count(nproc, env), **others)
            check_backend(options.backend, options.shares if env is None else env.local_size)
    except ArgumentError as error:
        if env is not None and env.rank != 0:
            sys.exit(_USAGE)  # only rank 0 shows the error
        raise click.UsageError(str(error)) from error
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    exitcode = _run(options, env)
    if env is not None:
        exit_rank(exitcode)
    sys.exit(exitcode)


def _refuse_processes(context: click.Context, env: RankEnv | None) -> None:
    """Reject options for processes in mode "devices"."""
    for name in ("nproc", "backend", "hook"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ArgumentError(
                f"--{name} is {context.params[name]}, but --mode devices runs in one process: "
                f"omit --{name}"
            )
    if env is not None:
        raise ArgumentError(
            f"WORLD_SIZE is {env.world_size}, but --mode devices runs in one process: start it "
            "without torchrun"
        )


def _run(options: DemoOptions, env: RankEnv | None) -> int:
    """Run the demo, show results and errors, and return the exit code."""
    from gradwire.cli.demo.rank import run_devices, run_rank
    from gradwire.cli.launch import RankFailure, launch

    try:
        if options.mode == DEVICES:
            return _show(options, partial(run_devices, options))
        if env is None:
            return _show(options, partial(launch, partial(run_rank, options), options.shares))
        if env.rank == 0:
            return _show(options, partial(_run_here, options, env))
        _run_here(options, env, lambda message: None)
    except RankFailure as failure:
        click.echo(f"{failure.details}gradwire demo: {failure}", err=True)
        return 1
    except KeyboardInterrupt:
        if options.mode == DEVICES:
            click.echo("Interrupted.", err=True)
        elif env is None or env.rank == 0:
            click.echo("Interrupted; every process of the demo has been stopped.", err=True)
        return _INTERRUPTED
    return 0


def _process_count(nproc: int | None, env: RankEnv | None) -> int:
    if env is None:
        return 2 if nproc is None else nproc
    if nproc not in (None, env.world_size):
        raise ArgumentError(
            f"--nproc is {nproc}, but WORLD_SIZE is {env.world_size}: omit --nproc under torchrun"
        )
    return env.world_size


def _run_here(options: DemoOptions, env: RankEnv, send: Send) -> None:
    """Run this process's rank."""
    from gradwire.cli.demo.rank import run_rank
    from gradwire.cli.launch import RankFailure

    try:
        run_rank(options, env, send)
    except Exception as error:
        raise RankFailure.of(env.rank, error) from error


def _show(options: DemoOptions, run: Callable[[Send], None]) -> int:
    """Show the messages and the result of `run`; return exit code 1 if the result is wrong."""
    from rich.console import Console

    from gradwire.cli.demo.rank import Result
    from gradwire.cli.demo.view import View, failures, show_result

    console = Console(highlight=False)
    results: list[Result] = []
    view = View(console, options)

    def receive(message: Any) -> None:
        if isinstance(message, Result):
            results.append(message)
        else:
            view.show(message)

    with view.progress:
        run(receive)
    (result,) = results
    show_result(console, result, options)
    return 1 if failures(result, options) else 0
