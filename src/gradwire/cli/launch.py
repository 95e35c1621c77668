"""Run one job in several processes of this host, and end all of them when one ends badly.

The parent keeps the store at which the ranks meet (on a port of its own, on the loopback
interface only), passes on what they send, and stops them. No rank outlives it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from gradwire.cli.places import Place, leave

__all__ = ["Job", "RankFailure", "Send", "launch"]

Send = Callable[[Any], None]
Job = Callable[[Place, Send], None]

_LAST_WORDS_S = 1.0  # how long a rank that reported an error may take to end


class RankFailure(Exception):
    """A rank raised or died, and the others were stopped.

    Args:
        rank: The rank that failed first.
        reason: What happened to it, in a few words.
        details: Its traceback, or "" where it left none.
    """

    def __init__(self, rank: int, reason: str, details: str) -> None:
        super().__init__(rank, reason, details)
        self.rank = rank
        self.reason = reason
        self.details = details

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"

    @classmethod
    def of(cls, rank: int, error: Exception) -> RankFailure:
        """The failure of a rank that raised `error`, which is being handled."""
        return cls(rank, f"failed: {type(error).__name__}: {error}", traceback.format_exc())


@dataclass(frozen=True)
class _Raised:
    """What a rank sends as its last words."""

    when: float
    failure: RankFailure


@dataclass
class _Rank:
    """One started process, and what the parent knows of it."""

    number: int
    process: multiprocessing.process.BaseProcess
    inbox: Connection
    raised: _Raised | None = None

    def read(self, receive: Send) -> None:
        """Pass on everything the rank has sent so far."""
        while not self.inbox.closed and self.inbox.poll():
            try:
                message = self.inbox.recv()
            except (EOFError, OSError):  # OSError: it died in the middle of a message
                self.inbox.close()
            else:
                if isinstance(message, _Raised):
                    self.raised = message
                else:
                    receive(message)

    @property
    def died(self) -> bool:
        """Whether it ended badly, without a word."""
        return self.raised is None and self.process.exitcode not in (None, 0)


def launch(job: Job, nproc: int, receive: Send) -> None:
    """Run `job(place, send)` in `nproc` new processes and wait until all have ended.

    Args:
        job: What each process runs; it is pickled, and so must be importable by its name.
        nproc: How many processes.
        receive: Is called here with each object that a rank gives to its `send`.

    Raises:
        RankFailure: A rank raised or died. Whatever is raised, no process is left.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    ranks: list[_Rank] = []
    try:
        with _interrupts_held():
            for number in range(nproc):
                ranks.append(_start(job, Place(number, nproc, number, nproc, port)))
        _watch(ranks, receive)
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
        del store  # only now: a rank that is still alive may be talking to it


def _start(job: Job, place: Place) -> _Rank:
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(job, place, outbox), daemon=True)
    process.start()
    outbox.close()  # the rank's copy is the only one left, so that its death ends the pipe
    return _Rank(place.rank, process, inbox)


def _run(job: Job, place: Place, outbox: Connection) -> None:
    """The whole life of one rank's process, after which it is gone."""
    _exit_with_parent()
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # needs no host name that resolves
    try:
        job(place, outbox.send)
    except Exception as error:
        outbox.send(_Raised(time.monotonic(), RankFailure.of(place.rank, error)))
        leave(1)
    leave(0)


def _exit_with_parent() -> None:
    """End this process when the parent is gone, however that went (SIGKILL included)."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C for later; processes started meanwhile never see it: stopping is our task."""
    resource_tracker.ensure_running()  # or the first start would, and let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(ranks: list[_Rank], receive: Send) -> None:
    """Pass messages on until every rank has ended; raise when one ends badly."""
    while True:
        running = [rank for rank in ranks if rank.process.exitcode is None]
        for rank in ranks:
            rank.read(receive)
        if any(rank.raised or rank.died for rank in ranks):
            raise _first_failure(ranks)
        if not running:
            return
        wait(_signs_of_life(running))


def _signs_of_life(ranks: list[_Rank]) -> list[Any]:
    inboxes = [rank.inbox for rank in ranks if not rank.inbox.closed]
    return [*inboxes, *(rank.process.sentinel for rank in ranks)]


def _first_failure(ranks: list[_Rank]) -> RankFailure:
    """The failure that the others follow from.

    A rank that dies takes the connections of the others with it, and their complaints may arrive
    before the news of its death. So those who complain get a moment to end, and a death found
    then comes before any complaint, and an earlier complaint before a later one.
    """
    deadline = time.monotonic() + _LAST_WORDS_S
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        rank.read(lambda message: None)
    for rank in ranks:
        if rank.died:
            return RankFailure(rank.number, _how_it_ended(rank.process.exitcode), "")
    told = [rank.raised for rank in ranks if rank.raised]
    return min(told, key=lambda raised: raised.when).failure


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode} before its work was done"
