"""all_gather of a check's own values and errors, through the group's store.

The function under test uses the group's collectives, and may use them wrongly: a collective of the
check could be matched with one of the function's.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import PrefixStore, ProcessGroup

from gradwire._groups import check_group, default_group, store_of
from gradwire.errors import (
    CollectiveTimeoutError,
    PeerFailedError,
)

__all__ = ["StoreGather"]

MAX_POLL_SECONDS = 5e-3


class StoreGather:
    """The gathers of one check; every rank of the group makes them in the same order."""

    def __init__(self, group: ProcessGroup | None) -> None:
        group = default_group("group") if group is None else check_group(group)
        store = store_of(group, "the check gathers")
        self.rank = group.rank()
        self.size = group.size()
        number = store.add(f"gradwire/checks/{self.rank}", 1)
        self._timeout = store.timeout.total_seconds()  # type: ignore[attr-defined]
        self._store = PrefixStore(f"gradwire/check{number}", store)
        self._gathers = 0

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Report an error in the block to the other ranks, so that none waits for this one."""
        try:
            yield
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._store.set(f"failed/{self.rank}", text)
            raise

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; values are converted to JSON and back.

        Raises:
            PeerFailedError: Another rank's `guarded` block raised.
            CollectiveTimeoutError: A rank did not call it within the store's timeout.
        """
        keys = [f"{self._gathers}/{rank}" for rank in range(self.size)]
        self._gathers += 1
        self._store.set(keys[self.rank], json.dumps(value))
        deadline = time.monotonic() + self._timeout
        pause = 1e-4
        while not self._store.check(keys):
            self._raise_failures()
            if time.monotonic() > deadline:
                absent = [r for r, key in enumerate(keys) if not self._store.check([key])]
                raise CollectiveTimeoutError(
                    f"ranks {absent} of the group did not finish the check within "
                    f"{self._timeout:g} s: call it on every rank of the group"
                )
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
        return [json.loads(self._store.get(key)) for key in keys]

    def _raise_failures(self) -> None:
        keys = {rank: f"failed/{rank}" for rank in range(self.size)}
        failures = [
            f"rank {rank}: {self._store.get(key).decode()}"
            for rank, key in keys.items()
            if self._store.check([key])
        ]
        if failures:
            raise PeerFailedError(
                f"the check ended because it raised elsewhere, on {'; '.join(failures)}"
            )
