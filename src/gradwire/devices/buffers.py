"""Policies for module buffers that replicas write, such as running statistics of batch norm.

The first replica has the module's own buffers. The other replicas have copies, which are discarded.
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
    """Raise if the policy does not exist."""
    if policy not in get_args(BufferPolicy):
        raise ArgumentError(f'buffers is {policy!r}: give "first", "mean" or "error"')


class BufferTracker:
    """Records the buffers passed to the replicas, and applies the policy after the forward.

    Version counters do not show all writes: batch norm updates its statistics without incrementing
    them. A module may also assign a new tensor to a buffer, instead of writing into the old one.
    """

    def __init__(self, module: Module, policy: BufferPolicy, first: Module) -> None:
        self.policy = policy
        self.before: dict[str, Tensor] = {}
        if policy != "first":
            self.before = {n: b.detach().clone() for n, b in _buffers(module) if b is not None}
        copied: dict[int, Tensor] = {}
        if policy == "mean":
            # The mean is written into the module's buffers, which the first replica's backward must
            # therefore not have saved.
            for name, given in _buffers(first):
                if name in self.before and given is not None and not given.requires_grad:
                    # one copy for all names of a buffer, so that they continue to share memory
                    copy = copied.setdefault(id(given), self.before[name].clone())
                    _assign(first, name, copy)
        self.given = dict(_buffers(first))

    @torch.no_grad()
    def apply_policy(self, module: Module, replicas: Sequence[Module]) -> None:
        """Apply the policy.

        Raises:
            ArgumentError: The policy is "error", and a replica other than the first wrote a buffer;
                or it is "mean", and a replica's buffer has another shape.
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
                _assign(module, name, new)  # other names of the old buffer keep it
            elif self.policy == "mean":
                _write(tensor, new)


def _buffers(module: Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield names and values of all buffers, including None, and every name of shared ones."""
    for prefix, owner in module.named_modules():
        for key, value in owner._buffers.items():
            yield f"{prefix}.{key}" if prefix else key, value


def _assign(module: Module, name: str, value: Tensor | None) -> None:
    prefix, _, key = name.rpartition(".")
    module.get_submodule(prefix)._buffers[key] = value


def _write(target: Tensor | None, value: Tensor | None) -> None:
    """Copy a value into a buffer if it differs, so that unchanged buffers keep their version."""
    if target is not None and value is not None and not torch.equal(target, value):
        target.copy_(value)


def _at(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else local(value.detach(), device)


def _moved_by_mean(name: str, before: Tensor, after: Sequence[Tensor | None]) -> Tensor:
    """Return the previous value plus the mean of the replicas' changes.

    Half precision is summed in float32, which has the precision and range for the sum.
    """
    half = before.is_floating_point() and before.dtype.itemsize < 4
    start = before.float() if half else before
    change = torch.zeros_like(start)
    for i, value in enumerate(after):
        if value is None or value.shape != before.shape:
            found = None if value is None else tuple(value.shape)
            raise ArgumentError(
                f'buffers is "mean", and replica {i} made the buffer {name}, of shape '
                f"{tuple(before.shape)}, one of {found}: these have no mean. Keep the shape, or "
                'use buffers="first" (the first replica\'s)'
            )
        # skip equal values, because the difference of infinities is NaN
        change += torch.where(value == before, 0, value.to(start.dtype) - start)
    return (start + change / len(after)).to(before.dtype)


def _refuse_written(name: str, before: Tensor | None, after: Sequence[Tensor | None]) -> None:
    for i, value in enumerate(after[1:], 1):
        if not _same(value, before):
            raise ArgumentError(
                f'buffers is "error", and replica {i} wrote the buffer {name}: its value would be '
                'lost. Freeze the buffer, or use buffers="mean" (of all replicas) or "first" (the '
                "first replica's)"
            )


def _same(value: Tensor | None, before: Tensor | None) -> bool:
    if value is None or before is None:
        return value is before
    return value.dtype == before.dtype and torch.equal(local(value.detach(), before.device), before)
