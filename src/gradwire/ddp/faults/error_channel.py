"""Error reports between ranks through the group's store, for when collectives hang.

Keys begin with a random name that rank 0 broadcasts to the group. They therefore differ from those
of a copy of the module on one rank, and of an earlier group in the same store. The name is followed
by the number of times that the ranks have been resynchronized.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup

from gradwire._groups import store_of
from gradwire._processes import is_alive, this_process
from gradwire.errors import PeerLostError

STORE_USE = "ranks report errors to each other"

ANSWER_SECONDS = 1.0
"""Time after which a request to the store counts as unanswered. It is repeated later."""


class ErrorChannel:
    """Values that the ranks of a group publish to each other.

    Args:
        group: Process group.
        token: Unique name of the group, the same on every rank.

    If the store does not answer in time, methods return as if no value were published. If it is
    gone, they raise PeerLostError.
    """

    def __init__(self, group: ProcessGroup, token: str) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._store = PrefixStore(f"gradwire/{token}", store_of(group, STORE_USE))
        self._round = 0
        self._asking: threading.Thread | None = None
        self._processes: dict[int, str] = {}
        self._ask(self._store.set, f"process/{self._rank}", this_process())

    def report(self) -> bool:
        """Ask all ranks to resynchronize; return True if the store accepted the request."""
        return self._ask(self._store.set, self._key("reported"), "") is not _NOTHING

    def error_reported(self) -> bool:
        """Return True if a rank has asked to resynchronize in this round."""
        return self._ask(self._store.check, [self._key("reported")]) is True

    def report_broken(self, error: str) -> None:
        """Report that the group itself failed, so that no rank waits for this one."""
        text = f"rank {self._rank} saw the group fail: {error}"
        with suppress(PeerLostError):  # no report is possible if the store is gone
            self._ask(self._store.compare_set, "lost", "", text)

    def broken(self) -> PeerLostError | None:
        """Return the failure of the group that a rank has reported, or None."""
        if self._ask(self._store.check, ["lost"]) is not True:
            return None
        text = self._ask(self._store.get, "lost")
        return None if text is _NOTHING else PeerLostError(bytes(text).decode())

    def publish(self, topic: str, value: Any) -> bool:
        """Set this rank's value for a topic of this round; return True if the store accepted it."""
        text = json.dumps(value)
        key = self._key(f"{topic}/{self._rank}")
        return self._ask(self._store.set, key, text) is not _NOTHING

    def published(self, topic: str) -> list[Any] | None:
        """Return every rank's value in rank order, or None until all are published."""
        keys = [self._key(f"{topic}/{rank}") for rank in range(self._size)]
        if self._ask(self._store.check, keys) is not True:
            return None
        values = self._ask(self._store.multi_get, keys)
        return None if values is _NOTHING else [json.loads(value) for value in values]

    def missing_ranks(self, topic: str) -> list[int]:
        """Return the ranks that have not published a value; empty if the store does not answer."""
        keys = {rank: self._key(f"{topic}/{rank}") for rank in range(self._size)}
        there = self._ask(lambda: [r for r, key in keys.items() if self._store.check([key])])
        return [] if there is _NOTHING else [rank for rank in keys if rank not in there]

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose processes ran on this host and have ended."""
        known = {rank: self._process(rank) for rank in ranks}
        return [rank for rank, process in known.items() if process and not is_alive(process)]

    def _process(self, rank: int) -> str | None:
        key = f"process/{rank}"
        if rank not in self._processes and self._ask(self._store.check, [key]) is True:
            process = self._ask(self._store.get, key)
            if process is not _NOTHING:
                self._processes[rank] = bytes(process).decode()
        return self._processes.get(rank)

    def next_round(self) -> None:
        """Begin the next round after all ranks were resynchronized."""
        self._round += 1

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _ask(self, request: Callable[..., Any], *args: Any) -> Any:
        # In a thread: a request hangs while the process that serves the store is stopped by SIGSTOP
        # or a debugger. One request at a time, so that threads do not accumulate.
        if self._asking is not None and self._asking.is_alive():
            return _NOTHING  # the previous request is still unanswered
        answer: list[Any] = []

        def ask() -> None:
            try:
                answer.append(request(*args))
            except BaseException as error:  # raised below, in the calling thread
                answer.append(error)

        self._asking = threading.Thread(target=ask, name="gradwire-store", daemon=True)
        self._asking.start()
        self._asking.join(ANSWER_SECONDS)
        if not answer:
            return _NOTHING
        if isinstance(answer[0], dist.DistError):
            raise PeerLostError(
                f"the group's store does not answer (the rank that hosts it is gone): {answer[0]}"
            ) from answer[0]
        if isinstance(answer[0], BaseException):
            raise answer[0]
        return answer[0]


_NOTHING = object()
