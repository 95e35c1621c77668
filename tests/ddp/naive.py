"""Naive reference implementation of gradwire.ddp, to which tests compare it.

It has no buckets and no overlap, and sends one message per tensor: too slow to train with, short
enough to trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def broadcast(group: ProcessGroup, tensors: Sequence[Tensor], group_src: int = 0) -> None:
    """Overwrite tensors with the root's values, one after the other."""
    with torch.no_grad():
        for tensor in tensors:
            wire = tensor.detach().resolve_conj().contiguous().clone()
            dist.broadcast(wire, group=group, group_src=group_src)
            tensor.copy_(wire)


def average_gradients(group: ProcessGroup, parameters: Iterable[Tensor]) -> None:
    """Replace each gradient by its mean over ranks, after backward."""
    for parameter in parameters:
        if parameter.grad is not None:
            mean = parameter.grad.contiguous() / group.size()
            dist.all_reduce(mean, group=group)
            parameter.grad.copy_(mean)


def weighted_average(group: ProcessGroup, parameters: Iterable[Tensor], weight: float) -> None:
    """Replace each gradient by Σ n g / Σ n over ranks, after backwards of n × loss.

    Args:
        group: Process group.
        parameters: Parameters whose gradients hold Σ n g of this rank's backwards.
        weight: Σ n of this rank's backwards.
    """
    total = torch.tensor(weight, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    for parameter in parameters:
        if parameter.grad is not None:
            sums = parameter.grad.contiguous()
            dist.all_reduce(sums, group=group)
            parameter.grad.copy_(sums / total.item() if total else torch.zeros_like(sums))
