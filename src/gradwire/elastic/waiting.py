"""Waits of an epoch: each ends with its deadline, or when the monitor has given the epoch up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch.distributed import Work

from gradwire._engine_errors import is_transport
from gradwire.ddp.faults.waiting import wait_work
from gradwire.errors import DistributedError, PeerLostError

__all__ = ["Wait", "make_wait"]

Wait: TypeAlias = Callable[[Work], None]


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
