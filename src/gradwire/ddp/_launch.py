"""Launches buckets and waits for them: with one all_reduce, a sparse exchange, or a hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroup, Work

from gradwire.ddp._bucket import Bucket
from gradwire.ddp._flight import Flight, Launched
from gradwire.ddp._group import cpu_capable, message_device
from gradwire.ddp._ledger import Entry, LedgerMode, all_reduce_entry, broadcast_entry
from gradwire.ddp._recovery import Recovery
from gradwire.ddp._sparse import SparseBucket
from gradwire.ddp._wait import translate, wait_future, wait_work
from gradwire.errors import NotSupportedError, ReductionError
from gradwire.gradients import CommHook, as_future, parse_hook_result
from gradwire.hooks.sparse import SparseSum

__all__ = ["Launcher"]


class Launcher:
    """How buckets travel.

    Attributes:
        hook: The communication hook; None: the mean.
        state: The hook's.
        correction: What a hook's results are multiplied by: where ranks have run out of input,
            the hook has divided by more ranks than took part.
    """

    def __init__(self, group: ProcessGroup, flight: Flight, recovery: Recovery) -> None:
        self._group, self._flight, self._recovery = group, flight, recovery
        self._options = AllreduceOptions()
        self.hook: CommHook | None = None
        self.state: Any = None
        self.correction = 1.0

    @property
    def one_at_a_time(self) -> bool:
        """Whether a bucket has to be back before the next one is launched."""
        return not getattr(self.hook, "single_collective", self.hook is None)

    def launch(self, bucket: Bucket, *, is_last: bool) -> None:
        """Send a bucket whose gradients are gathered."""
        if self.hook is not None:
            self._launch_hook(bucket, is_last=is_last)
        elif isinstance(bucket, SparseBucket):
            with LedgerMode(self._group, self._flight.ledger):
                total = SparseSum(bucket.flat, self._group)
            self._wait([total.counting], bucket)
            with LedgerMode(self._group, self._flight.ledger):
                work = total.exchange()
            works = () if work is None else (work,)
            self._flight.launched.append(Launched(bucket, sparse=total, works=works))
        else:
            self._launch_mean(bucket)

    def _launch_mean(self, bucket: Bucket) -> None:
        flat = bucket.flat
        wire = torch.view_as_real(flat) if flat.is_complex() else flat
        try:
            work = self._group.allreduce([wire], self._options)
        except RuntimeError as error:
            self._recovery.give_up(translate(error, bucket.what), error)
        self._flight.launched.append(Launched(bucket, works=[work]))
        self._flight.ledger.add(all_reduce_entry(wire))

    def _launch_hook(self, bucket: Bucket, *, is_last: bool) -> None:
        assert self.hook is not None
        seen = bucket.as_grad_bucket(len(self._flight.launched), is_last=is_last)
        try:
            with LedgerMode(self._group, self._flight.ledger):
                future = as_future(self.hook(self.state, seen), self.hook)
        except Exception as error:
            self._recovery.hook_failed(error, bucket.what)
        self._flight.launched.append(Launched(bucket, future=future, seen=seen))

    def result(self, launched: Launched) -> Tensor | None:
        """Waits for a bucket; what was made of it, or None if that lies in `flat`."""
        self._wait(launched.works, launched.bucket)
        if launched.sparse is not None:
            return launched.sparse.result()
        if launched.future is None:
            return None
        assert launched.seen is not None
        assert self.hook is not None
        wait_future(launched.future, self._recovery.look)
        try:
            reduced = parse_hook_result(launched.future.wait(), launched.seen, self.hook)
        except Exception as error:
            self._recovery.hook_failed(error, launched.bucket.what)
        return reduced if self.correction == 1.0 else reduced * self.correction

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers."""
        device = message_device(self._group)
        agreed = torch.tensor(numbers, dtype=torch.int64, device=device)
        options = BroadcastOptions()
        options.rootRank = 0
        self._send_small(self._group.broadcast([agreed], options), broadcast_entry(agreed, root=0))
        return agreed.tolist()

    def add_up(self, flags: Tensor) -> Tensor:
        """The sum over ranks of a small tensor."""
        flags = flags.to(message_device(self._group))
        work = self._group.allreduce([flags], AllreduceOptions())
        self._send_small(work, all_reduce_entry(flags))
        return flags

    def _send_small(self, work: Work, entry: Entry) -> None:
        self._flight.extra.append(work)
        self._flight.ledger.add(entry)
        self._wait_work(work, "what ranks agree on", on_cpu=cpu_capable(self._group))

    def _wait_work(self, work: Work, what: str, *, on_cpu: bool) -> None:
        """Waits for a work handle; an engine's failure ends the group's use."""
        if error := wait_work(work, self._recovery.look, on_cpu=on_cpu):
            self._recovery.give_up(translate(error, what), error)

    def _wait(self, works: Sequence[Work], bucket: Bucket) -> None:
        on_cpu = bucket.parameters[0].device.type == "cpu"
        for work in works:
            self._wait_work(work, bucket.what, on_cpu=on_cpu)

    def gather(self, bucket: Bucket) -> None:
        """Makes a full bucket ready to be sent."""
        try:
            bucket.gather()
        except (ReductionError, NotSupportedError) as error:
            self._recovery.fail(error)
