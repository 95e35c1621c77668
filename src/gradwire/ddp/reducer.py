"""Reducer: averages gradients over ranks while backward still computes others.

Each parameter reports once per backward that its gradient is ready. A bucket whose parameters all
have is launched, in the same order on every rank; when backward ends, the buckets are waited for
in that order and their values put back. `average_gradients` in `_naive.py` is the same without
buckets or overlap.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroup, Work
from torch.nn import Parameter

from gradwire.buckets import plan_buckets
from gradwire.ddp._alarm import Alarm, Pending, pending_future, pending_work
from gradwire.ddp._bucket import Bucket, InPlaceBucket, PackedBucket
from gradwire.ddp._group import check_group, message_device
from gradwire.ddp._ledger import Ledger, LedgerMode, all_reduce_entry, broadcast_entry
from gradwire.ddp._wait import translate, wait_future, wait_work
from gradwire.errors import (
    ArgumentError,
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    HookError,
    NotSupportedError,
    PeerFailedError,
    PeerLostError,
    ReductionError,
)
from gradwire.gradients import CommHook, GradBucket, as_future, check_hook, parse_hook_result
from gradwire.shm import shares_memory

__all__ = ["FIRST_BUCKET_BYTES", "Reducer"]

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
IN_PLACE_BYTES = 4 << 20
"""On the CPU, a gradient of this size travels alone and in place: a message more costs less than
copying it into a bucket and back. On accelerators copies are cheap and messages are not."""


@dataclass
class _Launched:
    """A bucket under way."""

    bucket: Bucket
    work: Work | None = None
    future: torch._C.Future[Any] | None = None
    seen: GradBucket | None = None

    def pending(self) -> Pending:
        if self.work is not None:
            return pending_work(self.work)
        assert self.future is not None
        return pending_future(self.future)


class Reducer:
    """Averages the gradients of parameters over the ranks of a group, in buckets.

    After `prepare`, the next backward that gives every parameter a gradient leaves in each
    `.grad` the sum over ranks divided by W (or what the hook made of it), with the same bits on
    every rank.

    Args:
        parameters: Names and parameters, dense, with `requires_grad`; the same on every rank.
        group: The process group.
        caps: Bytes: the size limits of the first bucket, the second, …; the last one repeats.
            None means 25 MiB, after a first bucket of 1 MiB that starts communication early; on
            the CPU, where one message more costs more than an early start gains, that one is left
            out unless a hook is registered.
        gradient_as_bucket_view: Let gradients be views of their bucket: less memory, one copy
            less. `detach_()` on them is then an error.

    Raises:
        ArgumentError: There are no parameters, or caps are not positive.
        ArgumentTypeError: `group` is no process group.

    Example:
        >>> import torch.distributed as dist
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     weight = torch.nn.Parameter(torch.zeros(2))
        ...     reducer = Reducer([("weight", weight)], dist.group.WORLD)
        ...     reducer.prepare()
        ...     (weight * (dist.get_rank() + 1)).sum().backward()
        ...     return weight.grad.tolist()
        >>> run_ranks(main, world_size=2)  # (1 + 2) / 2
        [[1.5, 1.5], [1.5, 1.5]]
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        group: ProcessGroup,
        *,
        caps: Sequence[int] | None = None,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        self._group = check_group(group)
        if not parameters:
            raise ArgumentError("parameters is empty: there is nothing to reduce")
        self._names = [name for name, _ in parameters]
        self._parameters = [p for _, p in parameters]
        self._given_caps = None if caps is None else list(caps)
        self._keep = gradient_as_bucket_view
        self._options = AllreduceOptions()
        self._hook: CommHook | None = None
        self._hook_state: Any = None
        self._alarm = Alarm(group)
        self._broken: str | None = None

        self._step = 0
        self._armed = False
        self._callback_queued = False
        self._ended_short = False
        self._launched: list[_Launched] = []
        self._ledger = Ledger(group)
        self._deferred: PeerFailedError | None = None
        self._order: list[int] | None = []
        self._make_buckets(self._first_order())
        # the nodes that accumulate gradients: their hooks run after all hooks of the parameters
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._parameters]
        handles = [
            node.register_hook(partial(_on_gradient, weakref.ref(self), i))
            for i, node in enumerate(self._nodes)
        ]
        weakref.finalize(self, _remove, handles).atexit = False

    def register_comm_hook(self, state: Any, hook: CommHook | None) -> None:
        """Let `hook(state, bucket)` communicate from the next `prepare` on; None: the mean.

        Every rank registers the same hook. Hooks are called one at a time in bucket order, the
        next when the last one's future has completed, so that several collectives chained in one
        hook run in the same order on every rank; a hook with a true attribute
        `single_collective` is called for the next bucket without waiting.

        Raises:
            ArgumentTypeError: Not a hook.
        """
        self._hook = None if hook is None else check_hook(hook)
        self._hook_state = state
        self._order = [] if self._order is None else self._order
        self._armed = False
        self._make_buckets([i for b in self._buckets for i in b.members])

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order of launch."""
        return [[self._names[i] for i in bucket.members] for bucket in self._buckets]

    def prepare(self) -> None:
        """Expect a backward: to be called before each one that is to be reduced.

        Raises:
            ReductionError: The backward before left parameters without a gradient.
            PeerFailedError: Another rank reported an error.
            BrokenGroupError: The group cannot be used again after an earlier error.
        """
        if self._broken is not None:
            raise BrokenGroupError(self._broken)
        if self._deferred is not None:
            self._raise_deferred(self._deferred)
        if self._armed and (self._launched or any(b.arrived for b in self._buckets)):
            self._end_unfinished()
        if self._order is not None and len(self._order) == len(self._parameters):
            self._rebuild(self._order)
            if self._deferred is not None:  # told while waiting for the order
                self._raise_deferred(self._deferred)
        self._step += 1
        self._armed = True

    # -- buckets ---------------------------------------------------------------------------

    def _make_buckets(self, order: Sequence[int]) -> None:
        """Plans and makes the buckets for parameters that become ready in this order."""
        params = [self._parameters[i] for i in order]
        plan = plan_buckets(
            [p.nbytes for p in params],
            [p.dtype for p in params],
            [p.device for p in params],
            self._caps(),
            indices=list(order),
        )
        kept = {i: self._parameters[i].grad for i in order} if self._keep else {}
        self._buckets: list[Bucket] = []
        self._bucket_of: list[Bucket] = []  # the old buckets' memory is free from here on
        for members in plan.buckets:
            packed = [i for i in members if not self._travels_alone(self._parameters[i])]
            scale = 1.0 if self._hook is not None else 1.0 / self._group.size()
            for i in members:
                if i not in packed:
                    self._buckets.append(InPlaceBucket(i, self._parameters[i], scale))
            if packed:
                own = [self._parameters[i] for i in packed]
                self._buckets.append(
                    PackedBucket(packed, own, scale=scale, keep=self._keep, group=self._group)
                )
        self._bucket_of = [self._buckets[0]] * len(self._parameters)
        for bucket in self._buckets:
            for i in bucket.members:
                self._bucket_of[i] = bucket
        for i, gradient in kept.items():  # views of buckets that are no more
            if gradient is not None:
                self._parameters[i].grad = gradient.clone()

    def _first_order(self) -> range:
        """Last registered first: its gradient tends to be ready first."""
        return range(len(self._parameters))[::-1]

    def _caps(self) -> list[int]:
        if self._given_caps is not None:
            return self._given_caps
        on_cpu = all(p.device.type == "cpu" for p in self._parameters)
        if self._hook is None and on_cpu:
            return [BUCKET_BYTES]
        return [FIRST_BUCKET_BYTES, BUCKET_BYTES]

    def _travels_alone(self, parameter: Parameter) -> bool:
        if self._hook is not None or shares_memory(self._group):
            return False  # packed, it lies where the group's ranks reduce it without a copy
        return parameter.device.type == "cpu" and parameter.nbytes >= IN_PLACE_BYTES

    def _rebuild(self, order: list[int]) -> None:
        """Makes the buckets anew in the order in which rank 0's gradients became ready."""
        device = message_device(self._group)
        agreed = torch.tensor(order, dtype=torch.int64, device=device)
        options = BroadcastOptions()
        options.rootRank = 0
        work = self._group.broadcast([agreed], options)
        self._ledger.add(broadcast_entry(agreed, root=0))
        self._launched.append(_Launched(self._buckets[0], work=work))
        self._result(self._launched[0])
        self._reset()
        self._order = None
        self._make_buckets(agreed.tolist())

    # -- backward --------------------------------------------------------------------------

    def _begin(self) -> None:
        if torch.is_grad_enabled():
            raise NotSupportedError(
                "backward(create_graph=True) through the reducer: use torch.autograd.grad on the "
                "module without the wrapper, or no_sync(), for higher derivatives"
            )
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._on_backward_end)
        self._callback_queued = True

    def _on_full(self, bucket: Bucket) -> None:
        if len(set(bucket.arrived)) != len(bucket.arrived):
            twice = {self._names[i] for i in bucket.arrived if bucket.arrived.count(i) > 1}
            self._fail(
                ReductionError(
                    f"parameters {sorted(twice)} got a gradient twice in one backward: they are "
                    "used in several reentrant checkpoints (use use_reentrant=False), or backward "
                    "ran twice after one forward (run the first under no_sync())"
                )
            )
        self._launch_in_order(wait=False)

    def _launch_in_order(self, *, wait: bool) -> None:
        """Launches every full bucket whose predecessors have been launched."""
        one_at_a_time = not getattr(self._hook, "single_collective", self._hook is None)
        while len(self._launched) < len(self._buckets):
            bucket = self._buckets[len(self._launched)]
            if not bucket.full:
                return
            if one_at_a_time and self._launched:
                before = self._launched[-1]
                assert before.future is not None
                if not (wait or before.future.done()):
                    return
                self._result(before)
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        try:
            bucket.gather()
        except (ReductionError, NotSupportedError) as error:
            self._fail(error)
        if self._hook is not None:
            self._launch_hook(bucket)
            return
        flat = bucket.flat
        wire = torch.view_as_real(flat) if flat.is_complex() else flat
        try:
            work = self._group.allreduce([wire], self._options)
        except RuntimeError as error:
            self._give_up(translate(error, self._what(bucket)), error)
        self._launched.append(_Launched(bucket, work=work))
        self._ledger.add(all_reduce_entry(wire))

    def _launch_hook(self, bucket: Bucket) -> None:
        assert isinstance(bucket, PackedBucket)
        assert self._hook is not None
        index = len(self._launched)
        seen = bucket.as_grad_bucket(index, is_last=index == len(self._buckets) - 1)
        try:
            with LedgerMode(self._group, self._ledger):
                future = as_future(self._hook(self._hook_state, seen), self._hook)
        except Exception as error:
            self._hook_failed(error, self._what(bucket))
        self._launched.append(_Launched(bucket, future=future, seen=seen))

    def _on_backward_end(self) -> None:
        self._callback_queued = False
        if not self._armed:
            return
        self._launch_in_order(wait=True)
        if len(self._launched) < len(self._buckets):
            self._ended_short = True  # another backward may bring the rest
            return
        if self._hook is None:
            for launched in self._launched:
                self._result(launched)
                launched.bucket.scatter()
        else:
            results = [self._result(launched) for launched in self._launched]
            if self._deferred is None:
                self._alarm.vote(self._look)  # gradients change on all ranks or on none
            for launched, reduced in zip(self._launched, results, strict=True):
                launched.bucket.scatter(reduced)
        self._reset()

    def _result(self, launched: _Launched) -> Tensor | None:
        """Waits for a bucket; what a hook made of it, or None if it lies in `flat`."""
        what = self._what(launched.bucket)
        if launched.work is not None:
            on_cpu = launched.bucket.parameters[0].device.type == "cpu"
            if error := wait_work(launched.work, self._look, on_cpu=on_cpu):
                self._give_up(translate(error, what), error)
            return None
        assert launched.future is not None
        assert launched.seen is not None
        assert self._hook is not None
        wait_future(launched.future, self._look)
        try:
            return parse_hook_result(launched.future.wait(), launched.seen, self._hook)
        except Exception as error:
            self._hook_failed(error, what)

    # -- errors ----------------------------------------------------------------------------

    def _look(self) -> None:
        """Raises if another rank has reported an error."""
        try:
            rung = self._alarm.rung()
        except PeerLostError as error:
            self._give_up(error, error.__cause__)
        if rung:
            self._on_alarm()

    def _fail(self, error: Exception, cause: BaseException | None = None) -> NoReturn:
        """Ends this backward on every rank, and raises."""
        self._meet(f"{type(error).__name__}: {error}")
        self._start_over()
        raise error from cause

    def _on_alarm(self) -> None:
        """Another rank failed: raise, unless this rank's backward is one that it took part in."""
        failures, later = self._meet(None)
        told = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
        error = PeerFailedError(
            f"gradients were not reduced, because of an error elsewhere. {told}"
        )
        if later:
            self._deferred = error  # all ranks took part in this backward: finish it first
            return
        self._start_over()
        raise error

    def _raise_deferred(self, error: PeerFailedError) -> NoReturn:
        self._deferred = None
        self._step += 1
        self._start_over()
        raise error

    def _start_over(self) -> None:
        """As after construction: ranks may have been at different bucket plans."""
        self._reset()
        self._order = []
        self._make_buckets(self._first_order())

    def _hook_failed(self, error: Exception, what: str) -> NoReturn:
        """Tells an engine's failure, which a hook passes on, from the hook's own."""
        engine = translate(error, what)
        if isinstance(engine, PeerLostError | CollectiveTimeoutError):
            self._give_up(engine, error)
        if isinstance(error, DistributedError):
            self._fail(error)
        text = f"{what}: the communication hook raised {type(error).__name__}: {error}"
        self._fail(HookError(text), error)

    def _meet(self, error: str | None) -> tuple[dict[int, str], bool]:
        pending = [launched.pending() for launched in self._launched]
        try:
            return self._alarm.meet(error, self._step, self._ledger, pending)
        except PeerLostError as lost:
            self._give_up(lost, lost.__cause__)
        except DistributedError as broken:
            self._broken = str(broken)
            self._reset()
            raise

    def _give_up(self, error: DistributedError, cause: BaseException | None) -> NoReturn:
        """The group itself failed: nothing can be brought level."""
        self._broken = f"the group failed earlier: {error}"
        self._alarm.tell_lost(str(error))
        self._reset()
        raise error from cause

    def _end_unfinished(self) -> None:
        """The backward before did not end: say why, or bring the other ranks out of it."""
        if all(bucket.full for bucket in self._buckets):
            self._on_backward_end()  # interrupted after the last gradient: nothing is lacking
            return
        if not self._ended_short:
            self._meet("backward was interrupted by an exception")
            self._start_over()
            return
        arrived = {i for b in self._buckets for i in b.arrived}
        lacking = [n for i, n in enumerate(self._names) if i not in arrived]
        self._fail(
            ReductionError(
                f"parameters {lacking} got no gradient in the backward before, so that nothing "
                "was reduced: make every output of the module take part in the loss, or set "
                "requires_grad=False on those parameters before wrapping the module"
            )
        )

    def _reset(self) -> None:
        """Ready for the next `prepare`."""
        self._armed = self._ended_short = self._callback_queued = False
        self._launched.clear()
        self._ledger.clear()
        if self._order is not None and len(self._order) != len(self._parameters):
            self._order.clear()
        for bucket in self._buckets:
            bucket.reset()

    def _what(self, bucket: Bucket) -> str:
        names = [self._names[i] for i in bucket.members]
        shown = ", ".join(names[:3]) + (f", … ({len(names)} parameters)" if names[3:] else "")
        return f"bucket {self._buckets.index(bucket)} ({shown})"


def _on_gradient(
    reference: weakref.ref[Reducer], index: int, _: object, incoming: tuple[Tensor | None, ...]
) -> None:
    """A parameter's gradient is ready: the one step that is taken for each of them.

    Holds no reference that would keep the reducer alive.
    """
    reducer = reference()
    if reducer is None or not reducer._armed or incoming[0] is None:
        return
    if not reducer._callback_queued:
        reducer._begin()
    if reducer._order is not None:
        reducer._order.append(index)
    bucket = reducer._bucket_of[index]
    bucket.arrived.append(index)
    if index in bucket.early:
        try:
            bucket.gather_early(index, incoming[0])
        except (ReductionError, NotSupportedError) as error:
            reducer._fail(error)
    if len(bucket.arrived) >= bucket.size:
        reducer._on_full(bucket)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
