"""Backwards that end when their caller says so, not when the engine has computed all gradients."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradwire.ddp.reducer.reducer import Reducer

__all__ = ["Finalizing"]


class Finalizing(nn.Module):
    """The part of DistributedDataParallel that ends a backward by hand."""

    reducer: Reducer
    _reducer_options: dict[str, Any]

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether each backward that is reduced waits for a call of `finalize_backward`.

        Other communication, or other work of the same backward, then overlaps with the buckets'.
        Set it before a forward, the same on every rank.

        Raises:
            ReductionError: Set while a backward is not finished.
        """
        return self.reducer.manual_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.reducer.manual_finalization = required
        self._reducer_options["manual_finalization"] = required  # for a reducer made anew

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether the next backward has to return before `finalize_backward` is called.

        So it is in the first one, from which buckets are planned. In others a hook of backward
        may call it, once all parameters have their gradients.
        """
        return self.reducer.must_return_first

    def finalize_backward(self) -> None:
        """Wait for the buckets of a backward, and put what came back into the gradients.

        Every rank calls it once for each backward that is reduced, where
        `require_manual_backward_finalization` is set: after that backward, or in one of its hooks.

        Raises:
            ReductionError: It is not set, nothing was reduced, or gradients are yet to come.
            PeerFailedError: Another rank reported an error.

        Example:
            >>> import torch
            >>> import torch.distributed as dist
            >>> from gradwire.ddp import DistributedDataParallel
            >>> from gradwire.testing import run_ranks
            >>> def main():
            ...     net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
            ...     net.require_manual_backward_finalization = True
            ...     net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
            ...     # here other work overlaps with the reduction
            ...     net.finalize_backward()
            ...     return net.module.weight.grad.item()
            >>> run_ranks(main, world_size=2)
            [1.5, 1.5]
        """
        self.reducer.finalize()
