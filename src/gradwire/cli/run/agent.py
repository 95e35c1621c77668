"""torchrun's agent, extended to wait for the ranks' dumps before ending ranks that still run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from gradwire._limits import oom_kills
from gradwire._processes import state_of_pid, wait_until
from gradwire.recorder.black_box import PREFIX, REQUEST

_WAIT_SECONDS = 3.0  # wait for dumps; a rank polls for requests five times per second


def collecting_agent(directory: Path | None) -> type[LocalElasticAgent]:
    """Return torchrun's agent, or a subclass that collects dumps if there is a directory.

    Args:
        directory: Directory that ranks write dumps to.
    """
    if directory is None:
        return LocalElasticAgent
    dumps: Path = directory

    class CollectingAgent(LocalElasticAgent):
        _earlier: tuple[Path, list[int]] | None = None

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            kills = oom_kills()
            if self._earlier is not None:
                _forget(dumps, *self._earlier, worker_group.workers[0].world_size)
            ranks = [worker.global_rank for worker in worker_group.workers]
            self._earlier = _exits_file(dumps, worker_group), ranks
            started: dict[int, Any] = super()._start_workers(worker_group)
            processes = self._pcontext
            assert processes is not None
            end = processes.close
            # called when a rank has failed and when this process is interrupted

            def close(*args: Any, **kwargs: Any) -> None:
                try:
                    with contextlib.suppress(OSError):  # the directory is full or was removed
                        _collect(dumps, worker_group, processes, kills)
                finally:
                    end(*args, **kwargs)

            processes.close = close  # type: ignore[method-assign]
            return started

    return CollectingAgent


def _forget(directory: Path, exits: Path, ranks: Iterable[int], world_size: int) -> None:
    """Remove notes on this host's ranks before a restart, which starts new processes.

    Args:
        directory: Directory of the dumps.
        exits: File in which this launcher noted exits.
        ranks: Ranks that this host had before.
        world_size: New world size; ranks beyond it will not replace their dumps.
    """
    exits.unlink(missing_ok=True)
    for rank in ranks:
        (directory / f"crash-{rank}.txt").unlink(missing_ok=True)
        if rank >= world_size:
            (directory / f"{PREFIX}{rank}").unlink(missing_ok=True)
            (directory / f"process-{rank}.json").unlink(missing_ok=True)


def _exits_file(directory: Path, worker_group: Any) -> Path:
    return directory / f"exits-{worker_group.group_rank}.json"


def _collect(directory: Path, worker_group: Any, processes: Any, kills: int) -> None:
    """Note the exits of ranks, and wait for the dumps of ranks that still run."""
    ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
    handlers = getattr(processes, "subprocess_handlers", {})
    codes = {ranks[local]: handler.proc.poll() for local, handler in handlers.items()}
    failed = {rank: code for rank, code in codes.items() if code}
    if failed:
        killed = oom_kills() > kills
        exits = {
            rank: {"code": code, "time": time.time_ns(), "oom_killed": killed and code == -9}
            for rank, code in failed.items()
        }
        _exits_file(directory, worker_group).write_text(json.dumps(exits))
    running = {
        ranks[local]: handler.proc.pid
        for local, handler in handlers.items()
        if handler.proc.poll() is None and state_of_pid(handler.proc.pid) != "stopped"
    }
    if running:
        request = directory / REQUEST
        request.write_text("the launcher ends the ranks")
        asked = request.stat().st_mtime_ns
        wait_until(
            lambda: all(_is_newer(directory, rank, asked) for rank in running), _WAIT_SECONDS
        )


def _is_newer(directory: Path, rank: int, than: int) -> bool:
    try:
        return (directory / f"{PREFIX}{rank}").stat().st_mtime_ns >= than
    except OSError:
        return False
