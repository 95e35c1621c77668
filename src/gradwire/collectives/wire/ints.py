"""Integers between ranks: sizes and signatures, exchanged before tensors are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.wire.backends import device_of

__all__ = ["exchange_ints", "gather_ints"]


def gather_ints(mine: Sequence[int], group: ProcessGroup) -> list[list[int]]:
    """all_gather of lists of the same length."""
    # Within torch.func's transforms every new tensor would belong to them.
    with temporarily_clear_interpreter_stack():
        own = torch.tensor([mine], dtype=torch.int64, device=device_of(group))
        rows: list[list[int]] = wire.all_gather(own, None, group, blocking=True).wait().tolist()
    return rows


def exchange_ints(mine: Sequence[int], group: ProcessGroup) -> list[int]:
    """all_to_all of one integer for each rank."""
    with temporarily_clear_interpreter_stack():
        own = torch.tensor(mine, dtype=torch.int64, device=device_of(group))
        theirs: list[int] = wire.all_to_all(own, None, None, group, blocking=True).wait().tolist()
    return theirs
