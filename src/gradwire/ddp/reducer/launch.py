"""Launches buckets and waits for them: with one all_reduce, a sparse exchange, or a hook."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, Work

from gradwire._engine_errors import is_transport
from gradwire.ddp.buckets.bucket import Bucket
from gradwire.ddp.buckets.sparse import SparseBucket
from gradwire.ddp.faults.collective_log import LogMode, all_reduce_entry, broadcast_entry
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.participants import Participant
from gradwire.ddp.faults.waiting import (
    InFlight,
    future_in_flight,
    wait_done,
    wait_future,
    wait_work,
    work_in_flight,
)
from gradwire.ddp.group import broadcast_options, cpu_capable, message_device
from gradwire.ddp.reducer.tally import Tally
from gradwire.errors import BrokenGroupError, DistributedError, NotSupportedError, ReductionError
from gradwire.hooks import GradBucket, StatefulHook, as_future, parse_hook_result
from gradwire.hooks.averaging import SparseSum
from gradwire.recorder import BucketRecord


@dataclass
class Launched:
    """A bucket in flight; neither works nor a future where nothing needs to be sent."""

    bucket: Bucket
    works: Sequence[Work] = ()
    future: torch._C.Future[Any] | None = None
    grad_bucket: GradBucket | None = None
    sparse: SparseSum | None = None
    record: BucketRecord | None = None

    @property
    def sent(self) -> bool:
        """Whether it had anything to send."""
        return bool(self.works) or self.future is not None


class Launcher:
    """How buckets travel.

    Args:
        group: The group.
        domain: The group's fault domain.
        owner: Whose buckets they are: waits poll for errors on its behalf.

    Attributes:
        launched: The backward's buckets that are in flight, in the order of their launch.
        hook: The communication hook with its state; None: the mean.
        correction: Factor of a hook's buckets: where ranks have run out of input, the hook divides
            by more ranks than take part.
        scale: Factor of a hook's buckets in this backward, with the weights if they are applied
            before the hook; None before the first bucket. Applied before, so that what a hook keeps
            has the same unit in each step.
    """

    def __init__(self, group: ProcessGroup, domain: FaultDomain, owner: Participant) -> None:
        self._group, self._domain = group, domain
        self._owner = weakref.ref(owner)  # which keeps its launcher, not the other way round
        self._options = AllreduceOptions()
        self._order: tuple[Tensor, Work] | None = None
        self._digests: tuple[Tensor, Work] | None = None
        self.launched: list[Launched] = []
        self.hook: StatefulHook[Any] | None = None
        self.correction = 1.0
        self.scale: float | None = None

    @property
    def state(self) -> Any:
        """The hook's state."""
        return None if self.hook is None else self.hook.state

    def in_flight(self) -> list[InFlight]:
        """All that may still be in flight."""
        works = [w for launched in self.launched for w in launched.works]
        futures = [launched.future for launched in self.launched if launched.future is not None]
        return [*map(work_in_flight, works), *map(future_in_flight, futures)]

    def launch(self, bucket: Bucket, *, is_last: bool) -> None:
        """Send a bucket whose gradients are copied in."""
        self._wait_for_hook()
        if self.hook is not None:
            self._launch_hook(bucket, is_last=is_last)
        elif isinstance(bucket, SparseBucket):
            with LogMode(self._group, self._domain.log):
                total = SparseSum(bucket.flat, self._group)
            # ranks exchange their counts of entries first: how many bytes follow, or none, is up
            # to them
            self._wait([total.counting], bucket)
            with LogMode(self._group, self._domain.log):
                work = total.exchange()
            works = () if work is None else (work,)
            self.launched.append(Launched(bucket, sparse=total, works=works))
        else:
            self._launch_mean(bucket)

    def _launch_mean(self, bucket: Bucket) -> None:
        flat = bucket.flat
        wire = torch.view_as_real(flat) if flat.is_complex() else flat
        try:
            work = self._group.allreduce([wire], self._options)
        except RuntimeError as error:
            self._refused(error, bucket.what)
        self.launched.append(Launched(bucket, works=[work]))
        # logged when the backend has taken it: other ranks join what is in the log with zeros
        self._domain.sent(all_reduce_entry(wire))

    def _refused(self, error: RuntimeError, what: str) -> NoReturn:
        """The backend did not take a collective: it cannot, or the group has failed before."""
        if isinstance(error, DistributedError):
            self._domain.give_up(self._domain.translate(error, what), error)
        self._domain.fail(DistributedError(f"{what}: {error}"), error)

    def _launch_hook(self, bucket: Bucket, *, is_last: bool) -> None:
        assert self.hook is not None
        if self.scale is not None and self.scale != 1.0:
            bucket.multiply(self.scale)
        grad_bucket = bucket.as_grad_bucket(len(self.launched), is_last=is_last)
        try:
            with LogMode(self._group, self._domain.log):
                future = as_future(self.hook.run_hook(grad_bucket), self.hook)
        except Exception as error:
            self._domain.hook_failed(error, bucket.what)
        self.launched.append(Launched(bucket, future=future, grad_bucket=grad_bucket))
        if not self.hook.single_collective:
            self._domain.hook_future = future

    def _wait_for_hook(self) -> None:
        """Let a hook that may send more in callbacks come to its end before anything else is sent.

        Callbacks run in threads of the backend: their collectives would come before ours on one
        rank and after them on another. Whoever the hook's reducer is: the group is the same.
        """
        future = self._domain.hook_future
        if future is not None and (late := wait_future(future, self._poll, self._domain.seconds)):
            self._domain.give_up(self._domain.translate(late, "a communication hook"), late)
        # not before: an exception of a signal's handler may end the wait
        self._domain.hook_future = None

    def committed(self) -> None:
        """Tell the hook that the backward has ended on all ranks: it may send what it likes."""
        if self.hook is None:
            return
        before = self._domain.counts()
        try:
            with LogMode(self._group, self._domain.log):
                self.hook.committed()
        except BaseException as error:
            if isinstance(error, Exception):
                self._domain.raise_hidden("a communication hook, after a backward,")
            if before != self._domain.counts():
                # others may wait in what would have followed, where our next step would meet them
                what = f"{type(error).__name__}: {error}"
                text = f"after a backward, a communication hook raised {what}"
                with suppress(BrokenGroupError):
                    self._domain.give_up(BrokenGroupError(text), error)
            raise

    def result(self, launched: Launched) -> Tensor | None:
        """Waits for a bucket; what was made of it, or None if that lies in `flat`."""
        record = launched.record
        if record is not None:
            record.waited = perf_counter_ns()
        result = self._result(launched)
        if record is not None:
            record.done = perf_counter_ns()
        return result

    def _result(self, launched: Launched) -> Tensor | None:
        self._wait(launched.works, launched.bucket)
        if launched.sparse is not None:
            return launched.sparse.result()
        if launched.future is None:
            return None
        assert launched.grad_bucket is not None
        assert self.hook is not None
        if late := wait_future(launched.future, self._poll, self._domain.seconds):
            self._domain.give_up(self._domain.translate(late, launched.bucket.what), late)
        try:
            return parse_hook_result(launched.future.wait(), launched.grad_bucket, self.hook)
        except Exception as error:
            self._domain.hook_failed(error, launched.bucket.what)

    def start_order(self, order: Sequence[int]) -> None:
        """Begin to broadcast rank 0's order: ranks do this where they end a backward together."""
        device = message_device(self._group)
        theirs = torch.tensor(order, dtype=torch.int64, device=device)
        self._order = theirs, self._group.broadcast([theirs], broadcast_options(0))
        self._domain.sent(broadcast_entry(theirs, root=0), self._order[1])

    def receive_order(self) -> list[int]:
        """Return rank 0's order. After an exception during the wait, the next call waits again."""
        assert self._order is not None
        theirs, work = self._order
        if self._group.rank() != 0:
            self.wait_small(work)
        return theirs.tolist()

    def start_digests(self, own: Tensor) -> None:
        """Begin to add up what ranks send to compare their replicas."""
        self._digests = self.start_sum(own)

    def receive_digests(self) -> Tensor | None:
        """Return the sum that `start_digests` has begun, once; None: it has not."""
        if self._digests is None:
            return None
        sums, work = self._digests
        self.wait_small(work)
        self._digests = None
        return sums

    def forget(self) -> None:
        """Forget what is in flight between two backwards."""
        self._order = self._digests = None

    def forget_order(self) -> None:
        """Forget the order: buckets are made, or start over."""
        self._order = None

    def start_sum(self, flags: Tensor) -> tuple[Tensor, Work]:
        """Begin to sum a small tensor over the ranks: it holds the sum when the work has ended."""
        self._wait_for_hook()
        flags = flags.to(message_device(self._group))
        try:
            work = self._group.allreduce([flags], AllreduceOptions())
        except RuntimeError as error:
            self._refused(error, "a small all_reduce or broadcast")
        self._domain.sent(all_reduce_entry(flags), work)
        return flags, work

    def add_up(self, own: Tally) -> Tally:
        """Return the sums of the ranks' numbers."""
        sums, work = self.start_sum(own.message())
        self.wait_small(work)
        return Tally.read(sums)

    def vote(self, own: Tally) -> Tally:
        """Return the sums of the ranks' numbers once nothing has failed on any of them.

        Raises:
            DistributedError: A rank failed before it voted.
        """
        if cpu_capable(self._group):
            self._domain.raise_hidden("a communication hook's collective")
        votes, work = self.start_sum(own.message(1.0))
        self.wait_small(work)
        if (voted := votes[0].item()) != self._group.size():
            raise BrokenGroupError(f"{voted:g} of {self._group.size()} ranks have voted")
        return Tally.read(votes)

    def wait_small(self, work: Work) -> None:
        """Wait for a message whose values this rank needs."""
        if not cpu_capable(self._group):
            wait_done(work, self._poll)  # the CPU would wait for the values, and not poll
        self._wait_work(work, "a small all_reduce or broadcast", on_cpu=cpu_capable(self._group))

    def _wait_work(self, work: Work, what: str, *, on_cpu: bool) -> None:
        """Waits for a work handle; a backend's failure ends the group's use."""
        seconds = self._domain.seconds
        if error := wait_work(work, self._poll, on_cpu=on_cpu, seconds=seconds):
            if not is_transport(error):
                self._domain.fail(DistributedError(f"{what}: {error}"), error)
            self._domain.give_up(self._domain.translate(error, what), error)

    def _wait(self, works: Sequence[Work], bucket: Bucket) -> None:
        on_cpu = bucket.parameters[0].device.type == "cpu"
        for work in works:
            self._wait_work(work, bucket.what, on_cpu=on_cpu)

    def _poll(self) -> None:
        owner = self._owner()
        assert owner is not None
        self._domain.poll(owner)

    def copy_in(self, bucket: Bucket) -> None:
        """Fill the buffer of a bucket that is ready."""
        try:
            bucket.copy_in()
        except (ReductionError, NotSupportedError) as error:
            self._domain.fail(error)
