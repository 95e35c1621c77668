"""A mixture of experts, one expert a rank: each token travels to its expert and back.

How many tokens go where changes with every batch, so both exchanges are uneven. Their backward is
the exchange the other way, with the same counts.

Source: D. Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and
Automatic Sharding", 2020; one expert a token as in W. Fedus et al., "Switch Transformers", 2021.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gradwire.collectives import all_to_all

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(nn.Module):
    """Each token is given to the expert that the router prefers, weighted by its probability.

    Args:
        router: From (n, d) to (n, W) scores, the same on all ranks.
        expert: This rank's expert.
        group: The ranks that hold the experts.
    """

    def __init__(
        self, router: nn.Module, expert: nn.Module, group: ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.router = router
        self.expert = expert
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """This rank's tokens, (n, d), n differing by rank; the result has the same shape."""
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=dist.get_world_size(self.group))
        sent, received = counts.tolist(), all_to_all(counts, group=self.group).tolist()

        there = all_to_all(
            tokens[order], input_splits=sent, output_splits=received, group=self.group
        )
        back = all_to_all(
            self.expert(there), input_splits=received, output_splits=sent, group=self.group
        )
        return torch.empty_like(back).index_copy(0, order, back) * weight[:, None]
