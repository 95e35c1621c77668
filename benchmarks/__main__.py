"""The command: `python -m benchmarks ddp` and others; `tables` and `plot` for the pages."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist
from rich.console import Console

from benchmarks import (
    all_collectives,
    broadcast,
    collectives,
    ddp,
    devices,
    devices_gpu,
    differentiable,
    gpu,
    hooks,
    links,
    loss,
    mpi,
    optim,
    overhead,
    recorder,
    sites,
)
from benchmarks.benchmark import Benchmark
from benchmarks.guard import guard
from benchmarks.hosts import why_no_hosts
from benchmarks.options import OWN_WORLDS, Options
from benchmarks.report import conditions, figures, terminal
from benchmarks.results import Result
from benchmarks.tables import PAGES, PLOT, RESULTS, rewritten

BENCHMARKS: dict[str, Benchmark[Any]] = {
    benchmark.name: benchmark
    for benchmark in (
        broadcast.BENCHMARK,
        replace(collectives.BENCHMARK, in_full=all_collectives.BENCHMARK),
        ddp.BENCHMARK,
        devices.BENCHMARK,
        devices_gpu.BENCHMARK,
        differentiable.BENCHMARK,
        gpu.BENCHMARK,
        hooks.BENCHMARK,
        links.BENCHMARK,
        loss.BENCHMARK,
        mpi.BENCHMARK,
        optim.BENCHMARK,
        overhead.BENCHMARK,
        recorder.BENCHMARK,
        sites.BENCHMARK,
    )
}


@click.group()
def main() -> None:
    """Gradwire's speed beside its peers', measured in one launch, alternating."""


@main.command()
@click.option("--check", is_flag=True, help="Write nothing; fail if a page is not up to date.")
def tables(check: bool) -> None:
    """Write the results' tables into README.md and the pages of docs/benchmarks."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        current = rewritten(text, RESULTS, BENCHMARKS)
        if check and current != text:
            raise click.ClickException(f"{path.name} is not up to date: run without --check")
        if current != text:
            path.write_text(current, encoding="utf-8")
            click.echo(f"{path.name} rewritten")


@main.command("guard")
def guard_ratios() -> None:
    """Measure the ten most important ratios again, and compare them with the committed ones."""
    found = []
    for comparison in guard():
        found.append(comparison)
        click.echo(comparison)
    if worse := [c.name for c in found if c.worse]:
        raise click.ClickException(f"{len(worse)} of {len(found)} are worse; on an idle host, too?")


@main.command()
@click.argument("name", default="ddp_shm")
@click.option("--svg", default=PLOT, type=click.Path(dir_okay=False, path_type=Path))
def plot(name: str, svg: Path) -> None:
    """Draw the first measure of results/NAME.json, a bar for each contender, as an SVG."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise click.BadParameter(f"there are no results {path.name}; run with --json {path}")
    from benchmarks.plot import bars  # matplotlib is not needed to measure

    svg.write_text(bars(Result.read(path)), encoding="utf-8")
    click.echo(f"{svg} written")


def _command(benchmark: Benchmark[Any]) -> click.Command:
    names = [case.name for case in benchmark.cases]
    if benchmark.in_full:
        names += [case.name for case in benchmark.in_full.cases]

    @click.option("--rounds", default=benchmark.rounds, type=click.IntRange(min=1))
    @click.option("--only", multiple=True, type=click.Choice(names), help="Repeat for several.")
    @click.option(
        "--json",
        type=click.Path(dir_okay=False, writable=True, path_type=Path),
        callback=_writable,
        help="Write the results to this file too.",
    )
    def command(json: Path | None, **options: Any) -> None:
        chosen = benchmark
        if benchmark.one_process:
            options["world_size"] = 1
        if benchmark.over_hosts:
            options |= {"world_size": sum(options["hosts"]), "backend": "shm"}
        if benchmark.own_worlds:
            options["world_size"] = OWN_WORLDS
        if (benchmark.over_hosts or benchmark.own_worlds) and (reason := why_no_hosts()):
            click.echo(f"skipped: {reason}")
            return
        if options.pop("all", False) and benchmark.in_full:
            chosen, options["world_size"] = benchmark.in_full, OWN_WORLDS
        result = chosen.run(Options(**options))
        if json:
            result.write(json)
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(terminal(figures(result), chosen.about, conditions(result)))
        if chosen.verdict:
            console.print(chosen.verdict(result.cases))

    if benchmark.over_hosts:
        command = click.option(
            "--hosts", default="2,2", callback=_hosts, help="How many ranks each host has."
        )(command)
    elif not (benchmark.one_process or benchmark.own_worlds):
        for option in (
            click.option("--world-size", default=2, type=click.IntRange(min=2), help="Processes."),
            click.option(
                "--busy", default=0, type=click.IntRange(min=0), help="Processes beside them."
            ),
            click.option(
                "--backend", default="gloo", callback=_cpu_backend, help="Of torch.distributed."
            ),
        ):
            command = option(command)
    if benchmark.in_full:
        command = click.option("--all", is_flag=True, help=f"{benchmark.in_full.about}.")(command)
    return click.command(
        benchmark.name, help=benchmark.about, context_settings={"show_default": True}
    )(command)


def _writable(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Any:
    """Says before the measuring, not after it, that its results cannot be kept."""
    if value and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {value.absolute().parent}")
    return value


def _hosts(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    ranks = [int(part) if part.isdecimal() else 0 for part in value.split(",")]
    if len(ranks) < 2 or min(ranks) < 1:
        raise click.BadParameter(f"{value!r}: give numbers such as 2,2, one for each host")
    return ranks


def _cpu_backend(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    carries = dist.Backend.backend_capability.get(value, [])
    if "cpu" not in carries:
        able = [name for name, on in dist.Backend.backend_capability.items() if "cpu" in on]
        raise click.BadParameter(f"{value!r} carries no CPU tensors here: give one of {able}")
    return value


for _benchmark in BENCHMARKS.values():
    main.add_command(_command(_benchmark))

if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
