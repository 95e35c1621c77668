"""Messages between hosts, and the options of a group: `Options` names the engine that sends them.

An engine is a process group such as Gloo, of which only `send` and `recv` are used.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from gradwire._engine_errors import backend_failure
from gradwire._groups import destroy_in_thread
from gradwire.errors import (
    ArgumentTypeError,
    CollectiveTimeoutError,
    DistributedError,
    PeerFailedError,
    PeerLostError,
)
from gradwire.shm.sync import Deadline

USER_TAGS = 8
"""Tags below are those of collectives; a caller's tag is that much higher on the engine."""
_MAX_TAG = 2**31 - 1 - USER_TAGS
_FAILED = "failed"
_STORE_SECONDS = 0.5
_KINDS: dict[str, type[DistributedError]] = {
    kind.__name__: kind for kind in (PeerLostError, PeerFailedError, CollectiveTimeoutError)
}


class Engine(Protocol):
    """What is asked of the process group between hosts: messages of bytes, by rank and tag.

    As torch's ProcessGroup has them. Messages of one tag arrive in the order in which they were
    sent. Where there are an `abort`, which ends what is under way, and a `shutdown`, which leaves,
    they are called when the group fails and when this rank leaves it.
    """

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Any:
        """Start to send a tensor; returns torch's Work."""

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Any:
        """Start to receive a tensor; returns torch's Work."""


class Transfer:
    """A message under way.

    Args:
        work: The engine's handle.
        tensor: What is sent or filled: kept until then.
        peers: The other rank, or all that it may be.
        fail: Makes an error of ours of the engine's.
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
        """Wait until the tensor is filled, or need not be kept any more.

        Raises:
            PeerLostError, PeerFailedError, CollectiveTimeoutError: It will never be.
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
        """The rank that a received message came from."""
        work = self._work
        source: int = work._source_rank() if hasattr(work, "_source_rank") else work.source_rank()
        return source


class Transport:
    """The engine as one rank uses it, and what a rank says to the others when it fails.

    Args:
        engine: Of all ranks of the group.
        rank: This rank.
        size: How many ranks.
        store: The group's; the reason of the first failure is left there.
    """

    def __init__(self, engine: Engine, rank: int, size: int, store: Store) -> None:
        self._engine, self._rank, self._size, self._store = engine, rank, size, store
        self._cut = False
        if isinstance(engine, dist.ProcessGroupGloo):
            self._destroy: Callable[[], object] = destroy_in_thread(self, engine)
        else:
            self._destroy = lambda: None

    def send(self, flat: Tensor, rank: int, tag: int) -> Transfer:
        """Start to send a 1-d contiguous tensor; leave it as it is until the transfer's end."""
        return self._start("send", flat, rank, tag)

    def receive(self, flat: Tensor, rank: int, tag: int) -> Transfer:
        """Start to fill a 1-d contiguous tensor with the next message of this tag."""
        return self._start("recv", flat, rank, tag)

    def receive_from_any(self, flat: Tensor, tag: int) -> Transfer:
        """Start to fill a tensor with the next message of this tag from any rank."""
        data = flat.view(torch.uint8)
        try:
            work = self._engine.recv_anysource([data], tag)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise self._failure(error, "any rank", Deadline(None)) from error
        return Transfer(work, data, "any rank", self._failure)

    def _start(self, name: str, flat: Tensor, rank: int, tag: int) -> Transfer:
        data, peer = flat.view(torch.uint8), f"rank {rank}"
        try:
            work = getattr(self._engine, name)([data], rank, tag)
        except RuntimeError as error:  # the connection has ended
            raise self._failure(error, peer, Deadline(None)) from error
        return Transfer(work, data, peer, self._failure)

    def _failure(self, error: BaseException, peer: str, deadline: Deadline) -> DistributedError:
        """The error of a transfer: the group's first failure, if there is one to be known."""
        if isinstance(error, DistributedError):
            return error
        timed_out, reasons = deadline.over(), list[bytes]()
        if not timed_out:
            _try(lambda: reasons.append(self._first_failure()))
        if reasons and reasons[0]:
            kind, _, text = reasons[0].decode(errors="replace").partition(": ")
            return _KINDS.get(kind, PeerFailedError)(text)
        return backend_failure(error, f"a message from or to {peer}", timed_out=timed_out)

    def _first_failure(self) -> bytes:
        """What the first rank that failed left in the store; empty if none has."""
        return self._store.get(_FAILED) if self._store.check([_FAILED]) else b""

    def report_failure(self, reason: BaseException) -> None:
        """Leave the reason for the others, and end the connections: nobody then waits for this."""
        if self._cut:
            return
        name = type(reason).__name__
        kind = name if name in _KINDS else PeerFailedError.__name__
        text = f"{kind}: an operation failed on rank {self._rank}: {name}: {reason}"

        def leave() -> None:
            # of several, any is a true one; a FileStore cannot compare and set what is not there
            if not self._first_failure():
                self._store.set(_FAILED, text)

        _try(leave)
        self.cut()

    def cut(self) -> None:
        """End all connections, and with them what is under way here and on the other side."""
        if self._cut:
            return
        self._cut = True
        if not isinstance(self._engine, dist.ProcessGroupGloo):
            abort = getattr(self._engine, "abort", None)
            if abort is not None:
                abort()
            return
        # abort() and shutdown() of Gloo end nothing. A receive whose time is over does: it closes
        # all connections of this rank
        for rank in range(self._size):
            if rank != self._rank:
                with contextlib.suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    self._engine.recv([nothing], rank, _MAX_TAG).wait(timedelta(milliseconds=1))
                    return

    def close(self) -> None:
        """Give the engine up: Gloo's connections end with its last handle."""
        shutdown = None
        # of torch's ProcessGroup, Gloo's does nothing, and other groups' end all connections
        if not isinstance(self._engine, _Closed | dist.ProcessGroupGloo):
            shutdown = getattr(self._engine, "shutdown", None)
        self._cut, self._engine = True, _Closed()
        self._destroy()
        if shutdown is not None:
            shutdown()


def _try(call: Callable[[], None]) -> None:
    """Ask the store, which may be what was lost: its answer is not waited for without end."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            call()

    asking = threading.Thread(target=quietly, name="gradwire-hosts-store", daemon=True)
    asking.start()
    asking.join(_STORE_SECONDS)


class _Closed:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the group has left its engine")


@dataclass(frozen=True)
class Options:
    """What a shm group over several hosts goes by: `init_process_group(..., pg_options=...)`.

    All ranks give equal engines; each gives the host that it is on.

    Args:
        engine: Makes what carries messages between hosts, from a store, a rank, a size and a
            timeout: an object with `send` and `recv` as a ProcessGroup has them, for bytes on the
            CPU. Gloo by default.
        host: Ranks that give different names share no memory, even if they could: for the sockets
            of a large machine, or to try out on one host what runs on several.

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
