"""Wait for collectives of a generation, and tell errors that mean a lost member from others."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeAlias

from torch.distributed import DistError, Work

from gradwire._engine_errors import is_transport
from gradwire.ddp.faults.waiting import wait_work
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    HookError,
    PeerFailedError,
    PeerLostError,
    RunOverError,
)

Wait: TypeAlias = Callable[[Work], None]

_LOSSES = (PeerLostError, CollectiveTimeoutError, BrokenGroupError, PeerFailedError)
_UNCLEAR = (DistError, HookError, DistributedError)


def make_wait(poll: Callable[[], None], seconds: float) -> Wait:
    """A function that waits for a collective.

    Args:
        poll: Called from time to time; raises if the epoch is to end.
        seconds: The group's timeout.

    The function raises a DistributedError if the collective failed, whatever its backend raised.
    """

    def wait(work: Work) -> None:
        error = wait_work(work, poll, on_cpu=True, seconds=seconds)
        try:
            if error is None:
                return
            poll()
            if isinstance(error, DistributedError) or not is_transport(error):
                raise error
            raise PeerLostError(f"a member was lost: {error}") from error
        finally:
            # its traceback holds this frame and those below, with the group: they would keep each
            # other until garbage is collected
            del error

    return wait


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
