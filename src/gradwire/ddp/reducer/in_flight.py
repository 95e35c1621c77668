"""What a backward has in flight: the buckets that were launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import Work

from gradwire.ddp.buckets.bucket import Bucket
from gradwire.ddp.faults.waiting import Pending, pending_future, pending_work
from gradwire.hooks import GradBucket
from gradwire.hooks.sparse import SparseSum

__all__ = ["InFlight", "Launched"]


@dataclass
class Launched:
    """A bucket in flight; neither works nor a future where nothing needs to be sent."""

    bucket: Bucket
    works: Sequence[Work] = ()
    future: torch._C.Future[Any] | None = None
    seen: GradBucket | None = None
    sparse: SparseSum | None = None


class InFlight:
    """One backward's communication.

    Attributes:
        step: The number of the backward on this rank.
        launched: Buckets, in the order of their launch.
    """

    def __init__(self) -> None:
        self.step = 0
        self.launched: list[Launched] = []

    @property
    def sent(self) -> int:
        """How many buckets had anything to send."""
        return sum(1 for b in self.launched if b.works or b.future is not None)

    def pending(self) -> list[Pending]:
        """All that may still be in flight."""
        works = [w for launched in self.launched for w in launched.works]
        futures = [launched.future for launched in self.launched if launched.future is not None]
        return [*map(pending_work, works), *map(pending_future, futures)]

    def clear(self) -> None:
        """All that was sent has been completed, or given up."""
        self.launched.clear()
