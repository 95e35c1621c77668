"""Data parallelism over processes: DistributedDataParallel, the reducer, coalesced broadcast."""

from gradwire.ddp.broadcast import broadcast_coalesced
from gradwire.ddp.distributed_data_parallel import DistributedDataParallel
from gradwire.ddp.options import ReducerOptions
from gradwire.ddp.precision import MixedPrecision
from gradwire.ddp.reducer.log import BucketLog, LoggingData
from gradwire.ddp.reducer.reducer import Reducer
from gradwire.ddp.sync_batch_norm import SyncBatchNorm

__all__ = [
    "BucketLog",
    "DistributedDataParallel",
    "LoggingData",
    "MixedPrecision",
    "Reducer",
    "ReducerOptions",
    "SyncBatchNorm",
    "broadcast_coalesced",
]
