"""Wait for collectives of a generation, and tell errors that mean a lost member from others."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeAlias

from torch.distributed import DistError, Work

from gradwire._engine_errors import is_transport
from gradwire.ddp import wait_work
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
    """Return a function that waits for a collective.

    The function raises a DistributedError if the collective failed, whatever its backend raised.

    Args:
        poll: Function called from time to time; raises if the generation has to end.
        seconds: Timeout of the group.
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
            # its traceback refers to this frame and those below, with the group: a cycle that only
            # garbage collection would free
            del error

    return wait


def means_a_loss(error: BaseException) -> bool:
    """Return True if the type of an error says that a member was lost."""
    return isinstance(error, _LOSSES)


def may_mean_a_loss(error: BaseException) -> bool:
    """Return True if a lost member is one possible cause of an error."""
    if isinstance(error, RunOverError):  # raised by the last commit, when all members are done
        return False
    return isinstance(error, _UNCLEAR) or type(error) is RuntimeError


def let_go(error: BaseException) -> None:
    """Release the objects held by the frames of an error's traceback.

    A frame that has the error in a variable forms a cycle with it. The cycle would keep the failed
    group with its connections and threads until the next garbage collection.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        each = errors.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            errors += [each.__cause__, each.__context__]
            traceback.clear_frames(each.__traceback__)  # does not clear running frames
