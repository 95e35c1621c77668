"""The command `gradwire demo`: a first run, compared with one process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gradwire.cli.demo_training import Result

_FAILED, _INTERRUPTED = 1, 130
_BATCH = 64
_BACKEND = "shm" if sys.platform == "linux" else "gloo"
_SECONDS = 3600.0
TOLERANCE = 1e-5

INTRODUCTION = """\
gradwire demo: one network in {} processes on {}, gradients averaged
  data     1437 handwritten digits, 8 x 8 pixels, to learn from; 360 to test
  network  2 convolutions and 2 linear layers
  twin     the same training in one process, to compare with

   epoch     loss   test accuracy   largest difference to the twin"""
EXPLANATION = """
Sums in different orders round differently, in float32 at the 7th digit. A relative difference (norm
of the difference over norm of the parameter) up to 1e-05 counts as rounding; a gradient lost in a
single step would cause 1e-04 or more."""


@click.command(context_settings={"show_default": True})
@click.option("--nproc", type=click.IntRange(1, _BATCH), default=2, help="Number of processes.")
@click.option(
    "--backend", type=click.Choice(["shm", "gloo"]), default=_BACKEND, help="Backend of the group."
)
@click.option(
    "--epochs", type=click.IntRange(min=1), default=12, help="Number of passes over the data."
)
def demo(nproc: int, backend: str, epochs: int) -> None:
    """Train a small network on real data in several processes.

    Compares the result with training in one process. The exit code is 1 if the parameters differ by
    more than rounding.
    """
    from gradwire.cli.demo_training import run
    from gradwire.errors import GradwireError
    from gradwire.testing import run_ranks

    click.echo(INTRODUCTION.format(nproc, backend))
    try:
        results = run_ranks(run, nproc, backend=backend, timeout=_SECONDS, args=(epochs, _BATCH))
    except GradwireError as error:
        click.echo(f"gradwire demo: {error}", err=True)
        sys.exit(_FAILED)
    except KeyboardInterrupt:
        click.echo("Interrupted; every process of the demo has been stopped.", err=True)
        sys.exit(_INTERRUPTED)
    click.echo(report(results))
    sys.exit(_FAILED if failures(results) else 0)


def failures(results: list[Result]) -> list[str]:
    """Return descriptions of errors in the ranks' results; empty if they are right."""
    found = []
    if len({result.digest for result in results}) > 1:
        found.append("the processes ended with different parameters")
    relative = results[0].relative
    if not relative <= TOLERANCE:  # NaN included
        found.append(
            f"the difference to one process ({relative:.1e}) is more than rounding "
            f"({TOLERANCE:.0e})"
        )
    return found


def report(results: list[Result]) -> str:
    """Return the lines that are printed at the end."""
    first = results[0]
    same = "equal, bit for bit" if len({r.digest for r in results}) == 1 else "different"
    rounding = "rounding" if first.relative <= TOLERANCE else "more than rounding"
    rows = [
        ("parameters in all processes", same),
        ("relative difference to the twin", f"{first.relative:.1e}: {rounding}"),
    ]
    lines = ["", *(f"  {name:<33}{found}" for name, found in rows), EXPLANATION]
    return "\n".join([*lines, *(f"\nFAILED: {failure}" for failure in failures(results))])
