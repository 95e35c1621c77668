"""Which errors mean that a member was lost."""

from __future__ import annotations

from torch.distributed import DistError

from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    HookError,
    PeerFailedError,
    PeerLostError,
)

__all__ = ["may_mean_a_loss", "means_a_loss"]

_LOSSES = (PeerLostError, CollectiveTimeoutError, BrokenGroupError, PeerFailedError)
_UNCLEAR = (DistError, HookError, DistributedError)


def means_a_loss(error: BaseException) -> bool:
    """Whether an error says by its type that a member was lost."""
    return isinstance(error, _LOSSES)


def may_mean_a_loss(error: BaseException) -> bool:
    """Whether a backend raises such where a member is lost, among other things."""
    return isinstance(error, _UNCLEAR) or type(error) is RuntimeError
