"""Attention over a sequence that is divided over ranks: keys and values go round the ring.

Each rank keeps its queries and sees one block of keys and values at a time. The softmax over all
blocks is put together from theirs by their log-sum-exp, so that no rank ever holds the sequence.

Source: H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for
Near-Infinite Context", 2023.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import shift

__all__ = ["ring_attention"]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Scaled dot-product attention of every query to the whole sequence.

    Args:
        q: This rank's piece of the queries, (batch, heads, S / W, d).
        k: Keys.
        v: Values.
        group: The ranks that hold the sequence.

    Returns:
        This rank's piece of the result, (batch, heads, S / W, d).
    """
    world = dist.get_world_size(group)
    block = torch.stack([k, v])
    out, weight = _attend(q, *block)
    for _ in range(world - 1):
        block = shift(block, 1, group=group)
        new, new_weight = _attend(q, *block)
        total = torch.logaddexp(weight, new_weight)
        out = out * (weight - total).exp() + new * (new_weight - total).exp()
        weight = total
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to one block, and the log of the sum of its weights."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    weight = scores.logsumexp(-1, keepdim=True)
    return (scores - weight).exp() @ v, weight
