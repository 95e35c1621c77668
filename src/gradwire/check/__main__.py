"""One rank of a checked program: `python -m gradwire.check FOLDER STEPS PROGRAM…`."""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from gradwire.check.observer import Observer


def main(arguments: Sequence[str]) -> None:
    """Run a program as one rank, observed."""
    folder, steps, *program = arguments
    with Observer(Path(folder), int(os.environ["RANK"]), steps=int(steps)):
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            sys.path[0] = str(Path(program[0]).absolute().parent)
            runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
