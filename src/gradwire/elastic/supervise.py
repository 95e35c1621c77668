"""A thin supervisor: it serves the store, starts members, and starts again those that died."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import torch.distributed as dist

from gradwire.elastic.joining import MEMBERS_VARIABLE, STORE_VARIABLE
from gradwire.errors import ArgumentError

__all__ = ["serve_store", "supervise"]

POLL_SECONDS = 0.02
END_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def serve_store(host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """A store that lives in this process, which is no member.

    Args:
        host: The address that it listens on: members of other hosts need one that they can reach.
        port: Its port; 0 for one that is free.

    Example:
        >>> store = serve_store()
        >>> store.port > 0
        True
    """
    listener = socket.create_server((host, port))
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def supervise(
    command: Sequence[str],
    *,
    nproc: int,
    max_restarts: int = 3,
    store: str | None = None,
    members: int | None = None,
    grace: float = 60.0,
    on_exit: Callable[[int, int], None] = lambda pid, code: None,
    on_start: Callable[[int], None] = lambda pid: None,
) -> int:
    """Run a command in several processes as members of an elastic run, until it is done.

    A process that ends with an error, or is killed, is started again. When one has ended well, the
    run is done: nobody is started again, and the others have `grace` seconds to end. Whatever
    happens, none of them is left; no other process is touched.

    Args:
        command: The command and its arguments.
        nproc: How many processes.
        max_restarts: How often one is started again, in all.
        store: host:port of a store that another process serves; None: this process does.
        members: How many the first epoch waits for; None: `nproc`.
        grace: Seconds.
        on_exit: Called with the process id and exit code of each that has ended.
        on_start: Called with the process id of each that is started.

    Returns:
        0 if one ended well; otherwise the exit code of the last one.

    Raises:
        ArgumentError: The command is empty, or a number is too small.

    Example:
        >>> import sys
        >>> supervise([sys.executable, "-c", "pass"], nproc=2)
        0
        >>> supervise([sys.executable, "-c", "raise SystemExit(7)"], nproc=1, max_restarts=1)
        7
    """
    if not command:
        raise ArgumentError("command is empty: pass the program and its arguments")
    for name, value, least in (("nproc", nproc, 1), ("max_restarts", max_restarts, 0)):
        if value < least:
            raise ArgumentError(f"{name} is {value}: pass {least} or more")
    served = serve_store() if store is None else None
    address = store if served is None else f"127.0.0.1:{served.port}"
    environment = {
        **os.environ,
        STORE_VARIABLE: str(address),
        MEMBERS_VARIABLE: str(members or nproc),
    }

    def start() -> subprocess.Popen[bytes]:
        # the child dies with this thread's process, by SIGKILL too
        process = subprocess.Popen(command, env=environment, preexec_fn=_die_with_parent)
        on_start(process.pid)
        return process

    running: list[subprocess.Popen[bytes]] = []
    with _terminations_raised():
        try:
            running += [start() for _ in range(nproc)]
            return _watch(running, start, max_restarts, grace, on_exit)
        finally:
            _end(running)


def _watch(
    running: list[subprocess.Popen[bytes]],
    start: Callable[[], subprocess.Popen[bytes]],
    restarts: int,
    grace: float,
    on_exit: Callable[[int, int], None],
) -> int:
    """Start again who ended with an error, until one has ended well or none may be started."""
    done_at: float | None = None
    code = 0
    while running:
        for process in [p for p in running if p.poll() is not None]:
            running.remove(process)
            assert process.returncode is not None
            on_exit(process.pid, process.returncode)
            if process.returncode == 0:
                done_at = done_at or time.monotonic()
            elif done_at is None:
                code = process.returncode
                if restarts:
                    restarts -= 1
                    running.append(start())
        if done_at is not None and time.monotonic() - done_at > grace:
            break
        time.sleep(POLL_SECONDS)
    return 0 if done_at is not None else code if code > 0 else 128 - code


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is left: asked at first, and then killed."""
    for process in running:
        process.terminate()
    deadline = time.monotonic() + END_SECONDS
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in running:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _terminations_raised() -> Iterator[None]:
    """Let SIGTERM end the block as an exception, so that members are ended first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
