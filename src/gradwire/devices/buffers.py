"""Policies for the buffers that replicas write, such as batch norm's running statistics.

The first replica's buffers are the module's own; those of the others are copies that are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch.nn import Module

from gradwire.devices.copying import local
from gradwire.errors import ArgumentError

__all__ = ["BufferPolicy", "BufferTracker", "check_policy"]

BufferPolicy: TypeAlias = Literal["first", "mean", "error"]


def check_policy(policy: str) -> None:
    """Refuse a policy that does not exist."""
    if policy not in get_args(BufferPolicy):
        raise ArgumentError(f'buffers is {policy!r}: give "first", "mean" or "error"')


class BufferTracker:
    """Remembers a module's buffers before a forward, and applies the policy after it.

    Version counters are no help here: batch norm writes its statistics past them.
    """

    def __init__(self, module: Module, policy: BufferPolicy) -> None:
        self.policy = policy
        self.before = {}
        if policy != "first":
            self.before = {name: b.detach().clone() for name, b in module.named_buffers()}

    @torch.no_grad()
    def apply_policy(self, module: Module, replicas: Sequence[Module]) -> None:
        """Apply the policy.

        Raises:
            ArgumentError: The policy is "error", and a replica but the first wrote a buffer.
        """
        own = dict(module.named_buffers())
        written = [dict(replica.named_buffers()) for replica in replicas]
        for name, before in self.before.items():
            after = [local(buffers[name].detach(), before.device) for buffers in written]
            if self.policy == "error":
                _refuse_written(name, before, after)
            elif before.is_floating_point() or before.is_complex():
                # equal values are skipped: the difference of infinities would be NaN
                change = sum(torch.where(a == before, 0, a - before) for a in after)
                # without a change of the version counter, as batch norm does: backward does not
                # read the value
                own[name].data.copy_(before + change / len(after))


def _refuse_written(name: str, before: torch.Tensor, after: Sequence[torch.Tensor]) -> None:
    for i, value in enumerate(after[1:], 1):
        if not torch.equal(value, before):
            raise ArgumentError(
                f'buffers is "error", and replica {i} wrote the buffer {name}: that value would be '
                'lost. Freeze it, or take "mean" (of all replicas) or "first" (the first '
                "replica's)"
            )
