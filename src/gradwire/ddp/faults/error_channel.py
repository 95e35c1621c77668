"""Waits for communication, and reports of errors between ranks when collectives hang.

A wait polls at intervals for errors that other ranks report through the group's store, and has a
deadline. A backend's failure is translated to an error of gradwire by its type and by whether the
backend's timeout has passed, never by its message.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroup, Work

from gradwire._engine_errors import backend_failure, backend_timeout, is_over, is_transport
from gradwire._groups import find_store, message_device, store_of
from gradwire._processes import is_alive, this_process
from gradwire._torch import is_done
from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError
from gradwire.recorder import record_error
from gradwire.shm import ShmWork, shm_backend_of


def broadcast_options(root: int) -> BroadcastOptions:
    """Return the options of a broadcast from a rank of the group."""
    options = BroadcastOptions()
    options.rootRank = root
    return options


def waits_on_cpu(group: ProcessGroup, device: torch.device) -> bool:
    """Return True if waiting for a collective of a device's tensors blocks the CPU."""
    if device.type == "cpu":
        return True
    # Gloo copies an accelerator's tensors to the host, and its waits end when the other ranks have
    # answered. Other backends only queue a wait on the accelerator's stream.
    try:
        return str(group._get_backend(device).name()) == "gloo"
    except RuntimeError:  # no backend for the device, or a group in Python
        return False


def timeout_of(group: ProcessGroup) -> float:
    """Return the group's timeout in seconds; PyTorch's default if it has none."""
    if (member := shm_backend_of(group)) is not None:
        return member.timeout.total_seconds()
    return backend_timeout(group)


@contextmanager
def backend_errors(group: ProcessGroup, what: str, since: float | None = None) -> Iterator[None]:
    """Raise PeerLostError or CollectiveTimeoutError for a backend's error in this context."""
    # the time at which the collective was sent
    since = time.monotonic() if since is None else since
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DistributedError) or not is_transport(error):
            raise
        failure = backend_failure(error, what, timed_out=is_over(since, timeout_of(group)))
        record_error(failure)
        raise failure from error


POLL_SECONDS = 0.2
"""Interval at which a wait polls. A shorter wait does not poll."""
GRACE_SECONDS = 5.0
"""Time after the backend's deadline at which a wait gives up. The backend's error comes first and
has more detail."""


Handle: TypeAlias = "Work | torch._C.Future[Any]"
"""Communication in progress: a collective, or the future of a communication hook."""


def failure_of(work: Work) -> BaseException | None:
    """Return the error of a work handle that has ended, or None."""
    try:
        work.wait(timedelta(0))  # none: some take no other, some need an argument
    except RuntimeError as error:
        return error
    return None


def wait_work(
    work: Work, poll: Callable[[], None], *, on_cpu: bool, seconds: float
) -> BaseException | None:
    """Wait for a work handle, or let the current stream wait; return the backend's error."""
    if not on_cpu:
        return failure_of(work)
    # The handles of some groups written in Python ignore the timeout of `wait`, or refuse it.
    has_timeout = isinstance(work, ShmWork) or type(work).get_future is Work.get_future
    deadline = time.monotonic() + seconds + GRACE_SECONDS
    while has_timeout:
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=POLL_SECONDS))
            return None
        except RuntimeError:
            if is_done(work):  # failed, or ended just after the interval
                return failure_of(work)
            has_timeout = time.monotonic() > began + POLL_SECONDS / 2
        # its exceptions are propagated
        poll()
        if time.monotonic() > deadline:
            return CollectiveTimeoutError(
                f"not done {GRACE_SECONDS:g} s after the timeout of {seconds:g} s"
            )
    return wait_future(work.get_future(), poll, seconds) or failure_of(work)


class PolledWork(Work):
    """Handle of a collective whose `wait` polls, and then calls `ended`."""

    def __init__(self, work: Work, wait: Callable[[], Any], ended: Callable[[Work], None]) -> None:
        super().__init__()
        self._work, self._wait, self._ended = work, wait, ended
        self.get_future, self.result = work.get_future, work.result  # type: ignore[method-assign]
        self.is_completed, self.exception = work.is_completed, work.exception  # type: ignore[method-assign]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if timeout > timedelta(0):  # shorter than the group's, and the caller expects it to pass
            return self._work.wait(timeout)
        if error := self._wait():
            raise error
        self._ended(self)
        return True


def wait_done(work: Work, poll: Callable[[], None]) -> None:
    """Wait until an accelerator's collective has ended. The backend enforces the deadline."""
    # `wait()` would only queue a wait on the stream. The pause grows from 20 µs to 1 ms: short
    # collectives end in microseconds, and long ones should not keep a core busy.
    pause = 0.0
    polled = time.monotonic()
    while not is_done(work):
        time.sleep(pause)
        pause = min(2 * pause + 2e-5, 1e-3)
        if time.monotonic() - polled > POLL_SECONDS:
            poll()
            polled = time.monotonic()


def wait_future(
    future: torch._C.Future[Any], poll: Callable[[], None], seconds: float
) -> BaseException | None:
    """Wait until a future has its value or error; return an error if the deadline has passed."""
    if future.done():
        return None
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    deadline = time.monotonic() + seconds + GRACE_SECONDS
    while not done.wait(POLL_SECONDS):
        poll()
        if time.monotonic() > deadline:
            return CollectiveTimeoutError(f"the hook's future is not done after {seconds:g} s")
    return None


def first_failure(handles: Iterable[Handle]) -> BaseException | None:
    """Return the first backend failure among communication that has ended, or None."""
    # the error of a future may be the hook's own
    works = [h for h in handles if not isinstance(h, torch._C.Future)]
    errors = (failure_of(work) for work in works if is_done(work))
    return next((error for error in errors if error and is_transport(error)), None)


TOKEN_BYTES = 16
ANSWER_SECONDS = 1.0
"""Time after which a request to the store counts as unanswered. It is repeated later."""
LIVENESS_SECONDS = 1.0
"""Interval at which a rank checks that the ranks it waits for are still running."""
EXCHANGE_SECONDS, EXCHANGE_POLL_SECONDS = 5.0, 2e-3


# Keys begin with a random name that rank 0 broadcasts to the group. They therefore differ from
# those of a copy of the module on one rank, and of an earlier group in the same store. The name is
# followed by the number of times that the ranks have been resynchronized.


class ErrorChannel:
    """Values that the ranks of a group publish to each other, once they are connected."""

    # If the store does not answer in time, methods return as if no value were published. If it is
    # gone, they raise PeerLostError.

    def __init__(self, group: ProcessGroup) -> None:
        self._rank, self._size = group.rank(), group.size()
        # ranks of a group without a store, such as some groups written in Python, are never
        # connected
        self.has_store = find_store(group) is not None
        # random name of the group, the same on all ranks; empty before `connect`
        self.name = "" if self.has_store else "no store"
        self._token: tuple[Tensor, Work] | None = None
        self._store: Any = None
        self._round = 0
        self._asking: threading.Thread | None = None
        self._processes: dict[int, str] = {}
        self._next_look, self._seen_dead = 0.0, list[int]()

    @property
    def connected(self) -> bool:
        return self._store is not None

    def start_connecting(self, group: ProcessGroup) -> tuple[Tensor, Work]:
        """Return the random name, and the handle of its broadcast, which is sent once."""
        if self._token is None:
            mine = torch.frombuffer(bytearray(os.urandom(TOKEN_BYTES)), dtype=torch.uint8)
            token = mine.to(message_device(group))
            self._token = token, group.broadcast([token], broadcast_options(0))
        return self._token

    def connect(self, group: ProcessGroup, token: Tensor) -> None:
        self.name = bytes(token.tolist()).hex()
        store = store_of(group, "ranks report errors to each other")
        self._store = PrefixStore(f"gradwire/{self.name}", store)
        self._ask(self._store.set, f"process/{self._rank}", this_process())

    def report(self) -> bool:
        """Ask all ranks to resynchronize; return True if the store accepted the request."""
        return self._ask(self._store.set, f"{self._round}/reported", "") is not _NOTHING

    def error_reported(self) -> bool:
        """Return True if a rank has asked to resynchronize in this round."""
        return self._ask(self._store.check, [f"{self._round}/reported"]) is True

    def report_broken(self, error: str) -> None:
        """Report that the group itself failed, so that no rank waits for this one."""
        text = f"rank {self._rank} saw the group fail: {error}"
        with suppress(PeerLostError):  # no report is possible if the store is gone
            self._ask(self._store.compare_set, "lost", "", text)

    def broken(self) -> PeerLostError | None:
        if self._ask(self._store.check, ["lost"]) is not True:
            return None
        text = self._ask(self._store.get, "lost")
        return None if text is _NOTHING else PeerLostError(bytes(text).decode())

    def publish(self, topic: str, value: Any) -> bool:
        """Set this rank's value for a topic of this round; return True if the store accepted it."""
        text = json.dumps(value)
        key = f"{self._round}/{topic}/{self._rank}"
        return self._ask(self._store.set, key, text) is not _NOTHING

    def published(self, topic: str) -> list[Any] | None:
        """Return every rank's value in rank order, or None until all are published."""
        keys = [f"{self._round}/{topic}/{rank}" for rank in range(self._size)]
        if self._ask(self._store.check, keys) is not True:
            return None
        values = self._ask(self._store.multi_get, keys)
        return None if values is _NOTHING else [json.loads(value) for value in values]

    def exchange(self, topic: str, value: Any, seconds: float) -> list[Any] | None:
        """Return every rank's value, or None after a time: for texts of errors that all raise."""
        if not self.connected:
            return None
        self.publish(topic, value)
        deadline = time.monotonic() + min(EXCHANGE_SECONDS, seconds)
        while (values := self.published(topic)) is None and time.monotonic() < deadline:
            time.sleep(EXCHANGE_POLL_SECONDS)
        return values

    def missing_ranks(self, topic: str) -> list[int]:
        """Return the ranks that have not published a value; empty if the store does not answer."""
        keys = {rank: f"{self._round}/{topic}/{rank}" for rank in range(self._size)}
        there = self._ask(lambda: [r for r, key in keys.items() if self._store.check([key])])
        return [] if there is _NOTHING else [rank for rank in keys if rank not in there]

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose processes ran on this host and have ended."""
        known = {rank: self._process(rank) for rank in ranks}
        return [rank for rank, process in known.items() if process and not is_alive(process)]

    def death(self) -> PeerLostError | None:
        """Return the failure if other ranks' processes have ended; checked once per second."""
        # Backends usually report a death sooner. Gloo, however, loses a send in progress when the
        # connection ends and then waits for the group's timeout (one death in 1,000 with 3 ranks).
        if (now := time.monotonic()) < self._next_look:
            return None
        self._next_look = now + LIVENESS_SECONDS
        before = self._seen_dead
        self._seen_dead = self.dead([r for r in range(self._size) if r != self._rank])
        # Require two checks: data that a rank sent before it ended may still be arriving.
        if lost := [rank for rank in self._seen_dead if rank in before]:
            return PeerLostError(f"ranks {lost} ended while this rank waited for them")
        return None

    def _process(self, rank: int) -> str | None:
        key = f"process/{rank}"
        if rank not in self._processes and self._ask(self._store.check, [key]) is True:
            process = self._ask(self._store.get, key)
            if process is not _NOTHING:
                self._processes[rank] = bytes(process).decode()
        return self._processes.get(rank)

    def next_round(self) -> None:
        self._round += 1

    def _ask(self, request: Callable[..., Any], *args: Any) -> Any:
        # In a thread: a request hangs while the process that serves the store is stopped by SIGSTOP
        # or a debugger. One request at a time, so that threads do not accumulate.
        if self._asking is not None and self._asking.is_alive():
            return _NOTHING  # the previous request is still unanswered
        answer: list[Any] = []

        def ask() -> None:
            try:
                answer.append(request(*args))
            except BaseException as error:  # raised below, in the calling thread
                answer.append(error)

        self._asking = threading.Thread(target=ask, name="gradwire-store", daemon=True)
        self._asking.start()
        self._asking.join(ANSWER_SECONDS)
        if not answer:
            return _NOTHING
        if isinstance(answer[0], dist.DistError):
            raise PeerLostError(
                f"the group's store does not answer (the rank that hosts it is gone): {answer[0]}"
            ) from answer[0]
        if isinstance(answer[0], BaseException):
            raise answer[0]
        return answer[0]


_NOTHING = object()
