"""Starts the ranks by torchrun's agent, and collects what they leave.

What torchrun leaves behind in the temporary directory is removed, unless its options ask for logs.
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

_NO_LOGS = "0"  # torchrun's word for it
_OURS = re.compile(
    rf"{PREFIX}\d+|process-\d+\.json|crash-(\d+|of-process-.+)\.txt|exits-\d+\.json|{REQUEST}"
    r"|\.\d+\.\d+\.\d+\.part"  # of a dump, whose rank was killed amid it
)
"""Names of files that ranks and launchers leave; a user's `rank_0.pt` beside them is none."""


def run_program(options: argparse.Namespace) -> None:
    """Run the program on all ranks of this host, until they have ended.

    Raises:
        ArgumentError: An option cannot be used.
        ChildFailedError: A rank failed.
        SignalException: This process was interrupted; the ranks have been ended.
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
    """Refuse what torchrun's agent would end with a traceback for, or would start for nothing."""
    program, processes = options.training_script, options.nproc_per_node
    a_file = not (options.module or options.no_python or program == "-")  # that is standard input
    if a_file and not os.path.exists(program):
        raise ArgumentError(
            f"PROGRAM is {program!r}, and there is no such file in {os.getcwd()}: give its path, "
            "or put -m before the name of a module"
        )
    try:
        count = determine_local_world_size(processes)
    except ValueError as error:
        raise ArgumentError(f"--nproc-per-node is {processes!r}: {error}") from error
    if count < 1:
        raise ArgumentError(f"--nproc-per-node is {count}: give at least 1 process")


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """What the ranks read at the end of their `import torch`."""
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
    """Whether `import torch` will run `gradwire_autoload`, which reads the variables."""
    points = entry_points(group="torch.backends")
    if not any(point.value.startswith("gradwire_autoload:") for point in points):
        raise ArgumentError(
            "gradwire is not installed, so that `import torch` does not find it: install it (pip "
            "install gradwire), instead of adding it to PYTHONPATH"
        )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1" or not hasattr(
        torch, "_import_device_backends"
    ):
        raise ArgumentError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD is "
            f"{os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD')!r}, with which `import torch` does "
            "not look for gradwire: unset it"
        )


def _empty(directory: Path) -> None:
    """Make the directory, and remove the dumps of an earlier run from it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in list(directory.iterdir()):
        if _OURS.fullmatch(path.name) and not path.is_dir():
            path.unlink()


def _prepare(timeline: Path) -> None:
    """Remove parts of an earlier run's timeline, whose end has not come."""
    if not timeline.parent.is_dir():
        raise ArgumentError(
            f"--timeline is {str(timeline)!r}, whose folder does not exist: make it first"
        )
    part = re.compile(rf"{re.escape(timeline.name)}\.\d+\.part")
    for path in list(timeline.parent.iterdir()):
        if part.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def _temporary_logs(options: Any) -> Iterator[None]:
    """Let torchrun's files lie where they are removed, unless they are asked for."""
    asked = options.log_dir or options.redirects != _NO_LOGS or options.tee != _NO_LOGS
    if asked:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="gradwire-run-") as place:
        options.log_dir = place
        yield
