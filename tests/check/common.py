"""Programs under observation, in the processes that `run_ranks` keeps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradwire.check import CHECKS, Finding, Run, choose, conclude, needs_more_ranks
from gradwire.check.__main__ import observed
from gradwire.testing import run_ranks

ROOT = Path(__file__).parents[2]
LIMIT = 100.0


def _as_under_torchrun(rank: int, world: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "1",
        "GROUP_RANK": "0",
        "ACCELERATE_USE_CPU": "true",
    }


def _rank(
    program: Callable[..., Any], args: tuple[Any, ...], folder: str | None, steps: int, trace: bool
) -> Any:
    """Run a program on this rank, observed if there is a folder; return its result."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    variables = _as_under_torchrun(rank, world)
    os.environ.update(variables)
    torch.manual_seed(rank)
    try:
        if folder is None:
            return program(*args)
        lines = torch.autograd.set_detect_anomaly(trace, check_nan=False)
        with observed(Path(folder), rank, steps=steps), lines:
            return program(*args)
    finally:
        for name in variables:
            del os.environ[name]


def run_plain(program: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    """Run a program without observing it."""
    return run_ranks(
        _rank, ranks, backend="gloo", timeout=LIMIT, args=(program, args, None, 0, False)
    )


def _recorded(
    program: Callable[..., Any], args: Any, ranks: int, steps: int, trace: bool = False
) -> tuple[Run, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        call = (program, args, folder, steps, trace)
        results = run_ranks(_rank, ranks, backend="gloo", timeout=LIMIT, args=call)
        return Run.read(Path(folder)), results


def check(
    program: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    steps: int = 0,
    only: Sequence[str] = (),
) -> tuple[list[Finding], list[Any], Run]:
    """Run a program observed; return the findings, its results and what was recorded."""
    run, results = _recorded(program, args, ranks, steps)
    if needs_more_ranks(run):
        run.wider, _ = _recorded(program, args, ranks + 1, steps, trace=True)
    blind = [event for rank in run.ranks for event in run.of("blind", rank)]
    assert not blind, blind
    return conclude(run, choose(CHECKS, only)), results, run


def marked(program: Callable[..., Any], mark: str) -> str:
    """Return the line of a program's file that ends with `# finds: mark`, as "file:line"."""
    path = program.__code__.co_filename
    lines = Path(path).read_text().splitlines()
    found = [n for n, text in enumerate(lines, 1) if text.endswith(f"# finds: {mark}")]
    assert len(found) == 1, (mark, found)
    return f"{path}:{found[0]}"
