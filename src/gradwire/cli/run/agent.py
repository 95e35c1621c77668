"""torchrun's agent, which waits for the ranks' dumps before it ends those that still run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from gradwire.recorder.black_box import PREFIX, REQUEST
from gradwire.recorder.processes import state_of_pid
from gradwire.shm.limits import CGROUPS, PROC, folders, text_of

_WAIT_SECONDS = 3.0  # for dumps; a rank's thread looks for requests five times a second


def collecting_agent(directory: Path | None) -> type[LocalElasticAgent]:
    """Torchrun's agent; with a directory for dumps, one that collects them.

    Args:
        directory: Where ranks write their dumps.
    """
    if directory is None:
        return LocalElasticAgent
    place: Path = directory

    class CollectingAgent(LocalElasticAgent):
        _earlier: tuple[Path, list[int]] | None = None

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            kills = _oom_kills()
            if self._earlier is not None:
                _forget(place, *self._earlier, worker_group.workers[0].world_size)
            ranks = [worker.global_rank for worker in worker_group.workers]
            self._earlier = _exits_file(place, worker_group), ranks
            started: dict[int, Any] = super()._start_workers(worker_group)
            processes = self._pcontext
            assert processes is not None
            end = processes.close
            # called as soon as a rank has failed, and when this process is interrupted

            def close(*args: Any, **kwargs: Any) -> None:
                try:
                    with contextlib.suppress(OSError):  # the directory is full, or gone
                        _collect(place, worker_group, processes, kills)
                finally:
                    end(*args, **kwargs)

            processes.close = close  # type: ignore[method-assign]
            return started

    return CollectingAgent


def _forget(directory: Path, exits: Path, ranks: Iterable[int], world_size: int) -> None:
    """Remove how this host's ranks ended before a restart: they are other processes now.

    Args:
        directory: Where that is.
        exits: What this launcher noted of it.
        ranks: That this host had then.
        world_size: From now on; ranks beyond it will not replace their dumps.
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
    """Note how ranks have ended, and wait for the dumps of those that have not."""
    ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
    handlers = getattr(processes, "subprocess_handlers", {})
    codes = {ranks[local]: handler.proc.poll() for local, handler in handlers.items()}
    failed = {rank: code for rank, code in codes.items() if code}
    if failed:
        killed = _oom_kills() > kills
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
        _wait_until(lambda: all(_is_newer(directory, rank, asked) for rank in running))


def _is_newer(directory: Path, rank: int, than: int) -> bool:
    try:
        return (directory / f"{PREFIX}{rank}").stat().st_mtime_ns >= than
    except OSError:
        return False


def _wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    while not done() and time.monotonic() < end:
        time.sleep(0.02)


def _oom_kills() -> int:
    """How many processes of this container the kernel has killed for lack of memory."""
    for folder in folders("memory", PROC, CGROUPS):
        for file in ("memory.events", "memory.oom_control"):
            for line in text_of(folder / file).splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill" and number.strip().isdigit():
                    return int(number)
    return 0
