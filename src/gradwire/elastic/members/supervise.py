"""Serve a store and supervise the members of an elastic run on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import torch.distributed as dist

from gradwire.elastic.members.environment import (
    LAUNCH_VARIABLES,
    MEMBERS_VARIABLE,
    STORE_VARIABLE,
    parse_address,
)
from gradwire.elastic.members.supervisor import ENDING, Supervisor
from gradwire.errors import ArgumentError

SHUTDOWN_SECONDS = 30.0
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


def serve_store(host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """Serve a store in this process, which is not a member.

    Args:
        host: Address to listen on; members on other hosts must be able to reach it.
        port: Port to listen on; 0 for a free one.

    Raises:
        ArgumentError: This host cannot listen there.

    Example:
        >>> store = serve_store()
        >>> store.port > 0
        True
    """
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ArgumentError(
            f"no store can be served at {host}:{port}: {error}; pass an address of this host and a "
            "free port"
        ) from error
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
    grace: float | None = None,
    shutdown_timeout: float = SHUTDOWN_SECONDS,
    log: Callable[[str], None] = lambda line: None,
) -> int:
    """Run a command in several processes as members of an elastic run, until all have ended.

    A process that fails or is killed is restarted, unless its run was done. Processes that exit
    with 0 are not restarted, and the others are waited for. If more than `nproc` processes in a row
    end with the same error at the same step, all are ended.

    SIGTERM, SIGINT, SIGHUP and SIGQUIT are forwarded to the processes, which have
    `shutdown_timeout` seconds to end before they are killed; SIGUSR1 and SIGUSR2 are forwarded. No
    process is left when this function returns or raises. Signals are handled only in the main
    thread.

    Args:
        command: Command and its arguments.
        nproc: Number of processes.
        max_restarts: Number of restarts, over all processes.
        store: host:port of a store that another process serves; None to serve one here.
        members: Number of members that the first generation waits for; None for `nproc`.
        grace: Seconds after which processes are ended that still run when another of this host is
            done; None to wait for them.
        shutdown_timeout: Seconds between a signal that ends the processes and SIGKILL.
        log: Function called with a line of text about each death, restart and end.

    Returns:
        0 if the run is done, or the process that ended last exited with 0. Otherwise the exit code
        of a process, 128 + n if signal n killed it; 1 if processes had to be ended. A process that
        fails after its run is done makes it nonzero.

    Raises:
        ArgumentError: The command is empty, or an argument is invalid.
        SystemExit: A signal ended the processes, even if they exited with 0; the code is 128 + its
            number.
        KeyboardInterrupt: SIGINT ended the processes.

    Example:
        >>> import sys
        >>> supervise([sys.executable, "-c", "pass"], nproc=2)
        0
        >>> supervise([sys.executable, "-c", "raise SystemExit(7)"], nproc=1, max_restarts=1)
        7
    """
    if not command:
        raise ArgumentError("command is empty: pass the program and its arguments")
    for name, value, least in (
        ("nproc", nproc, 1),
        ("max_restarts", max_restarts, 0),
        ("members", nproc if members is None else members, 1),
        ("grace", grace or 0.0, 0),
        ("shutdown_timeout", shutdown_timeout, 0),
    ):
        if not value >= least:
            raise ArgumentError(f"{name} is {value}: pass {least} or more")
    if store is not None:
        parse_address(store, "store")
    if store is None:
        served = serve_store()  # lives until this function returns
        store = f"127.0.0.1:{served.port}"
    environment = {
        **os.environ,
        STORE_VARIABLE: store,
        MEMBERS_VARIABLE: str(nproc if members is None else members),
        LAUNCH_VARIABLES[0]: uuid.uuid4().hex,
    }
    supervisor = Supervisor(command, environment, nproc, max_restarts, grace, shutdown_timeout, log)
    with _signals_taken(supervisor.signals):
        try:
            code = supervisor.run()
        finally:
            supervisor.end()
    if code is None:
        if supervisor.stopped_by == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + supervisor.stopped_by)
    return code


@contextlib.contextmanager
def _signals_taken(received: list[int]) -> Iterator[None]:
    """Append signals to `received` instead of handling them, except ignored ones."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def take(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.getsignal(number) for number in FORWARDED}
    taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    try:
        for number in taken:
            signal.signal(number, take)
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number] or signal.SIG_DFL)
