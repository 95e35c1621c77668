"""Data between hosts, and `Options`, which select the engine that carries it.

An engine is a process group of all ranks, such as Gloo. Reductions use only its messages: its own
would have limits (dtypes, the order of additions), and only messages can be posted ahead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from gradwire._engine_errors import backend_failure
from gradwire._groups import destroy_in_thread
from gradwire._processes import Deadline
from gradwire.errors import (
    ArgumentTypeError,
    CollectiveTimeoutError,
    DistributedError,
    PeerFailedError,
    PeerLostError,
)

Result = TypeVar("Result")

OWN_TAGS = 8
"""Number of tags reserved for collectives; a caller's tag is increased by it on the engine."""
_LAST_TAG = 2**31 - 1  # of no message
_FAILED = "failed"
_STORE_SECONDS = 0.5
_POLL_SECONDS = 0.01
_KINDS: dict[str, type[DistributedError]] = {
    kind.__name__: kind for kind in (PeerLostError, PeerFailedError, CollectiveTimeoutError)
}


@dataclass(frozen=True)
class Options:
    """Options of a shm group: `init_process_group(..., pg_options=...)`.

    All ranks pass equal engines, and each passes the name of its own host.

    Args:
        engine: Function of a store, a rank, a size and a timeout that returns the process group
            between hosts, of all ranks: Gloo by default. Its `send`, `recv`, `allgather` and
            `alltoall_base` are used, with bytes on the CPU.
        host: Name of the host. Ranks with different names share no memory, even if they could: for
            the sockets of a large machine, or to simulate several hosts on one.

    Example:
        >>> import gradwire.shm
        >>> def main():
        ...     options = gradwire.shm.Options(host=f"host {dist.get_rank() // 2}")
        ...     group = dist.new_group(backend="shm", pg_options=options)
        ...     x = torch.ones(3)
        ...     dist.all_reduce(x, group=group)
        ...     return gradwire.shm.teams(group), x.tolist()
        >>> run_ranks(main, world_size=3, backend="gloo")[0]
        (((0, 1), (2,)), [3.0, 3.0, 3.0])
    """

    engine: Callable[[Store, int, int, timedelta], Any] = dist.ProcessGroupGloo
    host: str = ""

    def __post_init__(self) -> None:
        if not callable(self.engine):
            raise ArgumentTypeError(
                f"engine is {self.engine!r}: pass a function of a store, a rank, a size and a "
                "timeout, such as torch.distributed.ProcessGroupGloo"
            )
        if not isinstance(self.host, str):
            raise ArgumentTypeError(f"host is {self.host!r}: pass a str")


class _Closed:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the group has left its engine")


class Transport:
    """Engine as one rank uses it, and the report of a failure to the other ranks."""

    def __init__(self, engine: Any, rank: int, size: int, store: Store) -> None:
        # The caller keeps no reference to the engine. The store receives the reason of the first
        # failure.
        self._engine, self._rank, self._size, self._store = engine, rank, size, store
        self._cut = False
        self._end: Callable[[], object] = getattr(engine, "shutdown", lambda: None)
        self._is_gloo = isinstance(engine, dist.ProcessGroupGloo)
        if self._is_gloo:
            self._end = destroy_in_thread(self, engine)

    def send(self, flat: Tensor, rank: int, tag: int) -> Transfer:
        """Start to send a 1-d contiguous tensor, which must not change until the transfer ends."""
        data = flat.view(torch.uint8)
        return self._start(f"rank {rank}", "send", [data], rank, tag)

    def receive(self, flat: Tensor, rank: int | None, tag: int) -> Transfer:
        """Start to fill a 1-d contiguous tensor with the next message; from any rank if None."""
        data = flat.view(torch.uint8)
        if rank is None:
            return self._start("any rank", "recv_anysource", [data], tag)
        return self._start(f"rank {rank}", "recv", [data], rank, tag)

    def all_gather(self, parts: list[Tensor], own: Tensor, deadline: Deadline) -> None:
        """Fill the parts with all ranks' bytes, of which each has as many."""
        opts = _with_deadline(AllgatherOptions(), deadline)
        self._start("all ranks", "allgather", [parts], [own], opts).wait(deadline)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        receives: list[int],
        sends: list[int],
        deadline: Deadline,
    ) -> None:
        """Exchange so many bytes between every two ranks."""
        opts = _with_deadline(AllToAllOptions(), deadline)
        work = self._start("all ranks", "alltoall_base", received, sent, receives, sends, opts)
        work.wait(deadline)

    def _start(self, peer: str, name: str, *args: Any) -> Transfer:
        try:
            work = getattr(self._engine, name)(*args)
        except RuntimeError as error:  # the connection has ended
            raise self.failure(error, peer, Deadline(None)) from error
        return Transfer(self, work, args, peer)

    def failure(self, error: BaseException, peer: str, deadline: Deadline) -> DistributedError:
        """Return the error of a transfer: the group's first failure, if it is known."""
        if isinstance(error, DistributedError):
            return error
        timed_out, reason = deadline.over(), b""
        if not timed_out:
            with contextlib.suppress(Exception):  # the store's host may be the rank that was lost
                reason = in_time(self._first_failure, _STORE_SECONDS)
        if reason:
            kind, _, text = reason.decode(errors="replace").partition(": ")
            return _KINDS.get(kind, PeerFailedError)(text)
        return backend_failure(error, f"a message from or to {peer}", timed_out=timed_out)

    def _first_failure(self) -> bytes:
        """Return the report of the first rank that failed, from the store; empty if none has."""
        return self._store.get(_FAILED) if self._store.check([_FAILED]) else b""

    def report_failure(self, reason: BaseException) -> None:
        """Store the reason for the other ranks and end the connections, so that none waits."""
        if self._cut:
            return
        name = type(reason).__name__
        kind = name if name in _KINDS else PeerFailedError.__name__
        text = f"{kind}: an operation failed on rank {self._rank}: {name}: {reason}"

        def leave() -> None:
            # any of several reasons is valid; a FileStore cannot compare-and-set a missing key
            if not self._first_failure():
                self._store.set(_FAILED, text)

        with contextlib.suppress(Exception):  # as in `failure`
            in_time(leave, _STORE_SECONDS)
        self.cut()

    def cut(self) -> None:
        """End all connections, and with them pending messages on both sides."""
        if self._cut:
            return
        self._cut, engine = True, self._engine
        if not self._is_gloo:
            getattr(engine, "abort", lambda: None)()
            return
        cut_gloo(engine, self._rank, self._size)

    def close(self) -> None:
        """Release the engine; Gloo ends its connections with its last reference."""
        self._cut, self._engine = True, _Closed()
        end, self._end = self._end, lambda: None
        end()


class Transfer:
    """A pending message or collective of the engine."""

    def __init__(self, transport: Transport, work: Any, args: Sequence[Any], peer: str) -> None:
        # the arguments keep the engine's tensors alive until it is done; `peer` names the other
        # ranks
        self._transport, self._work, self._args, self._peer = transport, work, args, peer

    def wait(self, deadline: Deadline) -> None:
        """Wait until the tensors are filled, or were sent."""
        left = deadline.left()
        try:
            if left is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=max(left, 1e-3)))
        except Exception as error:
            raise self._transport.failure(error, self._peer, deadline) from error

    def source(self) -> int:
        """Return the rank from which a message was received."""
        work = self._work
        source: int = work._source_rank() if hasattr(work, "_source_rank") else work.source_rank()
        return source


def _with_deadline(opts: Any, deadline: Deadline) -> Any:
    if (left := deadline.left()) is not None:
        opts.timeout = timedelta(seconds=max(left, 1e-3))
    return opts


def cut_gloo(backend: Any, rank: int, size: int) -> None:
    """End all connections of a Gloo backend, and with them all operations on both sides."""
    # Gloo's own `abort` ends no pending message; a receive that times out ends the connection
    for other in range(size):
        if other != rank:
            with contextlib.suppress(RuntimeError):  # the rank has ended
                nothing = torch.empty(1, dtype=torch.uint8)
                backend.recv([nothing], other, _LAST_TAG).wait(timedelta(milliseconds=1))


def in_time(
    call: Callable[[], Result],
    seconds: float,
    poll: Callable[[], object] = lambda: None,
    release: Callable[[Result], object] = lambda late: None,
) -> Result:
    """Call a function that has no deadline of its own, in a thread."""
    # `poll` is called meanwhile, and may raise. Then, and after so many seconds, `release` gets a
    # result that comes too late.

    def run(future: Future[Result]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised in the waiting thread
            future.set_exception(error)
            del future  # as below

    def close(late: Future[Result]) -> None:
        if late.exception() is None:
            release(late.result())

    future: Future[Result] = Future()
    name = "gradwire-in-time"
    threading.Thread(target=run, args=(future,), name=name, daemon=True).start()
    deadline = Deadline(seconds)
    try:
        while not wait([future], _POLL_SECONDS).done:
            poll()
            if deadline.over():
                raise TimeoutError(f"no result after {seconds:g} s")
    except BaseException:
        future.add_done_callback(close)
        raise
    try:
        return future.result()
    finally:
        # an error's traceback refers to this frame: the cycle would keep what the function uses
        # until the next garbage collection
        del future
