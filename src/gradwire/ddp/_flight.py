"""What a backward has under way: buckets that were launched, and the ledger of what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from gradwire.ddp._alarm import Pending, pending_future, pending_work
from gradwire.ddp._bucket import Bucket
from gradwire.ddp._ledger import Ledger
from gradwire.gradients import GradBucket
from gradwire.hooks.sparse import SparseSum

__all__ = ["Flight", "Launched"]


@dataclass
class Launched:
    """A bucket under way; neither works nor a future where nothing needs to be sent."""

    bucket: Bucket
    works: Sequence[Work] = ()
    future: torch._C.Future[Any] | None = None
    seen: GradBucket | None = None
    sparse: SparseSum | None = None


class Flight:
    """One backward's communication.

    Attributes:
        step: The number of the backward, the same on every rank.
        launched: Buckets, in the order of their launch.
        extra: Messages besides the buckets'.
        ledger: The collectives that were sent.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.step = 0
        self.launched: list[Launched] = []
        self.extra: list[Work] = []
        self.ledger = Ledger(group)

    @property
    def sent(self) -> int:
        """How many buckets had anything to send."""
        return sum(1 for b in self.launched if b.works or b.future is not None)

    def pending(self) -> list[Pending]:
        """All that may still be under way."""
        works = [w for launched in self.launched for w in launched.works]
        futures = [launched.future for launched in self.launched if launched.future is not None]
        return [pending_work(w) for w in [*works, *self.extra]] + [
            pending_future(f) for f in futures
        ]

    def clear(self) -> None:
        """All that was sent has been completed, or given up."""
        self.launched.clear()
        self.extra.clear()
        self.ledger.clear()
