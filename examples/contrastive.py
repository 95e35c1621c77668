"""A contrastive loss over the whole batch, of which each rank holds a share (as in CLIP).

Every image is compared with the texts of all ranks, and every text with all images. Other ranks'
losses depend on this rank's embeddings too: `all_gather`'s backward brings those gradients home.

Source: A. Radford et al., "Learning Transferable Visual Models From Natural Language
Supervision", 2021.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import all_gather

__all__ = ["contrastive_loss"]


def contrastive_loss(
    images: Tensor, texts: Tensor, scale: Tensor | float = 1.0, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's share of the mean loss: the shares of all ranks add up to it.

    Args:
        images: This rank's embeddings, (n, d), n equal on all ranks.
        texts: Embeddings of the matching texts, (n, d).
        scale: The inverse temperature.
        group: The ranks that hold the batch.
    """
    n, rank, world = len(images), dist.get_rank(group), dist.get_world_size(group)
    own = torch.arange(n, device=images.device) + rank * n  # where the pairs are in the whole batch
    by_image = scale * images @ all_gather(texts, group=group).T
    by_text = scale * texts @ all_gather(images, group=group).T
    return (F.cross_entropy(by_image, own) + F.cross_entropy(by_text, own)) / (2 * world)
