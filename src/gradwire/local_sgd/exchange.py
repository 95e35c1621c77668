"""One bucket through a hook, waited for; a backend's error becomes gradwire's."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from torch import Tensor

from gradwire._engine_errors import backend_failure, is_over, is_transport
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.other_messages import LOST
from gradwire.ddp.faults.waiting import wait_future
from gradwire.errors import DistributedError, HookError
from gradwire.hooks import GradBucket, StatefulHook, as_future, hook_name, parse_hook_result

__all__ = ["reduce_bucket"]


def reduce_bucket(hook: StatefulHook[Any], bucket: GradBucket, domain: FaultDomain) -> Tensor:
    """What the hook makes of a bucket.

    Args:
        hook: The hook.
        bucket: The bucket.
        domain: The group's, by which ranks tell each other that the group has failed.

    Raises:
        PeerLostError, CollectiveTimeoutError: Another rank is gone, or stayed away.
        HookError: The hook failed in another way.
        BrokenGroupError: The group failed before.
    """
    if domain.broken is not None:
        domain.raise_deferred()
    since, poll = time.monotonic(), partial(domain.poll_lost, look=True)
    try:
        future = as_future(hook.run_hook(bucket), hook)
        if late := wait_future(future, poll, domain.seconds):
            raise late
        return parse_hook_result(future.wait(), bucket, hook)
    except DistributedError as error:
        if domain.broken is None and isinstance(error, LOST):
            domain.give_up(error, error.__cause__)
        raise
    except Exception as error:
        what = f"hook {hook_name(hook)}, bucket {bucket.index()}"
        if not is_transport(error):
            raise HookError(f"{what}: {type(error).__name__}: {error}") from error
        timed_out = is_over(since, domain.seconds)
        domain.give_up(backend_failure(error, what, timed_out=timed_out), error)
