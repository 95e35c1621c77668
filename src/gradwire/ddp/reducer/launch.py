"""Launch of buckets: by one all_reduce, a sparse exchange or a communication hook.

On accelerators, autograd accumulates a gradient on the stream that was current when the
parameter's node was made, and calls the reducer's hooks there. `docs/design/streams.md` has the
order between streams for each buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, Work
from torch.nn import Parameter

from gradwire._engine_errors import is_transport
from gradwire._groups import cpu_capable, message_device
from gradwire.ddp.buckets.bucket import WITH_STREAMS, Bucket, SparseBucket
from gradwire.ddp.faults.collective_log import Participant, entry_of
from gradwire.ddp.faults.error_channel import (
    Handle,
    broadcast_options,
    wait_done,
    wait_future,
    wait_work,
    waits_on_cpu,
)
from gradwire.ddp.faults.fault_domain import FaultDomain, LogMode
from gradwire.ddp.reducer.weights import Tally
from gradwire.errors import BrokenGroupError, DistributedError
from gradwire.hooks import GradBucket, SparseSum, StatefulHook, as_future, parse_hook_result
from gradwire.recorder import BucketRecord


@dataclass
class Launched:
    """A bucket in flight. It has neither works nor a future if nothing needs to be sent."""

    bucket: Bucket
    works: Sequence[Work] = ()
    future: torch._C.Future[Any] | None = None
    grad_bucket: GradBucket | None = None
    sparse: SparseSum | None = None
    complete: bool = False  # all entries of a sparse gradient were sent
    record: BucketRecord | None = None
    stream: torch.Stream | None = None  # of an accelerator, on which it was sent

    @property
    def sent(self) -> bool:
        """True if the bucket had anything to send."""
        return bool(self.works) or self.future is not None


class Launcher:
    """Sends buckets, and waits for their results."""

    def __init__(self, group: ProcessGroup, domain: FaultDomain, owner: Participant) -> None:
        self._group, self._domain = group, domain
        # waits poll for errors on behalf of the owner, the backward that the buckets belong to
        waiter = weakref.proxy(owner)  # the owner holds a reference to its launcher
        self._poll = lambda: domain.poll(waiter)
        self._options = AllreduceOptions()
        # broadcast of rank 0's order of gradients, until buckets are assigned in that order
        self.order: tuple[Tensor, Work] | None = None
        # buckets of the backward, in launch order
        self.launched: list[Launched] = []
        # None for the mean
        self.hook: StatefulHook[Any] | None = None
        # True if a rank gave a weight, or went around the wrapper, in the hook's first backward;
        # None before it has ended
        self.uses_weights: bool | None = None
        # factor of a hook's buckets: if ranks have run out of input, the hook divides by more ranks
        # than take part
        self.correction = 1.0
        # factor of a hook's buckets in this backward, including weights; None before the first
        # bucket. It is applied before the hook, so that the hook's state has the same unit in each
        # step
        self.scale: float | None = None
        self.note = ""  # about the backward, for messages of errors

    def in_flight(self) -> list[Handle]:
        """Return the messages that may still be in flight."""
        return [h for one in self.launched for h in (*one.works, one.future) if h is not None]

    @property
    def sums_numbers(self) -> bool:
        """True if the ranks sum their numbers in messages beside a hook's."""
        return self.uses_weights is not False

    @property
    def last_bucket_votes(self) -> bool:
        """True if no rank can fail after its last bucket was sent."""
        hook = self.hook
        if hook is None:
            return True
        return hook.averages and hook.single_collective and not self.sums_numbers

    # -- buckets -----------------------------------------------------------------------------

    def launch(self, bucket: Bucket, *, is_last: bool) -> None:
        """Send a bucket whose gradients are in its buffer."""
        self._wait_for_hook()
        stream = current_stream(bucket.parameters[0].device)
        if self.hook is not None:
            self._launch_hook(bucket, is_last=is_last)
        elif isinstance(bucket, SparseBucket):
            total = bucket.total
            total.pack(bucket.flat)
            self.launched.append(Launched(bucket, sparse=total, works=[total.send()]))
            self._domain.log.add(entry_of("allgather_", total.wire))
        else:
            flat = bucket.flat
            wire = torch.view_as_real(flat) if flat.is_complex() else flat
            self.launched.append(Launched(bucket, works=[self._all_reduce(wire, bucket.what)]))
            # logged once the backend has accepted it: other ranks join logged collectives with
            # zeros
            self._domain.log.add(entry_of("allreduce_", [[wire]]))
        self.launched[-1].stream = stream

    def _launch_hook(self, bucket: Bucket, *, is_last: bool) -> None:
        assert self.hook is not None
        if self.scale is not None and self.scale != 1.0:
            bucket.flat.mul_(self.scale)
        names, like, index = bucket.names, bucket.like, len(self.launched)
        grad_bucket = GradBucket(
            index, bucket.flat, bucket.parameters, is_last=is_last, names=names, like=like
        )
        try:
            with LogMode(self._domain, self._poll):
                future = as_future(self.hook.run_hook(grad_bucket), self.hook)
        except Exception as error:
            self._domain.hook_failed(error, bucket.what + self.note)
        self.launched.append(Launched(bucket, future=future, grad_bucket=grad_bucket))
        if not self.hook.single_collective:
            self._domain.hook_future = future

    def _wait_for_hook(self) -> None:
        """Wait for a hook that may send more in callbacks, before anything else is sent."""
        # Callbacks run in threads of the backend: their collectives would precede this reducer's on
        # one rank and follow them on another. The hook may be that of another reducer of the group.
        future = self._domain.hook_future
        if future is not None:
            self._wait_future(future, "a communication hook")
        # cleared only now: an exception in a signal handler may end the wait
        self._domain.hook_future = None

    def send_rest(self) -> None:
        """Send the entries of sparse gradients that had no room in the first messages."""
        # Called before the vote, when the backward has ended and this rank may wait for others.
        for launched in self.launched:
            total = launched.sparse
            if total is None or launched.complete:
                continue
            self._wait(launched)
            if (work := total.send_rest()) is not None:
                launched.works = [*launched.works, work]
                self._domain.log.add(entry_of("allgather_", total.wire))
            launched.complete = True

    def result(self, launched: Launched) -> Tensor | None:
        """Wait for a bucket. Return its result, or None if it is in `flat`."""
        record = launched.record
        if record is not None:
            record.waited = perf_counter_ns()
        self._wait(launched)
        result = None
        if launched.sparse is not None:
            result = launched.sparse.result()
        elif launched.future is not None:
            result = self._hook_result(launched, launched.future)
        # a work may only order the stream it was sent on, and a future without devices none
        follow(launched.stream)
        if record is not None:
            record.done = perf_counter_ns()
        return result

    def _hook_result(self, launched: Launched, future: torch._C.Future[Any]) -> Tensor:
        assert launched.grad_bucket is not None
        assert self.hook is not None
        bucket = launched.bucket
        self._wait_future(future, bucket.what)
        device = bucket.parameters[0].device
        if device.type in WITH_STREAMS and waits_on_cpu(self._group, device):
            # Gloo's futures do not order streams: what callbacks have queued may still run
            torch.accelerator.synchronize(device)
        try:
            return parse_hook_result(future.wait(), launched.grad_bucket, self.hook)
        except Exception as error:
            self._domain.hook_failed(error, bucket.what + self.note)

    def committed(self) -> None:
        """Call the hook's `committed` after a backward has ended on all ranks: it may send."""
        if self.hook is None:
            return
        before = self._domain.log.counts()
        try:
            with LogMode(self._domain, self._poll):
                self.hook.committed()
        except BaseException as error:
            if isinstance(error, Exception):
                self._domain.raise_hidden("a communication hook, after a backward,")
            if before != self._domain.log.counts():
                # other ranks may wait in collectives that the hook did not reach here: the
                # messages of the next step would meet those
                what = f"{type(error).__name__}: {error}"
                text = f"after a backward, a communication hook raised {what}"
                with suppress(BrokenGroupError):
                    self._domain.give_up(BrokenGroupError(text), error)
            raise

    def _all_reduce(self, tensor: Tensor, what: str) -> Work:
        try:
            return self._group.allreduce([tensor], self._options)
        except RuntimeError as error:  # the backend refused it, or the group had failed before
            if isinstance(error, DistributedError):
                self._domain.give_up(self._domain.translate(error, what), error)
            self._domain.fail(DistributedError(f"{what}: {error}"), error)

    # -- small messages ----------------------------------------------------------------------

    def start_order(self, order: Sequence[int]) -> None:
        """Start to broadcast rank 0's order, at the end of a backward on all ranks."""
        device = message_device(self._group)
        theirs = torch.tensor(order, dtype=torch.int64, device=device)
        self.order = theirs, self._group.broadcast([theirs], broadcast_options(0))
        self._domain.log.add(entry_of("broadcast_", [[theirs]]), self.order[1])

    def receive_order(self) -> list[int]:
        """Return rank 0's order. If an exception interrupts the wait, the next call waits again."""
        assert self.order is not None
        theirs, work = self.order
        if self._group.rank() != 0:
            self.wait_small(work)
        return theirs.tolist()

    def start_sum(self, flags: Tensor) -> tuple[Tensor, Work]:
        """Start to sum a small tensor over the ranks: it holds the sum once the work has ended."""
        self._wait_for_hook()
        flags = flags.to(message_device(self._group))
        work = self._all_reduce(flags, "a small all_reduce or broadcast")
        self._domain.log.add(entry_of("allreduce_", [[flags]]), work)
        return flags, work

    def vote(self, own: Tally, flags: Tensor) -> tuple[Tally, Tensor]:
        """Return the sums of the ranks' numbers and flags; raise if a rank has not voted."""
        if cpu_capable(self._group):
            self._domain.raise_hidden("a communication hook's collective")
        votes, work = self.start_sum(torch.cat([own.message(1.0), flags]))
        self.wait_small(work)
        if (voted := votes[0].item()) != self._group.size():
            raise BrokenGroupError(f"{voted:g} of {self._group.size()} ranks have voted")
        sums, flags = votes[: -len(flags)], votes[-len(flags) :]
        return Tally.read(sums), flags

    # -- waits -------------------------------------------------------------------------------

    def wait_small(self, work: Work) -> None:
        """Wait for a message whose values this rank needs."""
        if not cpu_capable(self._group):
            wait_done(work, self._poll)  # reading the values would block the CPU without polling
        self._wait_work(work, "a small all_reduce or broadcast", on_cpu=cpu_capable(self._group))

    def _wait(self, launched: Launched) -> None:
        bucket = launched.bucket
        on_cpu = waits_on_cpu(self._group, bucket.parameters[0].device)
        for work in launched.works:
            self._wait_work(work, bucket.what, on_cpu=on_cpu)

    def _wait_work(self, work: Work, what: str, *, on_cpu: bool) -> None:
        """Wait for a work handle. A failure of the backend breaks the group."""
        seconds, what = self._domain.seconds, what + self.note
        if error := wait_work(work, self._poll, on_cpu=on_cpu, seconds=seconds):
            if not is_transport(error):
                self._domain.fail(DistributedError(f"{what}: {error}"), error)
            self._domain.give_up(self._domain.translate(error, what), error)

    def _wait_future(self, future: torch._C.Future[Any], what: str) -> None:
        if late := wait_future(future, self._poll, self._domain.seconds):
            self._domain.give_up(self._domain.translate(late, what + self.note), late)


# -- streams of accelerators -------------------------------------------------------------------


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream of a device; None if it has none."""
    return torch.accelerator.current_stream(device) if device.type in WITH_STREAMS else None


def follow(stream: torch.Stream | None) -> bool:
    """Let the device's current stream wait for another one's work; return True if it waits."""
    if stream is None:
        return False
    current = current_stream(stream.device)
    if current is None or current == stream:
        return False
    # in the capture of a CUDA graph, waiting for a stream outside of it is an error
    if _is_capturing(current) and not _is_capturing(stream):
        return False
    current.wait_stream(stream)
    return True


class GradientStreams:
    """Streams on which the gradients of a reducer's parameters are accumulated."""

    # A node keeps its stream for as long as it exists, so each is looked up once: at every gradient
    # this would take 1 µs.

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._devices = [p.device for p in parameters]
        # indices of parameters whose stream is not known yet; empty on the CPU
        self.unknown = {i for i, d in enumerate(self._devices) if d.type in WITH_STREAMS}
        self._distinct: list[torch.Stream] = []

    def record(self, index: int) -> None:
        """Record the current stream, from the hook of a parameter's gradient."""
        stream = current_stream(self._devices[index])
        assert stream is not None
        if stream not in self._distinct:
            self._distinct.append(stream)
        self.unknown.discard(index)

    def join(self, device: torch.device) -> bool:
        """Let the device's current stream wait for gradients so far; return True if it waits."""
        # Needed before a bucket is filled and sent: its gradients may come on several streams, and
        # it may be sent from the hook of another bucket's gradient, from a thread for another
        # device or after backward. If it waits, the bucket must record its use of the gradients.
        followed = [follow(s) for s in self._distinct if s.device == device]
        return any(followed)


def _is_capturing(stream: torch.Stream) -> bool:
    if stream.device.type != "cuda":
        return False
    with stream:
        return torch.cuda.is_current_stream_capturing()
