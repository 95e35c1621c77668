"""Waits for messages outside reducers: buffers, comparisons of models, and join().

If another rank has failed, such a message is completed first, and the error is raised after it.
Only a failure of the group itself, reported by any rank, ends the wait early.
"""

from __future__ import annotations

import time
from functools import partial

from torch.distributed import ProcessGroup, Work

from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.waiting import wait_future, wait_work
from gradwire.ddp.group import backend_errors
from gradwire.errors import BrokenGroupError, CollectiveTimeoutError, PeerLostError

LOST = (PeerLostError, CollectiveTimeoutError, BrokenGroupError)
"""Errors after which a group cannot be used again. After a mismatch it can."""


def wait_for_message(
    group: ProcessGroup,
    work: Work,
    what: str,
    *,
    on_cpu: bool,
    since: float | None = None,
    from_all: bool = False,
) -> None:
    """Wait for a message; if the group fails, mark it as broken and report that to other ranks.

    Args:
        group: Process group.
        work: Handle of the message.
        what: Description of the message for errors.
        on_cpu: True if the message is on the CPU. Otherwise the current stream waits.
        since: Time of `time.monotonic` at which the message was sent; None for now.
        from_all: True if the message needs data from all ranks, so that a rank that has ended
            is lost. The root of a broadcast may end before other ranks have received.

    Raises:
        PeerLostError, CollectiveTimeoutError: Another rank is gone or did not take part in time.
        BrokenGroupError: The group failed before.
    """
    domain = FaultDomain.known(group)
    since = time.monotonic() if since is None else since
    if domain is None:  # no reducer on this group: there are no error reports
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


def wait_for_hook(group: ProcessGroup) -> None:
    """Wait for the communication hook that may still send messages in the group from callbacks.

    Messages sent after this call follow the hook's on all ranks.

    Raises:
        PeerLostError, CollectiveTimeoutError: Another rank has ended, or did not take part in time.
        BrokenGroupError: The group failed before.
    """
    domain = FaultDomain.known(group)
    if domain is None or domain.hook_future is None:
        return
    poll = partial(domain.poll_lost, look=True)
    if late := wait_future(domain.hook_future, poll, domain.seconds):
        domain.give_up(domain.translate(late, "a communication hook"), late)
