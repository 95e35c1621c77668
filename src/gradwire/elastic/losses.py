"""Which errors mean that a member was lost, and what is done with those that do."""

from __future__ import annotations

import traceback

from torch.distributed import DistError

from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    HookError,
    PeerFailedError,
    PeerLostError,
    RunOverError,
)

__all__ = ["let_go", "may_mean_a_loss", "means_a_loss"]

_LOSSES = (PeerLostError, CollectiveTimeoutError, BrokenGroupError, PeerFailedError)
_UNCLEAR = (DistError, HookError, DistributedError)


def means_a_loss(error: BaseException) -> bool:
    """Whether an error says by its type that a member was lost."""
    return isinstance(error, _LOSSES)


def may_mean_a_loss(error: BaseException) -> bool:
    """Whether a backend raises such where a member is lost, among other things."""
    if isinstance(error, RunOverError):  # of the last commit: the members have left, all done
        return False
    return isinstance(error, _UNCLEAR) or type(error) is RuntimeError


def let_go(error: BaseException) -> None:
    """Free what the frames hold through which an error has come, that nobody will look at.

    A frame that has the error in a variable, as those that wait and raise have, keeps it and is
    kept by it: with the group that failed, its connections and its threads, until garbage is
    collected.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        each = errors.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            errors += [each.__cause__, each.__context__]
            traceback.clear_frames(each.__traceback__)  # those that still run are left alone
