"""Whether all ranks hold the same model: one digest, one exchange; names only where they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.ddp.faults.other_messages import wait_for_message
from gradwire.ddp.group import backend_errors, message_device
from gradwire.errors import MismatchError
from gradwire.recorder import failed

__all__ = ["describe", "verify_same"]

MODEL_REMEDY = (
    "Build the same module, in the same order and dtype, on every rank, and wrap it with the same "
    "arguments"
)
Description = list[tuple[str, str]]
"""For each parameter and buffer, in order: its name, and all else that must agree."""


def describe(parameters: Iterable[tuple[str, Tensor]], kind: str) -> Description:
    """Names and what must agree of tensors.

    Example:
        >>> describe([("weight", torch.zeros(2, 3))], "parameter")
        [('weight', 'parameter, torch.float32, shape (2, 3), strides (3, 1), requires_grad=False')]
    """
    return [
        (
            name,
            f"{kind}, {t.dtype}, shape {tuple(t.shape)}, "
            + (f"strides {t.stride()}" if t.layout == torch.strided else f"layout {t.layout}")
            + f", requires_grad={t.requires_grad}",
        )
        for name, t in parameters
    ]


def verify_same(
    group: ProcessGroup, own: Description, what: str = "models", remedy: str = MODEL_REMEDY
) -> None:
    """Raise on every rank if any rank's description differs.

    Sent: 32 bytes a rank; the descriptions only if the digests differ.

    Args:
        group: The ranks.
        own: This rank's description.
        what: What is described, for the message.
        remedy: What to do where they differ, for the message.

    Raises:
        MismatchError: Names the first difference and each rank's value.
        PeerLostError, CollectiveTimeoutError: Another rank is gone, or stayed away.
    """
    digest = hashlib.sha256(json.dumps(own).encode()).digest()
    device = message_device(group)
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    digests = [torch.empty_like(mine) for _ in range(group.size())]
    work = dist.all_gather(digests, mine, group=group, async_op=True)
    on_cpu = device.type == "cpu"
    wait_for_message(group, work, f"comparing {what}", on_cpu=on_cpu, from_all=True)
    if all(torch.equal(d, digests[0]) for d in digests):
        return
    everyone: list[Description] = [[] for _ in range(group.size())]
    with backend_errors(group, f"comparing {what}"):
        dist.all_gather_object(everyone, own, group=group)
    error = MismatchError(f"the ranks' {what} differ, {_first_difference(everyone)}. {remedy}")
    failed(error)
    raise error


def _first_difference(everyone: list[Description]) -> str:
    absent = ("(nothing)", "ends before")
    for entries in zip_longest(*everyone, fillvalue=absent):
        if len({tuple(e) for e in entries}) > 1:
            held = "; ".join(f"rank {r}: {name}: {what}" for r, (name, what) in enumerate(entries))
            names = [{name for name, _ in rank} for rank in everyone]
            only = sorted(set[str]().union(*names) - names[0].intersection(*names))
            hint = f". Not on every rank: {', '.join(only)}" if only else ""
            return f"first {held}{hint}"
    raise AssertionError("digests differ where descriptions do not")
