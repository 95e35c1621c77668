"""Waits for messages that are not a reducer's: of buffers, of models that are compared, in join().

Where another rank has failed, such a message is completed all the same, and the error is raised
after it. Only what cannot be completed ends the wait: the group's failure, which any rank reports.
"""

from __future__ import annotations

import time
from functools import partial

from torch.distributed import ProcessGroup, Work

from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.waiting import wait_work
from gradwire.ddp.group import backend_errors
from gradwire.errors import BrokenGroupError, CollectiveTimeoutError, PeerLostError

__all__ = ["LOST", "wait_for_message"]

LOST = (PeerLostError, CollectiveTimeoutError, BrokenGroupError)
"""After these a group cannot be used; after a mismatch it can."""


def wait_for_message(
    group: ProcessGroup,
    work: Work,
    what: str,
    *,
    on_cpu: bool,
    since: float | None = None,
    from_all: bool = False,
) -> None:
    """Wait for a message; if the group fails, it is broken, and other ranks are told.

    Args:
        group: The group.
        work: The message's handle.
        what: The message, for errors.
        on_cpu: Whether it is on the CPU; if not, the current stream waits.
        since: When it was sent, of `time.monotonic`; None: just now.
        from_all: Whether no rank has the result before all have sent theirs: a rank that has
            ended is lost then. The root of a broadcast may end before others have received.

    Raises:
        PeerLostError, CollectiveTimeoutError: Another rank is gone, or stayed away.
        BrokenGroupError: The group failed before.
    """
    domain = FaultDomain.known(group)
    since = time.monotonic() if since is None else since
    if domain is None:  # nobody would report anything
        with backend_errors(group, what, since):
            work.wait()
        return
    poll = partial(domain.poll_lost, look=from_all)
    try:
        with backend_errors(group, what, since):
            if error := wait_work(work, poll, on_cpu=on_cpu, seconds=domain.seconds):
                raise domain.cause(error)
    except LOST as failure:
        if domain.broken is None:
            domain.give_up(failure, failure.__cause__)
        raise
