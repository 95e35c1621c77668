"""Linear layers whose weight is divided over ranks: by output (column) or by input (row).

Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism", 2019.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gradwire.collectives import all_reduce, vary

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


def _own(whole: Tensor, dim: int, group: ProcessGroup | None) -> nn.Parameter:
    """This rank's part of a parameter."""
    parts = whole.detach().chunk(dist.get_world_size(group), dim)
    return nn.Parameter(parts[dist.get_rank(group)].clone())


class ColumnParallelLinear(nn.Module):
    """Linear layer from a replicated input to this rank's share of the outputs.

    `vary` sums the input's gradient, of which each rank has the part of its own outputs.

    Args:
        whole: The layer to divide, the same on all ranks.
        group: The ranks that share it.
    """

    def __init__(self, whole: nn.Linear, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.weight = _own(whole.weight, 0, group)
        self.bias = _own(whole.bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out / W)."""
        return F.linear(vary(x, group=self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Linear layer from this rank's share of the inputs to the replicated output.

    All ranks go on alike with the sum, so that its gradient is whole on each of them already:
    `invariant=True` sends nothing in backward.

    Args:
        whole: The layer to divide, the same on all ranks.
        group: The ranks that share it.
    """

    def __init__(self, whole: nn.Linear, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.weight = _own(whole.weight, 1, group)
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """(…, in / W) to (…, out)."""
        share = F.linear(x, self.weight)
        return all_reduce(share, group=self.group, invariant=True) + self.bias
