"""Messages between hosts, and `Options`, which select the engine that sends them.

An engine is a process group such as Gloo, of which only `send` and `recv` are used. Collectives of
an engine would have limits of their own (dtypes, uneven sizes, the order of additions), and only
messages can be posted ahead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

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

T = TypeVar("T")
USER_TAGS = 8
"""Number of tags reserved for collectives; a caller's tag is increased by it on the engine."""
_MAX_TAG = 2**31 - 1 - USER_TAGS
_FAILED = "failed"
_STORE_SECONDS = 0.5
_KINDS: dict[str, type[DistributedError]] = {
    kind.__name__: kind for kind in (PeerLostError, PeerFailedError, CollectiveTimeoutError)
}


class Engine(Protocol):
    """Interface of the process group between hosts: messages of bytes, by rank and tag.

    The methods are those of torch's ProcessGroup. Messages of one tag arrive in the order in which
    they were sent. If the engine has an `abort`, which ends pending messages, it is called when the
    group fails; if it has a `shutdown`, it is called when this rank leaves the group.
    """

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Any:
        """Start to send a tensor; return torch's Work."""

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Any:
        """Start to receive a tensor; return torch's Work."""


class GlooEngine:
    """Gloo, whose own `abort` and `shutdown` end no pending message.

    Args:
        gloo: Process group, to which the caller keeps no reference.
        others: All other ranks.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo, others: Sequence[int]) -> None:
        self._gloo: Any = gloo
        self._others = others
        self._destroy = destroy_in_thread(self, gloo)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        """Start to send a tensor."""
        return self._gloo.send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        """Start to receive a tensor."""
        return self._gloo.recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Start to receive a tensor from any rank."""
        return self._gloo.recv_anysource(tensors, tag)

    def abort(self) -> None:
        """End all connections of this rank: a receive that times out does."""
        for rank in self._others:  # that of a rank that has ended raises at once
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self._gloo.recv([nothing], rank, _MAX_TAG).wait(timedelta(milliseconds=1))

    def shutdown(self) -> None:
        """End the connections with the last reference to Gloo."""
        self._gloo = _Closed()
        self._destroy()


class Transfer:
    """A pending message.

    Args:
        tensor: Tensor that is sent or filled, kept alive until then.
        peer: Name of the other rank, or "any rank".
        fail: Function that converts an error of the engine into a DistributedError.
    """

    def __init__(
        self,
        work: Any,
        tensor: Tensor,
        peer: str,
        fail: Callable[[BaseException, str, Deadline], DistributedError],
    ) -> None:
        self._work, self._tensor, self._peer, self._fail = work, tensor, peer, fail

    def wait(self, deadline: Deadline) -> None:
        """Wait until the tensor is filled, or was sent.

        Raises:
            PeerLostError, PeerFailedError, CollectiveTimeoutError: The message failed.
        """
        left = deadline.left()
        try:
            if left is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=max(left, 1e-3)))
        except Exception as error:
            raise self._fail(error, self._peer, deadline) from error

    def source(self) -> int:
        """Return the rank from which a message was received."""
        work = self._work
        source: int = work._source_rank() if hasattr(work, "_source_rank") else work.source_rank()
        return source


class Transport:
    """Engine as one rank uses it, and the report of a failure to the other ranks.

    Args:
        store: Store of the group, which receives the reason of the first failure.
    """

    def __init__(self, engine: Engine, rank: int, size: int, store: Store) -> None:
        if isinstance(engine, dist.ProcessGroupGloo):
            engine = GlooEngine(engine, [peer for peer in range(size) if peer != rank])
        self._engine, self._rank, self._store = engine, rank, store
        self._cut = False

    def send(self, flat: Tensor, rank: int, tag: int) -> Transfer:
        """Start to send a 1-d contiguous tensor, which must not change until the transfer ends."""
        return self._start("send", flat, rank, tag)

    def receive(self, flat: Tensor, rank: int | None, tag: int) -> Transfer:
        """Start to fill a 1-d contiguous tensor with the next message of this tag.

        Args:
            flat: Tensor to fill.
            rank: Rank of the sender; None for any rank.
            tag: Tag on the engine.
        """
        if rank is None:
            return self._start("recv_anysource", flat, None, tag)
        return self._start("recv", flat, rank, tag)

    def _start(self, name: str, flat: Tensor, rank: int | None, tag: int) -> Transfer:
        data = flat.view(torch.uint8)
        peer, where = ("any rank", ()) if rank is None else (f"rank {rank}", (rank,))
        try:
            work = getattr(self._engine, name)([data], *where, tag)
        except RuntimeError as error:  # the connection has ended
            raise self._failure(error, peer, Deadline(None)) from error
        return Transfer(work, data, peer, self._failure)

    def _failure(self, error: BaseException, peer: str, deadline: Deadline) -> DistributedError:
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

        with contextlib.suppress(Exception):  # as in `_failure`
            in_time(leave, _STORE_SECONDS)
        self.cut()

    def cut(self) -> None:
        """End all connections, and with them pending messages on both sides."""
        if self._cut:
            return
        self._cut = True
        if abort := getattr(self._engine, "abort", None):
            abort()

    def close(self) -> None:
        """Release the engine."""
        engine, self._engine, self._cut = self._engine, _Closed(), True
        if not isinstance(engine, _Closed) and (shutdown := getattr(engine, "shutdown", None)):
            shutdown()


def in_time(call: Callable[[], T], seconds: float) -> T:
    """Call a function that has no deadline of its own, in a thread.

    Raises:
        TimeoutError: It takes longer; the thread goes on.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="gradwire-in-time", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no result after {seconds:g} s")
    return results[0]


class _Closed:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the group has left its engine")


@dataclass(frozen=True)
class Options:
    """Options of a shm group: `init_process_group(..., pg_options=...)`.

    All ranks pass equal engines, and each passes the name of its own host.

    Args:
        engine: Function of a store, a rank, a size and a timeout that returns the engine for
            messages between hosts: an object with `send` and `recv` of a ProcessGroup, for bytes
            on the CPU. Gloo by default.
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
