"""Ranks as forks of one process that has imported PyTorch."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire import recorder
from gradwire._processes import state_of_pid

__all__ = ["LIMIT", "Ranks", "wait_for_announcements", "wait_until"]

LIMIT = 60.0
_COLLECT_SECONDS = 15.0


class Ranks:
    """Processes of one accident, with dumps in `directory`.

    Args:
        main: Function that each rank runs with its rank.
        directory: Directory to create.
        count: Number of ranks.
        backend: Backend of the default group.
        timeout: Timeout of collectives.
        before: Function that each rank runs before the group exists.
    """

    def __init__(
        self,
        main: Callable[[int], None],
        directory: Path,
        count: int,
        backend: str,
        timeout: timedelta,
        before: Callable[[int], None] = lambda rank: None,
    ) -> None:
        directory.mkdir(parents=True)
        self._main, self._before, self.directory, self.count = main, before, directory, count
        self._backend, self._timeout = backend, timeout
        self.codes: dict[int, int] = {}
        self.killed: dict[int, int] = {}
        self.left = {rank: self._start(rank) for rank in range(count)}

    def _start(self, rank: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self._be(rank)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(3)
        return pid

    def _be(self, rank: int) -> None:
        code = 0
        os.setsid()
        os.environ |= {"DUMPS": str(self.directory), "RANK": str(rank)}
        torch.set_num_threads(1)
        with open(self.directory / f"log-{rank}.txt", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            self._before(rank)
            recorder.start(self.directory)
            store = dist.FileStore(str(self.directory / "store"), self.count)
            dist.init_process_group(
                self._backend,
                store=store,
                rank=rank,
                world_size=self.count,
                timeout=self._timeout,
            )
            self._main(rank)
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            code = 1
            sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)

    def wait(self, until: Callable[[Ranks], bool], limit: float = LIMIT) -> None:
        """Wait until all ranks have ended or a condition holds, for a limited time."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for rank, pid in list(self.left.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                    del self.left[rank]
                    end_session(pid)
            if not self.left or until(self):
                return
            time.sleep(0.02)

    def collect(self) -> None:
        """Wait for requested dumps of ranks that still run."""
        running = [r for r, pid in self.left.items() if state_of_pid(pid) != "stopped"]
        files = [self.directory / f"rank_{rank}" for rank in running]
        wait_until(lambda: all(file.exists() for file in files), _COLLECT_SECONDS)

    def kill(self) -> None:
        """Kill ranks that still run."""
        for pid in self.left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            end_session(pid)
        self.killed, self.left = self.left, {}


def end_session(pid: int) -> None:
    """Kill children that a rank has left, such as data loader workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def wait_until(done: Callable[[], bool], seconds: float = LIMIT) -> None:
    """Wait until a condition holds, for a limited time."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.02)


def wait_for_announcements() -> None:
    """Wait until every rank has announced its process."""
    directory, world = Path(os.environ["DUMPS"]), dist.get_world_size()
    wait_until(lambda: len(list(directory.glob("process-*.json"))) >= world)
    dist.all_reduce(torch.ones(1))
