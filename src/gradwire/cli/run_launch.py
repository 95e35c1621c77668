"""Start of the ranks by torchrun's agent, and collection and cleanup of files.

The agent waits for the ranks' dumps before it ends ranks that still run. torchrun's files in the
temporary directory are removed, unless options request logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api
from torch.distributed.run import determine_local_world_size, run

from gradwire._limits import oom_kills
from gradwire._processes import stat_of
from gradwire.errors import ArgumentError
from gradwire.recorder import PREFIX, REQUEST, await_answers

FOLDER = "gradwire-recorder-"
"""Prefix of the temporary folder of a run's dumps, which is kept after a failure."""
_WAIT_SECONDS = 2.0  # wait for dumps; a rank polls for requests five times per second
_NO_LOGS = "0"  # torchrun's value for no logs
_OURS = re.compile(
    rf"{PREFIX}\d+|(kernel|exits)-\d+\.json|process-.+-\d+\.json|{REQUEST}"
    r"|(crash|stacks)-(\d+|of-process-.+)\.txt|ring-(\d+|of-process-.+)"
    r"|\.\d+\.\d+\.\d+\.part"  # partial dump of a killed rank
)
"""Names of files that ranks and launchers write; a user's `rank_0.pt` does not match."""


def run_program(options: argparse.Namespace) -> None:
    """Run the program on all ranks of this host until they have ended."""
    if _checked_count(options) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, without its warning
    if options.recorder == "0":  # as the environment variable
        options.recorder = ""
    elif options.recorder is None and records_by_default(options):
        options.recorder = tempfile.mkdtemp(prefix=FOLDER)
    variables = {  # which ranks read at the end of `import torch`
        "GRADWIRE_COMPAT": "1" if options.compat else "",
        "GRADWIRE_BACKEND": options.backend,
        "GRADWIRE_RECORDER": options.recorder and os.path.abspath(options.recorder),
        "GRADWIRE_TIMELINE": options.timeline and os.path.abspath(options.timeline),
    }
    variables = {name: value for name, value in variables.items() if value}
    if variables:
        _check_autoload()
    os.environ.update(variables, GRADWIRE_LAUNCHER=str(os.getpid()))
    directory = Path(options.recorder).absolute() if options.recorder else None
    if directory is not None:
        empty(directory)
    if options.timeline:
        _prepare(Path(options.timeline).absolute())
    with contextlib.ExitStack() as stack:
        if not (options.log_dir or options.redirects != _NO_LOGS or options.tee != _NO_LOGS):
            # torchrun's files, unless options request them
            folder = tempfile.TemporaryDirectory(prefix="gradwire-run-")
            options.log_dir = stack.enter_context(folder)
        stack.enter_context(patch.object(api, "LocalElasticAgent", collecting_agent(directory)))
        run(options)


def records_by_default(options: argparse.Namespace) -> bool:
    """Return True if a run records into a temporary folder: on one host, with gradwire loaded."""
    # the records of one of several hosts would show the others' ranks as missing
    one_host = str(options.nnodes) in ("1", "1:1")  # torchrun's default is the latter
    if not one_host or "GRADWIRE_RECORDER" in os.environ:
        return False
    try:
        _check_autoload()
    except ArgumentError:
        return False
    return True


def _checked_count(options: argparse.Namespace) -> int:
    """Return the number of processes, after checks without which torchrun shows a traceback."""
    program, processes = options.training_script, options.nproc_per_node
    a_file = not (options.module or options.no_python or program == "-")  # "-" is standard input
    if a_file and not os.path.exists(program):
        raise ArgumentError(
            f"PROGRAM is {program!r}, which does not exist in {os.getcwd()}: pass the path of a "
            "file, or -m and a module"
        )
    try:
        count: int = determine_local_world_size(processes)
    except ValueError as error:
        raise ArgumentError(f"--nproc-per-node is {processes!r}: {error}") from error
    if count < 1:
        raise ArgumentError(f"--nproc-per-node is {count}: pass at least 1")
    return count


def _check_autoload() -> None:
    """Check that `import torch` will run `gradwire_autoload`, which reads the variables."""
    points = entry_points(group="torch.backends")
    if not any(point.value.startswith("gradwire_autoload:") for point in points):
        raise ArgumentError(
            "gradwire is not installed, so `import torch` does not load it: run `pip install "
            "gradwire` instead of adding it to PYTHONPATH"
        )
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if autoload != "1":
        raise ArgumentError(
            f"TORCH_DEVICE_BACKEND_AUTOLOAD is {autoload!r}, which keeps `import torch` from "
            "loading gradwire: unset it"
        )


def empty(directory: Path) -> None:
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


def collecting_agent(directory: Path | None) -> type[LocalElasticAgent]:
    """Return torchrun's agent, or a subclass that collects dumps if there is a directory."""
    if directory is None:
        return LocalElasticAgent
    dumps = directory

    class CollectingAgent(LocalElasticAgent):
        _earlier: tuple[Path, list[int]] | None = None

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            kills = oom_kills()
            if self._earlier is not None:
                _forget(dumps, *self._earlier, worker_group.workers[0].world_size)
            ranks = [worker.global_rank for worker in worker_group.workers]
            exits = dumps / f"exits-{worker_group.group_rank}.json"
            self._earlier = exits, ranks
            started: dict[int, Any] = super()._start_workers(worker_group)
            processes = self._pcontext
            assert processes is not None
            end, closed = processes.close, list[bool]()
            # called when a rank has failed, when this process is interrupted, and once more to kill

            def close(*args: Any, **kwargs: Any) -> None:
                try:
                    if closed:
                        return
                    closed.append(True)
                    with contextlib.suppress(OSError):  # the directory is full or was removed
                        _collect(dumps, exits, worker_group, processes, kills)
                finally:
                    end(*args, **kwargs)

            processes.close = close  # type: ignore[method-assign]
            return started

    return CollectingAgent


def _forget(directory: Path, exits: Path, ranks: Iterable[int], world_size: int) -> None:
    """Remove notes on this host's ranks before a restart, which starts new processes."""
    exits.unlink(missing_ok=True)
    for path in directory.glob("process-*.json"):
        path.unlink(missing_ok=True)
    for rank in ranks:
        names = [f"stacks-{rank}.txt", f"kernel-{rank}.json", f"crash-{rank}.txt"]
        if rank >= world_size:
            names.append(f"{PREFIX}{rank}")
        for name in names:
            (directory / name).unlink(missing_ok=True)


def _collect(directory: Path, exits: Path, worker_group: Any, processes: Any, kills: int) -> None:
    """Note the exits of ranks, and wait for the dumps of ranks that still run."""
    ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
    handlers = getattr(processes, "subprocess_handlers", {})
    running = {
        ranks[local]: handler.proc.pid
        for local, handler in handlers.items()
        if handler.proc.poll() is None
        and getattr(stat_of(handler.proc.pid), "state", "") != "stopped"
    }
    if running:
        request = directory / REQUEST
        request.write_text("the launcher ends the ranks")
        asked = request.stat().st_mtime_ns
        await_answers(directory, asked, _WAIT_SECONDS)
    # last: ranks that ended by themselves a moment after the first one are none of its consequences
    codes = {ranks[local]: handler.proc.poll() for local, handler in handlers.items()}
    ended = {rank: code for rank, code in codes.items() if code is not None}
    if any(ended.values()) or (ended and len(ended) < len(codes)):
        killed = oom_kills() > kills
        noted = {
            rank: {"code": code, "time": time.time_ns(), "oom_killed": killed and code == -9}
            for rank, code in ended.items()
        }
        exits.write_text(json.dumps(noted))
