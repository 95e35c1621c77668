"""Data parallelism over processes: coalesced broadcast, the reducer, DistributedDataParallel."""

from gradwire.ddp.broadcast import broadcast_coalesced
from gradwire.ddp.module import DistributedDataParallel
from gradwire.ddp.reducer import Reducer

__all__ = ["DistributedDataParallel", "Reducer", "broadcast_coalesced"]
