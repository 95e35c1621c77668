"""One rank of a checked program: `python -m gradwire.check FOLDER STEPS TRACE PROGRAM…`."""

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gradwire.check.data import DataProbe
from gradwire.check.observer import Observer
from gradwire.check.training_probes import Training


@contextmanager
def observed(folder: Path, rank: int, *, steps: int = 0) -> Iterator[None]:
    """Record what this process does, by all probes; see `Observer` for the arguments."""
    with Observer(folder, rank, steps=steps) as observer:
        DataProbe(observer)
        Training(observer)
        yield


def _spawn(function: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
    """Call a function for this rank, instead of starting processes that are not observed."""
    if nprocs != int(os.environ["WORLD_SIZE"]):
        raise RuntimeError(f"the program spawns {nprocs} processes: pass --nproc-per-node {nprocs}")
    function(int(os.environ["RANK"]), *args)


def main(arguments: Sequence[str]) -> None:
    """Run a program as one rank, observed."""
    folder, steps, trace, *program = arguments
    if trace == "1":  # each node of a loss's graph keeps the line that made it
        torch.autograd.set_detect_anomaly(True, check_nan=False)
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        setattr(module, "spawn", _spawn)  # noqa: B010
    with observed(Path(folder), int(os.environ["RANK"]), steps=int(steps)):
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            sys.path[0] = str(Path(program[0]).absolute().parent)
            runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
