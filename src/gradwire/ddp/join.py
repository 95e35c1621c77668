"""Uneven inputs: a rank that has run out of batches takes part in the others' steps with zeros.

This uses `torch.distributed.algorithms.join.Join`. In its context each forward begins with one
all_reduce. From it, ranks that have joined learn the next step of the others, and all ranks learn
how many are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from gradwire.ddp.broadcast import broadcast_values
from gradwire.ddp.buffers import Buffers
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.other_messages import wait_for_message
from gradwire.ddp.group import message_device
from gradwire.ddp.reduced_module import ReducedModule
from gradwire.errors import ArgumentTypeError, MismatchError, NotSupportedError

ACTIONS = (
    "expect a backward that is reduced",
    "synchronize buffers",
    "call a buffer hook after the forward",
)


@dataclass(frozen=True)
class StepInfo:
    """The next forward and backward of the ranks that still have input.

    Attributes:
        ranks: Number of these ranks.
        reduce: True if they reduce gradients.
        sync_buffers: True if they synchronize buffers before the forward.
        merge_buffers: True if they synchronize buffers after the forward.
    """

    ranks: int
    reduce: bool
    sync_buffers: bool
    merge_buffers: bool


def exchange_step_info(
    group: ProcessGroup,
    *,
    active: bool,
    reduce: bool = False,
    sync_buffers: bool = False,
    merge_buffers: bool = False,
) -> StepInfo:
    """Exchange the next step of the ranks that still have input, among all ranks.

    Raises:
        MismatchError: Their next steps differ. Raised on every rank.
    """
    device = message_device(group)
    own = [active, reduce, sync_buffers, merge_buffers]
    sums = torch.tensor(own, dtype=torch.int64, device=device)
    _all_reduce(sums, group)
    ranks, *counts = sums.tolist()
    for count, what in zip(counts, ACTIONS, strict=True):
        if count not in (0, ranks):
            raise MismatchError(
                f"in join(), {count} of the {ranks} ranks that still have input {what} in their "
                "next forward, and the others do not: call forward in the same order, and under "
                "the same no_grad() and no_sync(), on all of these ranks"
            )
    return StepInfo(ranks, *(count > 0 for count in counts))


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


class UnevenInputs(ReducedModule, Joinable):
    """Base class of DistributedDataParallel that handles uneven inputs."""

    broadcast_buffers: bool
    require_forward_param_sync: bool
    sync_buffers_in_eval: bool
    _buffers_synced: Buffers
    _divide_by_initial_world_size = True

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have different numbers of batches.

        A rank that has run out takes part in the others' steps with zeros, and ends with the
        parameters of a rank that took part in all steps. Once a rank has run out, each forward
        outside of `no_sync()` must have exactly one backward; otherwise ReductionError is raised.

        Args:
            divide_by_initial_world_size: If True, sums are divided by W. If False, by the number of
                ranks that still have input, even if a hook divides by W itself.
            enable: If False, the context has no effect.
            throw_on_early_termination: If True, RuntimeError is raised on all ranks when one has
                run out.

        Example:
            >>> from torch import nn
            >>> from gradwire.ddp import DistributedDataParallel
            >>> from gradwire.testing import run_ranks
            >>> def main():
            ...     net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
            ...     gradients = []
            ...     with net.join(divide_by_initial_world_size=False):
            ...         for _ in range(1 + dist.get_rank()):
            ...             net.zero_grad()
            ...             net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
            ...             gradients.append(net.module.weight.grad.item())
            ...     return gradients
            >>> run_ranks(main, world_size=2)
            [[1.5], [1.5, 2.0]]
        """
        return _Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def skip_if_any(self, flag: bool | Tensor) -> bool:
        """Return True on all ranks if any rank passes True, so that all leave out the batch.

        A rank that leaves out a backward alone is a step ahead of the others from then on. Every
        rank calls this at the same point, after the forward or before it. It sends one small
        message.

        Args:
            flag: Bool, or tensor of one element.

        Raises:
            ArgumentTypeError: `flag` is neither.
            NotSupportedError: The call is in `join()`, and a rank has run out of input. Raised on
                all ranks.
            PeerFailedError: Another rank reported an error.
            PeerLostError, CollectiveTimeoutError: Another rank has ended, or did not call in time.

        Example:
            >>> from torch import nn
            >>> from gradwire.ddp import DistributedDataParallel
            >>> from gradwire.testing import run_ranks
            >>> def main():
            ...     net, steps = DistributedDataParallel(nn.Linear(1, 1)), []
            ...     for step in range(3):
            ...         bad = dist.get_rank() == 1 and step == 1
            ...         loss = net(torch.ones(1, 1)).sum() * (float("nan") if bad else 1.0)
            ...         if net.skip_if_any(not loss.isfinite()):
            ...             continue
            ...         loss.backward()
            ...         steps.append(step)
            ...     return steps
            >>> run_ranks(main, world_size=2)
            [[0, 2], [0, 2]]
        """
        if not isinstance(flag, bool) and not (isinstance(flag, Tensor) and flag.numel() == 1):
            raise ArgumentTypeError(f"flag is {flag!r}: pass a bool, or a tensor of one element")
        domain = FaultDomain.of(self._group)
        domain.before_others()
        if self.reducer.shadowed:
            domain.fail(
                NotSupportedError(
                    "skip_if_any() in join(), where a rank has run out of input: that rank waits "
                    "for a backward. Call it outside of join()"
                )
            )
        flags = torch.tensor([bool(flag)], dtype=torch.int64, device=message_device(self._group))
        _all_reduce(flags, self._group, dist.ReduceOp.MAX, "skip_if_any()")
        if skipped := bool(flags):
            self.reducer.skip()
        return skipped

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """Return the hook that `Join` runs on a rank that has run out of input."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ShadowHook(self)

    @property
    def join_device(self) -> torch.device:
        """Device of `Join`'s messages."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Process group of `Join`."""
        return self._group

    def _agreed_arguments(self) -> list[tuple[str, str]]:
        given = {
            "broadcast_buffers": self.broadcast_buffers,
            "sync_buffers_in_eval": self.sync_buffers_in_eval,
            "check_replicas": self.check_replicas,
        }
        own = [(name, f"an argument, {value!r}") for name, value in given.items()]
        return [*super()._agreed_arguments(), *own]

    def _syncs_buffers(self, training: bool = True) -> bool:
        """Return True if the next forward synchronizes buffers before it runs.

        Args:
            training: True if it runs with gradients enabled.
        """
        wanted = self.broadcast_buffers and self.require_forward_param_sync
        wanted = wanted and (training or self.sync_buffers_in_eval)
        return wanted and not self._buffers_synced.after_forward and bool(self._buffers_synced)

    def _merges_buffers(self) -> bool:
        """Return True if a training forward synchronizes buffers after it has run."""
        wanted = self.broadcast_buffers and self._buffers_synced.after_forward
        return wanted and bool(self._buffers_synced)

    def _exchange_step_info(self, syncing: bool) -> StepInfo:
        Join.notify_join_context(self)
        return exchange_step_info(
            self._group,
            active=True,
            reduce=syncing,
            sync_buffers=self._syncs_buffers(torch.is_grad_enabled()),
            merge_buffers=syncing and self._merges_buffers(),
        )

    def _named_state(self) -> list[tuple[str, Tensor]]:
        """Return the parameters, and the buffers that are synchronized, by name."""
        named = self.module.named_parameters()
        parameters = [(n, p.detach()) for n, p in named if n not in self.parameters_to_ignore]
        buffers = self._buffers_synced.named().items() if self.broadcast_buffers else ()
        return [*parameters, *buffers]


class _Join(Join):
    """PyTorch's `Join`, with errors of this package if a rank ends while ranks are counted."""

    def _get_num_nonjoined_procs(self) -> int:
        for net in self._joinables:
            if isinstance(net, UnevenInputs):
                net.reducer.check_over()
        assert isinstance(self._process_group, ProcessGroup)
        # `notify_join_context` sends a 1 in the default dtype; only a sum of 0 matters
        dtype = torch.get_default_dtype()
        count = torch.zeros(1, dtype=dtype, device=self._device)
        _all_reduce(count, self._process_group)
        return int(count)


class ShadowHook(JoinHook):
    """Hook of a rank that has joined: takes part in the steps of the other ranks."""

    def __init__(self, net: UnevenInputs) -> None:
        self._net = net

    def main_hook(self) -> None:
        """Take part in one step of the ranks that have input left."""
        # in the order of DistributedDataParallel.forward, whose messages these match
        net = self._net
        step = exchange_step_info(net._group, active=False)
        if step.reduce:
            net.reducer.recover()
        if step.sync_buffers:
            root = agree_on_rank(net._group, candidate=False)
            net._buffers_synced.sync(net._group, root=root)
        if step.reduce:
            net.reducer.prepare()
        if step.merge_buffers:
            net._buffers_synced.sync(net._group)
        if step.reduce:
            net.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters of a rank that took part in every step."""
        self._net.reducer.end_uneven()
        root = agree_on_rank(self._net._group, candidate=is_last_joiner)
        broadcast_values(self._net._group, self._net._named_state(), group_src=root)
