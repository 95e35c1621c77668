"""Ranks report errors to each other through the group's store, as their collectives hang.

Keys begin with a random token that rank 0 broadcast to the group, so that neither a copy of the
module on one rank nor keys of an earlier group in the same store can be mistaken for this group's.
After it comes the number of the round: how often the ranks were resynchronized, all of them each
time.
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
from gradwire.ddp.faults.liveness import is_alive, this_process
from gradwire.errors import PeerLostError

__all__ = ["STORE_USE", "ErrorChannel"]

STORE_USE = "ranks report errors to each other"

ANSWER_SECONDS = 1.0
"""A store that takes longer counts as not answering this time; it is asked again."""


class ErrorChannel:
    """What one rank of a group publishes to the others, and reads of theirs.

    Args:
        group: The group.
        token: A name that is this group's alone, the same on every rank.

    Every method that asks the store returns "nothing yet" if it does not answer in time, and raises
    PeerLostError if it is gone.
    """

    def __init__(self, group: ProcessGroup, token: str) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._store = PrefixStore(f"gradwire/{token}", store_of(group, STORE_USE))
        self._round = 0
        self._asking: threading.Thread | None = None
        self._processes: dict[int, str] = {}
        self._ask(self._store.set, f"process/{self._rank}", this_process())

    def report(self) -> bool:
        """Ask all ranks to resynchronize; whether the store took it."""
        return self._ask(self._store.set, self._key("reported"), "") is not _NOTHING

    def error_reported(self) -> bool:
        """Whether any rank has asked to resynchronize in this round."""
        return self._ask(self._store.check, [self._key("reported")]) is True

    def report_lost(self, error: str) -> None:
        """Report to the others that the group itself failed, so that none waits for this rank."""
        text = f"rank {self._rank} saw the group fail: {error}"
        with suppress(PeerLostError):  # the store may be what was lost: then no report is possible
            self._ask(self._store.compare_set, "lost", "", text)

    def lost(self) -> PeerLostError | None:
        """That the group failed, if a rank has reported it."""
        if self._ask(self._store.check, ["lost"]) is not True:
            return None
        text = self._ask(self._store.get, "lost")
        return None if text is _NOTHING else PeerLostError(bytes(text).decode())

    def publish(self, topic: str, value: Any) -> bool:
        """Set this rank's value for a topic of this round; whether the store took it."""
        text = json.dumps(value)
        key = self._key(f"{topic}/{self._rank}")
        return self._ask(self._store.set, key, text) is not _NOTHING

    def published(self, topic: str) -> list[Any] | None:
        """Every rank's value, in rank order, when all are there."""
        keys = [self._key(f"{topic}/{rank}") for rank in range(self._size)]
        if self._ask(self._store.check, keys) is not True:
            return None
        values = self._ask(self._store.multi_get, keys)
        return None if values is _NOTHING else [json.loads(value) for value in values]

    def missing_ranks(self, topic: str) -> list[int]:
        """Ranks whose value is not there, as far as the store says."""
        keys = {rank: self._key(f"{topic}/{rank}") for rank in range(self._size)}
        there = self._ask(lambda: [r for r, key in keys.items() if self._store.check([key])])
        return [] if there is _NOTHING else [rank for rank in keys if rank not in there]

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks whose processes, on this host, have ended."""
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
        """All ranks were resynchronized."""
        self._round += 1

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _ask(self, request: Callable[..., Any], *args: Any) -> Any:
        # In a thread: a request hangs for as long as the process that serves the store is stopped
        # (by SIGSTOP or a debugger). One at a time, or threads would pile up.
        if self._asking is not None and self._asking.is_alive():
            return _NOTHING  # the last request is not answered yet
        answer: list[Any] = []

        def ask() -> None:
            try:
                answer.append(request(*args))
            except BaseException as error:  # raised below, in the thread that asked
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
