"""Data parallelism over processes: coalesced broadcast, the reducer, DistributedDataParallel."""

from gradwire.ddp._log import BucketLog, LoggingData
from gradwire.ddp._precision import MixedPrecision
from gradwire.ddp.broadcast import broadcast_coalesced
from gradwire.ddp.module import DistributedDataParallel
from gradwire.ddp.reducer import Reducer

__all__ = [
    "BucketLog",
    "DistributedDataParallel",
    "LoggingData",
    "MixedPrecision",
    "Reducer",
    "broadcast_coalesced",
]
