"""Values of all ranks, through a store and with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError

__all__ = ["values_of_ranks"]


def values_of_ranks(
    store: Store,
    key: str,
    count: int,
    doing: str,
    *,
    timeout: timedelta | None = None,
    check: Callable[[], None] = lambda: None,
    poll: timedelta = timedelta(seconds=0.5),
) -> list[bytes]:
    """Return what the first `count` ranks set as "key/rank", read in one request.

    Args:
        store: Store used by the group alone.
        key: First part of the keys.
        count: Number of ranks.
        doing: Verb phrase for the message about ranks that set nothing ("join the group").
        timeout: Timeout for all ranks; at most, and by default, that of the store.
        check: Function called while ranks are missing; its exceptions propagate.
        poll: Interval between two calls of `check`.

    Raises:
        CollectiveTimeoutError: Ranks set nothing within the timeout.
        PeerLostError: The rank whose process has the store is gone.
    """
    if not count:
        return []
    keys = [f"{key}/{rank}" for rank in range(count)]
    of_store: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
    timeout = of_store if timeout is None else min(timeout, of_store)
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        pause = 1e-4
        while pause < 1e-2 and not store.check(keys):  # a FileStore's wait looks every 10 ms only
            time.sleep(pause)
            pause *= 2
        while True:
            left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
            try:
                store.wait(keys, min(poll, left))
                return store.multi_get(keys)
            except dist.DistNetworkError:
                raise
            except RuntimeError:
                if left < poll:
                    raise
            check()
    except dist.DistNetworkError as error:
        raise PeerLostError(
            f"the group's store does not answer (the rank that hosts it is gone): {error}"
        ) from error
    except RuntimeError as error:  # a FileStore's is a plain one
        missing = [rank for rank in range(count) if not store.check([keys[rank]])]
        if isinstance(error, DistributedError) or not missing:
            raise
        raise CollectiveTimeoutError(
            f"ranks {missing} did not {doing} within {timeout.total_seconds():g} s"
        ) from error
