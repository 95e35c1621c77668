"""Attention over a sequence that is divided over ranks, by an exchange of sequence for heads.

Between two all_to_all each rank has the whole sequence for its share of the heads, on which any
attention kernel can run. Backward is the same exchange the other way.

Source: S. A. Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of
Extreme Long Sequence Transformer Models", 2023.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import all_to_all

__all__ = ["ulysses_attention"]

HEADS, SEQUENCE = 1, 2


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None = None, *, is_causal: bool = False
) -> Tensor:
    """Scaled dot-product attention.

    Args:
        q: This rank's piece of the queries, (batch, heads, S / W, d); W divides the heads.
        k: Keys.
        v: Values.
        group: The ranks that hold the sequence, in its order.
        is_causal: If True, a position attends only to itself and earlier ones.

    Returns:
        This rank's piece of the result, (batch, heads, S / W, d).
    """
    q, k, v = (all_to_all(x, split_dim=HEADS, concat_dim=SEQUENCE, group=group) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return all_to_all(out, split_dim=SEQUENCE, concat_dim=HEADS, group=group)
