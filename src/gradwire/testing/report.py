"""Values that the ranks of a check gather, and the result of the check, the same on all ranks.

Values and errors travel through the group's store: the function under test uses the group's
collectives, and may use them wrongly, so that one of the check could be matched with one of the
function.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed import PrefixStore, ProcessGroup

from gradwire._groups import check_group, default_group, store_of
from gradwire.errors import CollectiveTimeoutError, DistributedError, MismatchError, PeerFailedError

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
        """Return every rank's value, in rank order; values are converted to JSON and back.

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


MAX_LINES = 8


class GradientError(DistributedError, AssertionError):
    """A derivative is wrong: the message names the rank, the input's entry, and both values.

    Every rank of the check raises it, with the same message.
    """


def check_same_options(store: StoreGather, fields: Mapping[str, Any]) -> None:
    """Raise on every rank unless all called the check with the same options."""
    gathered = store.all_gather(dict(fields))
    for name in sorted({name for options in gathered for name in options}):
        values = [options.get(name) for options in gathered]
        if any(value != values[0] for value in values):
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise MismatchError(f"{name} differs by rank ({each}): give the same on every rank")


def line(where: object, have: tuple[str, float], want: tuple[str, float]) -> str:
    """Return a line of the message: an entry, and both values of its derivative."""
    return f"{where}: {have[0]} {have[1]:.9g}, {want[0]} {want[1]:.9g}"


def raise_if_wrong(what: str, wrong: Sequence[str], count: int) -> None:
    """Raise `GradientError` if any entries differ, with the lines of the first few."""
    if not wrong:
        return
    shown = [f"  {text}" for text in wrong[:MAX_LINES]]
    if len(wrong) > MAX_LINES:
        shown.append(f"  … and {len(wrong) - MAX_LINES} more")
    head = f"{what}: {len(wrong)} of {count} entries differ"
    raise GradientError("\n".join([head, *shown]))
