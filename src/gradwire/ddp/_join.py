"""Uneven inputs: a rank that has run out takes part in the others' steps with zeros.

The ranks meet in `torch.distributed.algorithms.join.Join`. In its context each forward begins with
one message, by which ranks that have joined learn what the others do next, and all how many are
left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import JoinHook

from gradwire.ddp._buffers import Buffers
from gradwire.ddp._group import message_device
from gradwire.ddp.broadcast import broadcast_coalesced
from gradwire.ddp.reducer import Reducer

__all__ = ["Plans", "ShadowHook", "agree_on_rank", "exchange_plans"]


@dataclass(frozen=True)
class Plans:
    """What the ranks that still have input do next.

    Attributes:
        ranks: How many they are.
        reduce: Whether they reduce gradients.
        sync_buffers: Whether they make buffers alike.
    """

    ranks: int
    reduce: bool
    sync_buffers: bool


def exchange_plans(
    group: ProcessGroup, *, active: bool, reduce: bool = False, sync_buffers: bool = False
) -> Plans:
    """Tell what this rank does next, if it is active, and learn what the others do."""
    device = message_device(group)
    told = torch.tensor([active, reduce, sync_buffers], dtype=torch.int64, device=device)
    dist.all_reduce(told, group=group)
    ranks, reducing, syncing = told.tolist()
    return Plans(ranks, reducing > 0, syncing > 0)


def agree_on_rank(group: ProcessGroup, *, candidate: bool) -> int:
    """The highest rank in the group that is a candidate; at least one is."""
    rank = torch.tensor([group.rank() if candidate else -1], device=message_device(group))
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=group)
    return int(rank)


class Joined(Protocol):
    """What the shadow needs of a wrapped module."""

    process_group: ProcessGroup
    reducer: Reducer
    _buffers_synced: Buffers

    def _state_tensors(self) -> list[Tensor]: ...


class ShadowHook(JoinHook):
    """What a rank does that has joined."""

    def __init__(self, net: Joined) -> None:
        self._net = net

    def main_hook(self) -> None:
        """Take part in one step of the ranks that have input left."""
        net = self._net
        plans = exchange_plans(net.process_group, active=False)
        if plans.reduce:
            net.reducer.prepare()
        if plans.sync_buffers:
            root = agree_on_rank(net.process_group, candidate=False)
            net._buffers_synced.sync(net.process_group, root=root)
        if plans.reduce:
            net.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters of a rank that took part in every step."""
        root = agree_on_rank(self._net.process_group, candidate=is_last_joiner)
        broadcast_coalesced(self._net.process_group, self._net._state_tensors(), group_src=root)
