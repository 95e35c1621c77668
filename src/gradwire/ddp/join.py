"""Uneven inputs: a rank that has run out of batches takes part in the others' steps with zeros.

This uses `torch.distributed.algorithms.join.Join`. In its context each forward begins with one
all_reduce. From it, ranks that have joined learn the next step of the others, and all ranks learn
how many are left.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, JoinHook

from gradwire.ddp.broadcast import broadcast_values
from gradwire.ddp.buffers import Buffers
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.other_messages import wait_for_message
from gradwire.ddp.group import message_device
from gradwire.ddp.reduced_module import ReducedModule
from gradwire.ddp.reducer.reducer import Reducer
from gradwire.errors import ArgumentTypeError, MismatchError, NotSupportedError

ACTIONS = (
    "expect a backward that is reduced",
    "synchronize buffers",
    "call a buffer hook after the forward",
)


@dataclass(frozen=True)
class StepInfo:
    """The next forward and backward of ranks that still have input.

    Attributes:
        ranks: Number of these ranks; 0 on a rank that has joined.
        reduce: True if they reduce gradients.
        sync_buffers: True if they synchronize buffers before the forward.
        merge_buffers: True if they synchronize buffers after the forward.
    """

    ranks: int = 0
    reduce: bool = False
    sync_buffers: bool = False
    merge_buffers: bool = False


def agree_on_rank(group: ProcessGroup, *, candidate: bool) -> int:
    """Return the highest candidate rank of the group, which has at least one."""
    own = group.rank() if candidate else -1
    rank = torch.tensor([own], dtype=torch.int64, device=message_device(group))
    _all_reduce(rank, group, dist.ReduceOp.MAX)
    return int(rank)


def _all_reduce(
    tensor: Tensor,
    group: ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    what: str = "a step in join()",
) -> None:
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    wait_for_message(group, work, what, on_cpu=tensor.is_cpu, from_all=True)


class UnevenInputs(JoinHook):
    """One `join()` of a wrapped module: its steps, and the hook of a rank that has joined.

    Args:
        reduced: Wrapped module.
        buffers: Its buffers.
        broadcast_buffers: True if ranks that have joined take the buffers of the others at the end.
        divide: `divide_by_initial_world_size` of `DistributedDataParallel.join`.

    Attributes:
        root: Rank whose parameters all ranks have taken at the end; -1 before.
    """

    def __init__(
        self, reduced: ReducedModule, buffers: Buffers, *, broadcast_buffers: bool, divide: bool
    ) -> None:
        self._reduced, self._buffers = reduced, buffers
        self._broadcast, self._divide_by_initial_world_size = broadcast_buffers, divide
        self.root = -1

    def next_step(self, own: StepInfo) -> StepInfo:
        """Exchange the next step of the ranks that still have input, among all ranks.

        Raises:
            MismatchError: Their next steps differ. Raised on every rank.
        """
        group = self._reduced.group
        sums = torch.tensor(astuple(own), dtype=torch.int64, device=message_device(group))
        _all_reduce(sums, group)
        ranks, *counts = sums.tolist()
        for count, what in zip(counts, ACTIONS, strict=True):
            if count not in (0, ranks):
                raise MismatchError(
                    f"in join(), {count} of the {ranks} ranks that still have input {what} in "
                    "their next forward, and the others do not: call forward in the same order, "
                    "and under the same no_grad() and no_sync(), on all of these ranks"
                )
        return StepInfo(ranks, *(count > 0 for count in counts))

    def prepare(self, step: StepInfo) -> None:
        """Expect the backward of a step."""
        ranks = None if self._divide_by_initial_world_size else step.ranks
        shadowed = step.ranks < self._reduced.group.size()
        self._reduced.reducer.prepare(ranks=ranks, uneven=True, shadowed=shadowed)

    def main_hook(self) -> None:
        """Take part in one step of the ranks that have input left."""
        # in the order of DistributedDataParallel.forward, whose messages these match
        group, reducer = self._reduced.group, self._reduced.reducer
        step = self.next_step(StepInfo())
        if step.reduce:
            reducer.recover()
        if step.sync_buffers:
            self._buffers.sync(group, root=agree_on_rank(group, candidate=False))
        if step.reduce:
            reducer.prepare()
        if step.merge_buffers:
            self._buffers.sync(group)
        if step.reduce:
            reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters and buffers of a rank that took part in every step."""
        group = self._reduced.group
        self._reduced.reducer.end_uneven()
        self.root = agree_on_rank(group, candidate=is_last_joiner)
        buffers = self._buffers.named().items() if self._broadcast else ()
        broadcast_values(group, [*self._reduced.named, *buffers], group_src=self.root)


class UnevenJoin(Join):
    """PyTorch's `Join`, with errors of this package if a rank ends while ranks are counted."""

    def _get_num_nonjoined_procs(self) -> int:
        for hook in self._join_hooks:
            if isinstance(hook, UnevenInputs):
                hook._reduced.reducer.check_over()
        assert isinstance(self._process_group, ProcessGroup)
        # `notify_join_context` sends a 1 in the default dtype; only a sum of 0 matters
        dtype = torch.get_default_dtype()
        count = torch.zeros(1, dtype=dtype, device=self._device)
        _all_reduce(count, self._process_group)
        return int(count)


def skip_if_any(reducer: Reducer, flag: bool | Tensor) -> bool:
    """See `DistributedDataParallel.skip_if_any`."""
    if not isinstance(flag, bool) and not (isinstance(flag, Tensor) and flag.numel() == 1):
        raise ArgumentTypeError(f"flag is {flag!r}: pass a bool, or a tensor of one element")
    group = reducer.group
    domain = FaultDomain.of(group)
    domain.before_others()
    if reducer.shadowed:
        domain.fail(
            NotSupportedError(
                "skip_if_any() in join(), where a rank has run out of input: that rank waits for "
                "a backward. Call it outside of join()"
            )
        )
    flags = torch.tensor([bool(flag)], dtype=torch.int64, device=message_device(group))
    _all_reduce(flags, group, dist.ReduceOp.MAX, "skip_if_any()")
    if skipped := bool(flags):
        reducer.skip()
    return skipped
