"""The command `gradwire plan`: from options to a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click
import torch
from rich.console import Console

from gradwire.cli.plan.predict import measure, predict
from gradwire.cli.plan.profile import Profile, given, load_factory, profile
from gradwire.cli.plan.report import draw, table
from gradwire.errors import ArgumentError
from gradwire.hooks.auto.candidates import PLAIN, candidate

__all__ = ["plan"]

HOOKS = ["bf16", "int8", "int4", "low_rank", "top_k", "sign"]
RANKS = (2, 8, 64, 512, 4096)
RATES = (100.0, 1000.0, 10_000.0, 100_000.0)


@click.command(context_settings={"show_default": True})
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option(
    "--ranks", multiple=True, type=click.IntRange(2, 4096), default=RANKS, help="How many; repeat."
)
@click.option(
    "--mbit",
    multiple=True,
    type=click.FloatRange(min=0, min_open=True),
    default=RATES,
    help="Rates of links in Mbit/s; repeat.",
)
@click.option(
    "--latency-us",
    type=click.FloatRange(min=0),
    default=100.0,
    help="What a message takes beside its bytes, in µs.",
)
@click.option(
    "--hook",
    "hooks",
    multiple=True,
    type=click.Choice(HOOKS),
    default=HOOKS,
    help="Hooks beside the plain mean; repeat.",
)
@click.option("--forward-ms", type=click.FloatRange(min=0), help="Instead of measuring it.")
@click.option("--backward-ms", type=click.FloatRange(min=0), help="Instead of measuring it.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    show_default=False,
    help="Draw it, too: a file that ends with .svg or .png.",
)
def plan(
    factory: str,
    ranks: Sequence[int],
    mbit: Sequence[float],
    latency_us: float,
    hooks: Sequence[str],
    forward_ms: float | None,
    backward_ms: float | None,
    plot: Path | None,
) -> None:
    """Predict a training step on other links, with more ranks, by each communication hook.

    FACTORY() returns a module, or a module and the inputs of one rank's forward: then forward and
    backward are measured here, in one thread. What hooks compute is measured here in any case.
    Ranks of one host count as one where the hierarchical group or across_hosts adds up their
    gradients first.
    """
    if plot is not None and find_spec("matplotlib") is None:
        raise click.UsageError('--plot needs matplotlib: pip install "gradwire[plot]"')
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = _profile(factory, forward_ms, backward_ms)
        candidates = [candidate(PLAIN), *map(candidate, dict.fromkeys(hooks))]
        speeds = measure(found, candidates)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    finally:
        torch.set_num_threads(threads)
    rows = [
        predict(found, candidates, speeds, ranks=n, mbit=rate, latency=latency_us / 1e6)
        for rate in sorted(set(mbit))
        for n in sorted(set(ranks))
    ]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(table(rows, found))
    if plot is not None:
        draw(rows, plot)
        console.print(f"{plot} written")


def _profile(factory: str, forward_ms: float | None, backward_ms: float | None) -> Profile:
    """Measured, or as given."""
    model, inputs = load_factory(factory)
    if backward_ms is not None:
        return given(model, (forward_ms or 0.0) / 1e3, backward_ms / 1e3)
    if inputs is None:
        raise ArgumentError(
            f"{factory!r} returns no inputs: return (module, inputs), or give --backward-ms and "
            "--forward-ms"
        )
    return profile(model, inputs)
