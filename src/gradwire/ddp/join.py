"""`join()`: ranks with different numbers of batches, and what they agree on before a forward."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, JoinHook

from gradwire._groups import message_device
from gradwire.ddp.broadcast import broadcast_values
from gradwire.ddp.faults.fault_domain import wait_for_message
from gradwire.ddp.sync_batch_norm import SyncBatchNorm
from gradwire.errors import MismatchError, NotSupportedError

NO_BATCH_NORM = (
    "SyncBatchNorm in join(): it would wait for ranks that have run out of input. End training on "
    "all ranks by join(throw_on_early_termination=True), use BatchNorm, or set its layers to eval()"
)
ACTIONS = (
    "expect a backward that is reduced",
    "synchronize buffers",
    "call a buffer hook after the forward",
)


@dataclass(frozen=True)
class StepInfo:
    """The next forward and backward of ranks that still have input."""

    ranks: int = 0  # number of these ranks; 0 on a rank that has joined
    reduce: bool = False
    sync_buffers: bool = False  # before the forward
    merge_buffers: bool = False  # after the forward


def agree_on_rank(group: ProcessGroup, *, candidate: bool) -> int:
    """Return the highest candidate rank of the group, which has at least one."""
    own = group.rank() if candidate else -1
    rank = torch.tensor([own], dtype=torch.int64, device=message_device(group))
    all_reduce_small(rank, group, dist.ReduceOp.MAX)
    return int(rank)


def all_reduce_small(
    tensor: Tensor,
    group: ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    what: str = "a step in join()",
) -> None:
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    wait_for_message(group, work, what, on_cpu=tensor.is_cpu, from_all=True)


class UnevenInputs(JoinHook):
    """One `join()` of a wrapped module: its steps, and the hook of a rank that has joined."""

    # In PyTorch's `Join`, each forward begins with one all_reduce. From it, ranks that have joined
    # learn the next step of the others, and all ranks learn how many are left.

    def __init__(self, net: Any, *, divide_by_initial_world_size: bool = True, **_: Any) -> None:
        # `net` is a DistributedDataParallel, whose file imports this one
        self._net, self._divide_by_initial_world_size = net, divide_by_initial_world_size
        # rank whose parameters all ranks have taken at the end; -1 before
        self.root = -1

    def next_step(self, own: StepInfo) -> StepInfo:
        """Exchange the next step of the ranks that still have input; raise if theirs differ."""
        group = self._net.process_group
        kinds, modules = (SyncBatchNorm, nn.SyncBatchNorm), self._net.module.modules()
        waits = own.ranks and any(m.training for m in modules if isinstance(m, kinds))
        numbers, device = (*astuple(own), waits), message_device(group)
        sums = torch.tensor(numbers, dtype=torch.int64, device=device)
        all_reduce_small(sums, group)
        ranks, *counts, waiting = sums.tolist()
        for count, what in zip(counts, ACTIONS, strict=True):
            if count not in (0, ranks):
                raise MismatchError(
                    f"in join(), {count} of the {ranks} ranks that still have input {what} in "
                    "their next forward, and the others do not: call forward in the same order, "
                    "and under the same no_grad() and no_sync(), on all of these ranks"
                )
        if waiting and ranks < group.size():
            raise NotSupportedError(NO_BATCH_NORM)
        return StepInfo(ranks, *(count > 0 for count in counts))

    def prepare(self, step: StepInfo) -> None:
        """Expect the backward of a step."""
        ranks = None if self._divide_by_initial_world_size else step.ranks
        shadowed = step.ranks < self._net.process_group.size()
        self._net.reducer.prepare(ranks=ranks, uneven=True, shadowed=shadowed)

    def main_hook(self) -> None:
        """Take part in one step of the ranks that have input left."""
        # in the order of DistributedDataParallel.forward, whose messages these match
        group, reducer, buffers = (
            self._net.process_group,
            self._net.reducer,
            self._net._buffers_synced,
        )
        step = self.next_step(StepInfo())
        if step.reduce:
            reducer.raise_if_unfinished()
        if step.sync_buffers:
            buffers.sync(group, root=agree_on_rank(group, candidate=False))
        if step.reduce:
            reducer.prepare()
        if step.merge_buffers:
            buffers.sync(group)
        if step.reduce:
            reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters and buffers of a rank that took part in every step."""
        net, group = self._net, self._net.process_group
        net.reducer.shadowed = False
        self.root = agree_on_rank(group, candidate=is_last_joiner)
        buffers = net._buffers_synced.named().items() if net.broadcast_buffers else ()
        broadcast_values(group, [*net._named, *buffers], group_src=self.root)


class UnevenJoin(Join):
    """PyTorch's `Join`, with errors of this package if a rank ends while ranks are counted."""

    def _get_num_nonjoined_procs(self) -> int:
        for hook in self._join_hooks:
            if isinstance(hook, UnevenInputs):
                hook._net.reducer.check_over()
        assert isinstance(self._process_group, ProcessGroup)
        # `notify_join_context` sends a 1 in the default dtype; only a sum of 0 matters
        dtype = torch.get_default_dtype()
        count = torch.zeros(1, dtype=dtype, device=self._device)
        all_reduce_small(count, self._process_group)
        return int(count)
