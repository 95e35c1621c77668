"""The module's part in PyTorch's Join, which also says whose parameters all ranks took."""

from __future__ import annotations

from collections.abc import Callable

from gradwire import ddp as ours
from gradwire.ddp.join import ShadowHook, agree_on_rank

__all__ = ["JoinHook"]


class JoinHook(ShadowHook):
    """As gradwire's; at the end it reports the rank whose parameters were broadcast.

    Args:
        net: The wrapped module.
        report_rank: Called with that rank.
    """

    def __init__(
        self, net: ours.DistributedDataParallel, report_rank: Callable[[int], None]
    ) -> None:
        super().__init__(net)
        self._wrapped, self._report_rank = net, report_rank

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called when all ranks have run out of inputs."""
        super().post_hook(is_last_joiner)
        self._report_rank(agree_on_rank(self._wrapped.process_group, candidate=is_last_joiner))
