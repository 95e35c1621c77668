"""Data parallelism over processes: coalesced broadcast, the reducer, DistributedDataParallel."""

from gradwire.ddp.broadcast import broadcast_coalesced

__all__ = ["broadcast_coalesced"]
