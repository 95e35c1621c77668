"""Starts the ranks by torchrun's agent, and collects what they leave.

What torchrun leaves behind in the temporary directory is removed, unless its options ask for logs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.launcher import api
from torch.distributed.run import run

from gradwire.cli.run.agent import collecting_agent
from gradwire.errors import ArgumentError
from gradwire.recorder.black_box import PREFIX, REQUEST

__all__ = ["run_program"]

_NO_LOGS = "0"  # torchrun's word for it
_OURS = (f"{PREFIX}[0-9]*", "process-*.json", "crash-*.txt", "exits-*.json", REQUEST)


def run_program(options: argparse.Namespace) -> None:
    """Run the program on all ranks of this host, until they have ended.

    Raises:
        ArgumentError: An option cannot be used.
        ChildFailedError: A rank failed.
        SignalException: This process was interrupted; the ranks have been ended.
    """
    variables = _variables(options)
    if variables:
        _check_autoload()
    os.environ.update(variables, GRADWIRE_LAUNCHER=str(os.getpid()))
    directory = Path(options.recorder).absolute() if options.recorder else None
    if directory is not None:
        _empty(directory)
    with (
        _temporary_logs(options),
        patch.object(api, "LocalElasticAgent", collecting_agent(directory)),
    ):
        run(options)


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
    for pattern in _OURS:
        for path in directory.glob(pattern):
            path.unlink()


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
