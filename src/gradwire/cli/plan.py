"""The command `gradwire plan`: from options to a table."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from gradwire.errors import ArgumentError

if TYPE_CHECKING:  # imported when the command runs, so that --help does not import PyTorch
    from torch import nn
    from torch.optim import Optimizer

    from gradwire.tuning import Candidate
    from gradwire.tuning.plan import Profile, Row

    Made: TypeAlias = tuple[nn.Module, tuple[Any, ...] | None, Optimizer | None]


HOOKS = ["bf16", "int8", "int4", "low_rank", "top_k", "sign"]
RANKS = (2, 8, 64, 512, 4096)
RATES = (100.0, 1000.0, 10_000.0, 100_000.0)


@click.command(context_settings={"show_default": True})
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option(
    "--ranks",
    multiple=True,
    type=click.IntRange(2, 4096),
    default=RANKS,
    help="Number of ranks; may be repeated.",
)
@click.option(
    "--mbit",
    multiple=True,
    type=click.FloatRange(min=0, min_open=True),
    default=RATES,
    help="Rate of the link in Mbit/s; may be repeated.",
)
@click.option(
    "--latency-us",
    type=click.FloatRange(min=0),
    default=100.0,
    help="Latency of a message in µs.",
)
@click.option(
    "--hook",
    "hooks",
    multiple=True,
    type=click.Choice(HOOKS),
    default=HOOKS,
    help="Hook to compare with the plain mean; may be repeated.",
)
@click.option(
    "--forward-ms", type=click.FloatRange(min=0), help="Time of forward, instead of measuring it."
)
@click.option(
    "--backward-ms", type=click.FloatRange(min=0), help="Time of backward, instead of measuring it."
)
@click.option(
    "--here",
    is_flag=True,
    help="Measure the link between the ranks that a launcher has started.",
)
@click.option("--backend", default="shm", help="Backend of the group that --here measures.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    show_default=False,
    help="File for a plot, ending with .svg or .png.",
)
def plan(
    factory: str,
    ranks: Sequence[int],
    mbit: Sequence[float],
    latency_us: float,
    hooks: Sequence[str],
    forward_ms: float | None,
    backward_ms: float | None,
    here: bool,
    backend: str,
    plot: Path | None,
) -> None:
    """Predict the time of a training step for links, numbers of ranks and communication hooks.

    FACTORY() returns a module, or a tuple of a module, the inputs of one rank's forward, and
    optionally an optimizer. Forward, backward and update are then measured in this process, in one
    thread. The computing time of hooks is always measured. Count the ranks of one host as one if
    the hierarchical group or across_hosts sums their gradients first.

    With --here, start the command on every rank with `gradwire run` or torchrun. It then measures a
    step while all ranks compute, and collectives on the link between them.
    """
    if plot is not None:
        _check_plot(plot)
    if here and "RANK" not in os.environ:
        raise click.UsageError("--here needs ranks: start each with gradwire run or torchrun")
    import torch

    from gradwire.tuning import PLAIN, candidate
    from gradwire.tuning.plan import load_factory

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    candidates = [candidate(PLAIN), *map(candidate, dict.fromkeys(hooks))]
    try:
        made = load_factory(factory)
        if here:
            found, rows = _here(backend, factory, made, candidates)
        else:
            found = _profile(factory, made, forward_ms, backward_ms)
            links = [(rate, latency_us / 1e6) for rate in sorted(set(mbit))]
            rows = _predicted(found, candidates, links, sorted(set(ranks)))
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    finally:
        torch.set_num_threads(threads)
    if rows:  # rank 0 prints
        _show(rows, found, plot)


def _show(rows: Sequence[Row], found: Profile, plot: Path | None) -> None:
    from rich.console import Console

    from gradwire.tuning.plan import draw, table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(table(rows, found))
    if plot is not None:
        draw(rows, plot)
        console.print(f"{plot} written", markup=False)


def _check_plot(plot: Path) -> None:
    if find_spec("matplotlib") is None:
        raise click.UsageError('--plot needs matplotlib: pip install "gradwire[plot]"')
    if plot.suffix not in (".svg", ".png"):
        raise click.UsageError(f"--plot is {str(plot)!r}: pass a file that ends with .svg or .png")
    if not plot.parent.is_dir():
        raise click.UsageError(f"--plot is {str(plot)!r}, whose folder does not exist: create it")


def _predicted(
    found: Profile,
    candidates: Sequence[Candidate],
    links: Sequence[tuple[float, float]],
    ranks: Sequence[int],
) -> list[Row]:
    """Return a row for each link, of a rate in Mbit/s and a latency in s, and number of ranks."""
    from gradwire.tuning import Cluster, Link
    from gradwire.tuning.plan import measure, predict

    speeds = measure(found, candidates)
    return [
        predict(found, candidates, speeds, Cluster(n, Link(latency, rate * 1e6 / 8)), rate)
        for rate, latency in links
        for n in ranks
    ]


def _profile(
    factory: str, made: Made, forward_ms: float | None, backward_ms: float | None
) -> Profile:
    """Return the measured profile, or one with the given times."""
    from gradwire.tuning.plan import given, profile

    model, inputs, optimizer = made
    if backward_ms is not None:
        return given(model, (forward_ms or 0.0) / 1e3, backward_ms / 1e3)
    return profile(model, _inputs(factory, inputs), optimizer)


def _here(
    backend: str, factory: str, made: Made, candidates: Sequence[Candidate]
) -> tuple[Profile, list[Row]]:
    """Return the profile, and on rank 0 the row of the measured link."""
    import torch.distributed as dist

    from gradwire.tuning.plan import predict_here, profile_here

    model, inputs, optimizer = made
    inputs = _inputs(factory, inputs)
    dist.init_process_group(backend)
    try:
        group = dist.group.WORLD
        assert group is not None
        found = profile_here(group, model, inputs, optimizer)
        row = predict_here(group, found, candidates)
        return found, [row] if group.rank() == 0 else []
    finally:
        dist.destroy_process_group()


def _inputs(factory: str, inputs: tuple[Any, ...] | None) -> tuple[Any, ...]:
    if inputs is None:
        raise ArgumentError(
            f"{factory!r} returns no inputs: return (module, inputs), or pass --backward-ms and "
            "--forward-ms"
        )
    return inputs
