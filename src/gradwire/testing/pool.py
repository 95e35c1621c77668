"""The pool of worker processes: started when needed, reused, and ended with their parent.

A worker holds the reading end of a pipe that nobody writes to, its lifeline. However the parent
ends, the kernel closes the writing end, and the worker ends too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from gradwire.errors import DistributedError
from gradwire.testing.channel import Channel

_MODULE = ("-m", "gradwire.testing.worker")
START_SECONDS = 120.0
"""Time limit for new workers to import torch."""


def worker_environment() -> dict[str, str]:
    """Return this process's environment, with settings for ranks that share a machine."""
    # or Gloo resolves the host's name, for which there may be no entry
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}


class Worker:
    """One process; its stderr goes to a file without a name, from which errors quote.

    Args:
        prefix: Beginning of the command that starts it, for a worker on another host.
    """

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._relayed = 0
        ours, theirs = socket.socketpair()
        read_end, self._lifeline = os.pipe()
        self.channel = Channel(ours)
        environment = worker_environment()
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        descriptors = (theirs.fileno(), read_end)
        try:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *_MODULE, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=descriptors,
                env=environment,
            )
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            theirs.close()
            os.close(read_end)

    def kill(self) -> None:
        """Kill the process and close its descriptors."""
        self.process.kill()
        self.process.wait()
        self._close_descriptors()

    def forget(self) -> None:
        """Close, in a forked child, the descriptors of the parent's process."""
        self.process.returncode = 0  # or Popen warns that it is still running
        self._close_descriptors()

    def exit_text(self) -> str:
        """Return how the process ended: "exited with code 3", "was killed by SIGSEGV"."""
        try:
            code = self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "closed its connection to run_ranks"
        if code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def new_log(self) -> str:
        """Return the stderr of the process since the last call."""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), size - self._relayed, self._relayed)
        self._relayed += len(text)
        return text.decode(errors="replace")

    def _close_descriptors(self) -> None:
        self.channel.close()
        self._log.close()
        os.close(self._lifeline)


def dump_stacks(workers: Sequence[Worker]) -> list[str]:
    """Return the stacks of all threads of each worker, after its earlier output to stderr.

    faulthandler writes them from a signal handler, whatever holds the GIL. A dump counts as
    complete when it has not grown for 0.25 s.
    """
    if not workers:
        return []
    earlier = [worker.new_log() for worker in workers]
    for worker in workers:
        worker.process.send_signal(signal.SIGUSR1)
    stacks = [""] * len(workers)
    now = time.monotonic()
    deadline, grew = now + 3.0, now
    while now < deadline and not (all(stacks) and now > grew + 0.25):
        time.sleep(0.02)
        now = time.monotonic()
        for index, worker in enumerate(workers):
            if more := worker.new_log():
                stacks[index] += more
                grew = now
    return [log + (stack or _NO_STACK) for log, stack in zip(earlier, stacks, strict=True)]


_NO_STACK = "(it did not show its stack: it is stopped, or inside the kernel)"


class Pool:
    """Idle workers; worker i is rank i of whatever call comes next.

    Args:
        prefix_of: The prefix of the command that starts a worker, by its number.
    """

    def __init__(self, prefix_of: Callable[[int], Sequence[str]] = lambda _: ()) -> None:
        self.lock = threading.Lock()
        self._prefix_of = prefix_of
        self._workers: dict[int, Worker] = {}

    def take(self, count: int) -> list[Worker]:
        """Return the first `count` workers, after starting those that are missing.

        Raises:
            DistributedError: A worker could not be started; the message quotes its stderr.
        """
        for worker in [w for w in self._workers.values() if w.process.poll() is not None]:
            self.discard(worker)
        # a worker keeps its number, which may say on which host it is
        missing = [number for number in range(count) if number not in self._workers]
        try:
            for number in missing:
                self._workers[number] = Worker(self._prefix_of(number))
            deadline = time.monotonic() + START_SECONDS
            for number in missing:
                worker = self._workers[number]
                worker.channel.receive(deadline)
        except EOFError as error:
            message = f"a worker process {worker.exit_text()} at its start:\n{worker.new_log()}"
            self.close()
            raise DistributedError(message) from error
        except TimeoutError as error:
            self.close()
            raise DistributedError(
                f"a worker process was not ready within {START_SECONDS:g} s"
            ) from error
        except BaseException:
            self.close()
            raise
        return [self._workers[number] for number in range(count)]

    def discard(self, worker: Worker) -> None:
        """Kill a worker that cannot be used again."""
        number = next(n for n, kept in self._workers.items() if kept is worker)
        self._workers.pop(number).kill()

    def close(self) -> None:
        """Kill all workers; the next `take` starts new ones."""
        while self._workers:
            self._workers.popitem()[1].kill()

    def forget(self) -> None:
        """Close, in a forked child, the descriptors of the parent's workers."""
        self.lock = threading.Lock()  # another thread of the parent may have held it
        while self._workers:
            self._workers.popitem()[1].forget()


POOL = Pool()
"""This process's pool."""


def close_pool() -> None:
    """End the worker processes that `run_ranks` keeps for its next call.

    It happens by itself when the process ends; call it to have the memory back earlier.
    """
    with POOL.lock:
        POOL.close()


def _at_exit() -> None:
    # a thread within a call holds the lock; its workers end with their lifelines
    if POOL.lock.acquire(blocking=False):
        POOL.close()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=POOL.forget)
