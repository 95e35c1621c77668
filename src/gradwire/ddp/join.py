"""Uneven inputs: a rank that has run out takes part in the others' steps with zeros.

The ranks meet in `torch.distributed.algorithms.join.Join`. In its context each forward begins with
one all_reduce, from which ranks that have joined learn what the others do next, and all how many
are left.
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
        reduce: If True, they reduce gradients.
        sync_buffers: If True, they synchronize buffers before the forward.
        merge_buffers: If True, they synchronize buffers after the forward.
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
    """Tell all ranks what those that still have input do next.

    Raises:
        MismatchError: They do not do the same: raised on every rank.
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
    """The highest rank in the group that is a candidate; at least one is."""
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
    """The part of DistributedDataParallel that takes uneven inputs."""

    broadcast_buffers: bool
    require_forward_param_sync: bool
    sync_buffers_in_eval: bool
    check_replicas: int | None
    _buffers_synced: Buffers
    _divide_by_initial_world_size = True

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of batches.

        A rank that has run out takes part in the others' steps with zeros, and ends with the
        parameters of a rank that took part in all. From then on, each forward outside of
        `no_sync()` has one backward, no more and no fewer: else it is a ReductionError.

        Args:
            divide_by_initial_world_size: Divide sums by W; if not, by the number of ranks that
                still have input, also where a hook divides by W itself.
            enable: Whether the context does anything.
            throw_on_early_termination: Raise RuntimeError on all ranks when one has run out.

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
        """Return True on all ranks if any rank passes True: all leave the batch out together.

        A rank that leaves out a backward alone is a step ahead of the others from then on. Every
        rank calls this at the same place, after forward or before it: one small message.

        Args:
            flag: A bool, or a tensor of one element.

        Raises:
            ArgumentTypeError: Neither.
            NotSupportedError: In `join()`, where a rank has run out of input: raised on all ranks.
            PeerFailedError: Another rank reported an error.
            PeerLostError, CollectiveTimeoutError: Another rank is gone, or stayed away.

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
        """What `Join` runs on a rank that has run out."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ShadowHook(self)

    @property
    def join_device(self) -> torch.device:
        """Where `Join` puts its messages."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group that `Join` meets in."""
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
            training: If True, it runs with gradients enabled.
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
    """Torch's, where a rank that is gone while the ranks are counted is an error of ours."""

    def _get_num_nonjoined_procs(self) -> int:
        for net in self._joinables:
            if isinstance(net, UnevenInputs):
                net.reducer.check_over()
        assert isinstance(self._process_group, ProcessGroup)
        # `notify_join_context` sends a 1 in the default dtype; only a sum of 0 has a meaning
        dtype = torch.get_default_dtype()
        count = torch.zeros(1, dtype=dtype, device=self._device)
        _all_reduce(count, self._process_group)
        return int(count)


class ShadowHook(JoinHook):
    """What a rank does that has joined."""

    def __init__(self, net: UnevenInputs) -> None:
        self._net = net

    def main_hook(self) -> None:
        """Take part in one step of the ranks that have input left."""
        # in the order of DistributedDataParallel.forward: these messages meet those of the others
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
