"""Policies for the buffers that replicas write, such as batch norm's running statistics.

The first replica's buffers are the module's own; those of the others are copies that are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Module

from gradwire.devices.copying import local
from gradwire.errors import ArgumentError

BufferPolicy: TypeAlias = Literal["first", "mean", "error"]


def check_policy(policy: str) -> None:
    """Refuse a policy that does not exist."""
    if policy not in get_args(BufferPolicy):
        raise ArgumentError(f'buffers is {policy!r}: give "first", "mean" or "error"')


class BufferTracker:
    """Remembers what buffers the replicas were given, and applies the policy after the forward.

    Version counters are no help here: batch norm writes its statistics past them. A module may also
    assign a buffer another tensor, rather than write into the one it has.
    """

    def __init__(self, module: Module, policy: BufferPolicy, first: Module) -> None:
        self.policy = policy
        self.before: dict[str, Tensor] = {}
        if policy != "first":
            self.before = {n: b.detach().clone() for n, b in _buffers(module) if b is not None}
        copied: dict[int, Tensor] = {}
        if policy == "mean":
            # The mean is written into the module's own, so the first replica's backward must not
            # have kept those.
            for name, given in _buffers(first):
                if name in self.before and given is not None and not given.requires_grad:
                    # one copy for all names of one buffer: what is written by one is read by all
                    copy = copied.setdefault(id(given), self.before[name].clone())
                    _assign(first, name, copy)
        self.given = dict(_buffers(first))

    @torch.no_grad()
    def apply_policy(self, module: Module, replicas: Sequence[Module]) -> None:
        """Apply the policy.

        Raises:
            ArgumentError: The policy is "error", and a replica but the first wrote a buffer; it is
                "mean", and a replica's buffer has another shape.
        """
        own, written = dict(_buffers(module)), [dict(_buffers(replica)) for replica in replicas]
        for name, tensor in own.items():
            before, new = self.before.get(name), written[0].get(name)
            assigned = new is not self.given.get(name)
            if self.policy == "error":
                _refuse_written(name, before, [buffers.get(name) for buffers in written])
            elif before is not None and (before.is_floating_point() or before.is_complex()):
                after = [_at(buffers.get(name), before.device) for buffers in written]
                new = _moved_by_mean(name, before, after)
            if assigned:
                _assign(module, name, new)  # another name of the old one keeps that
            elif self.policy == "mean":
                _write(tensor, new)


def _buffers(module: Module) -> Iterator[tuple[str, Tensor | None]]:
    """Every buffer's name and value; of those that are None too, and of shared ones every name."""
    for prefix, owner in module.named_modules():
        for key, value in owner._buffers.items():
            yield f"{prefix}.{key}" if prefix else key, value


def _assign(module: Module, name: str, value: Tensor | None) -> None:
    prefix, _, key = name.rpartition(".")
    module.get_submodule(prefix)._buffers[key] = value


def _write(target: Tensor | None, value: Tensor | None) -> None:
    """Copy a value, where it differs: the version counter of what nobody has written stays."""
    if target is not None and value is not None and not torch.equal(target, value):
        target.copy_(value)


def _at(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else local(value.detach(), device)


def _moved_by_mean(name: str, before: Tensor, after: Sequence[Tensor | None]) -> Tensor:
    """Return the value before, moved by the mean of the changes.

    Half precision is added up in float32, which has room for the changes and their sum.
    """
    half = before.is_floating_point() and before.dtype.itemsize < 4
    start = before.float() if half else before
    change = torch.zeros_like(start)
    for i, value in enumerate(after):
        if value is None or value.shape != before.shape:
            found = None if value is None else tuple(value.shape)
            raise ArgumentError(
                f'buffers is "mean", and replica {i} made the buffer {name}, of shape '
                f"{tuple(before.shape)}, one of {found}: those have no mean. Keep the shape, or "
                'take "first" (the first replica\'s)'
            )
        # equal values are skipped: the difference of infinities would be NaN
        change += torch.where(value == before, 0, value.to(start.dtype) - start)
    return (start + change / len(after)).to(before.dtype)


def _refuse_written(name: str, before: Tensor | None, after: Sequence[Tensor | None]) -> None:
    for i, value in enumerate(after[1:], 1):
        if not _same(value, before):
            raise ArgumentError(
                f'buffers is "error", and replica {i} wrote the buffer {name}: that value would be '
                'lost. Freeze it, or take "mean" (of all replicas) or "first" (the first '
                "replica's)"
            )


def _same(value: Tensor | None, before: Tensor | None) -> bool:
    if value is None or before is None:
        return value is before
    return value.dtype == before.dtype and torch.equal(local(value.detach(), before.device), before)
