"""Agreement on which ranks form a group, before they connect.

PyTorch names a group by a counter of each process. If ranks make different groups, one name stands
for several groups, whose keys in the store would be mixed up. So the keys begin with the global
ranks of the group, and each rank publishes under the name alone which group it is forming: a rank
that waits for a member of another group raises instead of waiting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from gradwire.errors import CollectiveTimeoutError, MismatchError, PeerLostError

_POLL = timedelta(seconds=0.5)
_LINGER_S = 4 * _POLL.total_seconds()
_MISMATCH = b"mismatch: "


def identity_of(*parts: object) -> int:
    """Return a number of 64 bits that is the same on all processes for equal parts."""
    digest = sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


class Forming:
    """One rank's part in forming a group, until the ranks are known to form the same one.

    Args:
        store: Store, prefixed with the group's name.
        members: Global ranks of the group, in group order.

    Attributes:
        identity: Number of this group and attempt, equal on all of its ranks.
        store: Store for this group and attempt alone.
    """

    def __init__(self, store: Store, rank: int, members: Sequence[int]) -> None:
        self._named, self._rank, self._members = store, rank, list(members)
        own = PrefixStore(f"ranks {identity_of(self._members)}", store)
        # a store may outlive a group: torchrun's still has the keys of a destroyed one of this name
        time = own.add(f"times/{rank}", 1)
        self.identity = identity_of(self._members, time)
        self.store = self._store_of(self._members, time)
        self._claim = {"members": self._members, "time": time, "forming": True}
        self._publish()

    def __enter__(self) -> Forming:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None and issubclass(kind, MismatchError):
            sleep(_LINGER_S)  # ranks that wait for this one still find its claim
        self._claim["forming"] = False
        with suppress(dist.DistError):  # the store may be gone
            self._publish()

    def all_available(self, available: bool, timeout: timedelta) -> bool:
        """Return True if shm is available on all ranks.

        Args:
            available: True if it is on this one.
            timeout: Timeout for the other ranks.

        Raises:
            MismatchError: Ranks form different groups under one name.
            CollectiveTimeoutError: A rank did not answer in time.
            PeerLostError: The rank that hosts the store is gone.
        """
        self.store.set(f"available/{self._rank}", "yes" if available else "no")
        size = len(self._members)
        try:
            answers = of_ranks(self.store, "available", size, timeout, self._check_members)
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(f"{error}{self._where_others_are()}") from error
        for answer in answers:
            if answer.startswith(_MISMATCH):
                raise MismatchError(answer.removeprefix(_MISMATCH).decode())
        return all(answer == b"yes" for answer in answers)

    def _store_of(self, members: list[int], time: int) -> Store:
        return PrefixStore(f"ranks {identity_of(members)} time {time}", self._named)

    def _publish(self) -> None:
        self._named.set(f"forms/{self._members[self._rank]}", json.dumps(self._claim))

    def _others(self) -> list[tuple[int, dict[str, Any]]]:
        """Return members that have formed, or are forming, another group under this name."""
        keys = [(member, f"forms/{member}") for member in self._members]
        claims = [(m, json.loads(self._named.get(k))) for m, k in keys if self._named.check([k])]
        return [(member, claim) for member, claim in claims if claim["members"] != self._members]

    def _check_members(self) -> None:
        """Raise on all ranks concerned if a member is forming another group."""
        own = self._members[self._rank]
        for member, claim in self._others():
            if not claim["forming"]:
                continue  # perhaps in an earlier life of a store that outlives groups
            theirs = claim["members"]
            text = (
                f"ranks form different groups under one name: rank {own} with ranks "
                f"{self._members}, rank {member} with ranks {theirs}. Call new_group with the same "
                "ranks in the same order on all ranks"
            )
            # for the members of both groups that wait for one of these two
            failed = _MISMATCH.decode() + text
            self.store.set(f"available/{self._members.index(member)}", failed)
            if own in theirs:
                store = self._store_of(theirs, claim["time"])
                store.set(f"available/{theirs.index(own)}", failed)
            raise MismatchError(text)

    def _where_others_are(self) -> str:
        others = [
            f"rank {m} formed one with ranks {claim['members']}" for m, claim in self._others()
        ]
        return f"; under the same name, {', '.join(others)}" if others else ""


def of_ranks(
    store: Store,
    step: str,
    count: int,
    timeout: timedelta | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[bytes]:
    """Return the values that the first `count` ranks set, read in one request.

    Args:
        store: Store used by the group alone.
        step: First part of the keys.
        count: Number of ranks.
        timeout: Timeout for all ranks; at most, and by default, that of the store.
        check: Function called while ranks are missing; its exceptions propagate.

    Raises:
        CollectiveTimeoutError: Ranks set nothing within the timeout.
        PeerLostError: The rank whose process has the store is gone.
    """
    if not count:
        return []
    keys = [f"{step}/{rank}" for rank in range(count)]
    of_store: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
    timeout = of_store if timeout is None else min(timeout, of_store)
    try:
        _wait(store, keys, timeout, check)
        return store.multi_get(keys)
    except dist.DistNetworkError as error:
        raise PeerLostError(
            f"the group's store does not answer (the rank that hosts it is gone): {error}"
        ) from error
    except RuntimeError as error:  # a FileStore's is a plain one
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if isinstance(error, MismatchError) or not missing:
            raise
        raise CollectiveTimeoutError(
            f"ranks {missing} did not join the group within {timeout.total_seconds():g} s"
        ) from error


def _wait(store: Store, keys: list[str], timeout: timedelta, check: Callable[[], None]) -> None:
    """Wait for keys up to a timeout, and call `check` every half second."""
    deadline = monotonic() + timeout.total_seconds()
    while True:
        left = timedelta(seconds=deadline - monotonic())
        try:
            store.wait(keys, min(_POLL, left))
            return
        except dist.DistNetworkError:
            raise
        except RuntimeError:
            if left < _POLL:
                raise
        check()
