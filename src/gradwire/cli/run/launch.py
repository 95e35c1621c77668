"""Start of the ranks by torchrun's agent, and cleanup of files.

torchrun's files in the temporary directory are removed, unless options request logs.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.launcher import api
from torch.distributed.run import determine_local_world_size, run

from gradwire.cli.run.agent import collecting_agent
from gradwire.errors import ArgumentError
from gradwire.recorder.black_box import PREFIX, REQUEST

_NO_LOGS = "0"  # torchrun's value for no logs
_OURS = re.compile(
    rf"{PREFIX}\d+|process-\d+\.json|crash-(\d+|of-process-.+)\.txt|exits-\d+\.json|{REQUEST}"
    r"|\.\d+\.\d+\.\d+\.part"  # partial dump of a killed rank
)
"""Names of files that ranks and launchers write; a user's `rank_0.pt` does not match."""


def run_program(options: argparse.Namespace) -> None:
    """Run the program on all ranks of this host until they have ended.

    Raises:
        ArgumentError: An option has an invalid value.
        ChildFailedError: A rank failed.
        SignalException: This process was interrupted, and the ranks were stopped.
    """
    _check_program(options)
    variables = _variables(options)
    if variables:
        _check_autoload()
    os.environ.update(variables, GRADWIRE_LAUNCHER=str(os.getpid()))
    directory = Path(options.recorder).absolute() if options.recorder else None
    if directory is not None:
        _empty(directory)
    if options.timeline:
        _prepare(Path(options.timeline).absolute())
    with (
        _temporary_logs(options),
        patch.object(api, "LocalElasticAgent", collecting_agent(directory)),
    ):
        run(options)


def _check_program(options: argparse.Namespace) -> None:
    """Reject programs and process counts that torchrun's agent would fail on with a traceback."""
    program, processes = options.training_script, options.nproc_per_node
    a_file = not (options.module or options.no_python or program == "-")  # "-" is standard input
    if a_file and not os.path.exists(program):
        raise ArgumentError(
            f"PROGRAM is {program!r}, which does not exist in {os.getcwd()}: pass the path of a "
            "file, or -m and a module"
        )
    try:
        count = determine_local_world_size(processes)
    except ValueError as error:
        raise ArgumentError(f"--nproc-per-node is {processes!r}: {error}") from error
    if count < 1:
        raise ArgumentError(f"--nproc-per-node is {count}: pass at least 1")


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that ranks read at the end of `import torch`."""
    variables = {}
    if options.compat:
        variables["GRADWIRE_COMPAT"] = "1"
    if options.backend:
        variables["GRADWIRE_BACKEND"] = options.backend
    if options.recorder:
        variables["GRADWIRE_RECORDER"] = os.path.abspath(options.recorder)
    if options.timeline:
        variables["GRADWIRE_TIMELINE"] = os.path.abspath(options.timeline)
    return variables


def _check_autoload() -> None:
    """Check that `import torch` will run `gradwire_autoload`, which reads the variables."""
    points = entry_points(group="torch.backends")
    if not any(point.value.startswith("gradwire_autoload:") for point in points):
        raise ArgumentError(
            "gradwire is not installed, so `import torch` does not load it: run `pip install "
            "gradwire` instead of adding it to PYTHONPATH"
        )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1" or not hasattr(
        torch, "_import_device_backends"
    ):
        raise ArgumentError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD is "
            f"{os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD')!r}, which keeps `import torch` from "
            "loading gradwire: unset it"
        )


def _empty(directory: Path) -> None:
    """Create the directory, and remove the dumps of an earlier run from it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in list(directory.iterdir()):
        if _OURS.fullmatch(path.name) and not path.is_dir():
            path.unlink()


def _prepare(timeline: Path) -> None:
    """Remove the part files of an earlier run's timeline that was not finished."""
    if not timeline.parent.is_dir():
        raise ArgumentError(
            f"--timeline is {str(timeline)!r}, whose folder does not exist: create it first"
        )
    part = re.compile(rf"{re.escape(timeline.name)}\.\d+\.part")
    for path in list(timeline.parent.iterdir()):
        if part.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def _temporary_logs(options: Any) -> Iterator[None]:
    """Put torchrun's files into a temporary folder, unless options request logs."""
    asked = options.log_dir or options.redirects != _NO_LOGS or options.tee != _NO_LOGS
    if asked:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="gradwire-run-") as folder:
        options.log_dir = folder
        yield
