"""The command `gradwire doctor`: this machine, and one trial of each backend."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from statistics import median

import click

BACKENDS = ("shm", "gloo", "nccl")
_OK, _WARNING, _PROBLEM, _ABSENT = "ok", "warning", "problem", "absent"
_STYLES = {_OK: "green", _WARNING: "yellow", _PROBLEM: "red", _ABSENT: "dim"}
_TRIAL_SECONDS = 60.0
_LITTLE_MEMORY = 1 << 30

EXAMPLES = """\b
Examples:
    gradwire doctor
    gradwire doctor --nproc 4 --backend gloo    # one backend only
    gradwire doctor --json | jq .problems
"""


@dataclass(frozen=True)
class Check:
    """Result of one check, or of the trial of a backend.

    Attributes:
        name: Name of the check or backend.
        state: "ok", "warning", "problem", or "absent" for a backend that cannot be tried here.
        found: Observed value or error, with advice.
    """

    name: str
    state: str
    found: str


@click.command(epilog=EXAMPLES, context_settings={"show_default": True})
@click.option("--nproc", type=click.IntRange(min=2), default=2, help="Processes per trial.")
@click.option(
    "--backend", "names", multiple=True, type=click.Choice(BACKENDS), help="Try only this backend."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def doctor(nproc: int, names: Sequence[str], as_json: bool) -> None:
    """Show versions, cores and shared memory, and try each backend between processes.

    The exit code is 0 if all backends that this machine supports work, and 1 otherwise.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    progress = Console(stderr=True)  # shows nothing unless it is a terminal
    checks = [_versions(), _cores(nproc), *([_shared_memory()] if sys.platform == "linux" else [])]
    for name in names or BACKENDS:
        with progress.status(f"trying {name} in {nproc} processes ..."):
            checks.append(try_backend(name, nproc))
    problems = [check.name for check in checks if check.state == _PROBLEM]
    if as_json:
        found = {"checks": list(map(asdict, checks)), "problems": problems}
        click.echo(json.dumps(found, indent=2))
    else:
        console, table = Console(highlight=False), Table.grid(padding=(0, 2))
        for check in checks:
            state = f"[{_STYLES[check.state]}]{check.state}[/]"
            table.add_row(state, check.name, escape(check.found))
        console.print(table)
        failed = f"[red]Problems[/]: {', '.join(problems)}"
        console.print(failed if problems else "[green]No problems.[/]")
    sys.exit(bool(problems))


def _versions() -> Check:
    import torch

    from gradwire._torch import NEWEST_TESTED
    from gradwire._version import __version__

    found = f"gradwire {__version__}, PyTorch {torch.__version__}, Python "
    found += f"{platform.python_version()}, {platform.system()} {platform.release()}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        return Check("versions", _WARNING, f"{found}; tested up to PyTorch {newest}")
    return Check("versions", _OK, found)


def _cores(nproc: int) -> Check:
    from gradwire._limits import cores

    usable, load = cores(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows
    found = f"{usable:g} usable of {os.cpu_count()} for {nproc} ranks; load average {load:.1f}"
    if usable < nproc:
        return Check("cores", _WARNING, f"{found}: ranks share cores, so waits cost more")
    if load > usable:
        return Check("cores", _WARNING, f"{found}: times and failures below may be due to it")
    return Check("cores", _OK, found)


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Check("/dev/shm", _WARNING, f"{error}: data loaders need it; shm does not")
    found = f"{free / 2**30:.1f} GiB free"
    if free < _LITTLE_MEMORY:
        return Check("/dev/shm", _WARNING, f"{found}: little for data loaders; shm uses none of it")
    return Check("/dev/shm", _OK, found)


def try_backend(name: str, nproc: int) -> Check:
    """Run all_reduces of two sizes between new processes."""
    import torch
    import torch.distributed as dist

    from gradwire.errors import GradwireError
    from gradwire.testing import run_ranks

    if not dist.is_backend_available(name):
        return Check(name, _ABSENT, "this build of PyTorch lacks it")
    if name == "nccl" and torch.cuda.device_count() < nproc:
        found = f"it needs {nproc} GPUs, one per process; there are {torch.cuda.device_count()}"
        return Check(name, _ABSENT, found)
    try:
        with redirect_stderr(io.StringIO()):  # the error names the cause
            times = run_ranks(_trial, nproc, backend=name, timeout=_TRIAL_SECONDS)
    except GradwireError as error:
        return Check(name, _PROBLEM, str(error).splitlines()[0])
    short, long = times[0]
    return Check(
        name,
        _OK,
        f"all_reduce of 40 bytes in {short * 1e6:.0f} µs, of 16 MiB in {long * 1e3:.1f} ms",
    )


def _trial() -> tuple[float, float]:
    """Return a rank's median seconds of an all_reduce of 40 bytes and of 16 MiB."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)

    def seconds(numel: int, calls: int) -> float:
        x = torch.ones(numel, dtype=torch.float32, device=device)
        dist.all_reduce(x)
        if not torch.all(x == dist.get_world_size()):
            raise RuntimeError(f"the sum of {dist.get_world_size()} ones was {x.min().item()}")
        x.zero_()
        taken = []
        for _ in range(calls):
            start = time.perf_counter()
            dist.all_reduce(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return median(taken)

    return seconds(10, 200), seconds(1 << 22, 6)
