"""One rank of a checked program: `python -m gradwire.check FOLDER STEPS TRACE PROGRAM…`."""

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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


def main(arguments: Sequence[str]) -> None:
    """Run a program as one rank, observed."""
    folder, steps, trace, *program = arguments
    if trace == "1":  # each node of a loss's graph keeps the line that made it
        torch.autograd.set_detect_anomaly(True, check_nan=False)
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
