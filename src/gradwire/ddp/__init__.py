"""Data parallelism over processes: DistributedDataParallel, coalesced broadcast, SyncBatchNorm."""

from gradwire.ddp.arguments import WeakHook as WeakHook
from gradwire.ddp.broadcast import broadcast_coalesced
from gradwire.ddp.distributed_data_parallel import DistributedDataParallel
from gradwire.ddp.distributed_data_parallel import load_state as load_state
from gradwire.ddp.distributed_data_parallel import save_state as save_state
from gradwire.ddp.faults.error_channel import broadcast_options as broadcast_options
from gradwire.ddp.faults.error_channel import wait_future as wait_future
from gradwire.ddp.faults.error_channel import wait_work as wait_work
from gradwire.ddp.faults.fault_domain import LOST as LOST
from gradwire.ddp.faults.fault_domain import FaultDomain as FaultDomain
from gradwire.ddp.faults.fault_domain import wait_for_message as wait_for_message
from gradwire.ddp.reducer.reducer import BucketLog, LoggingData
from gradwire.ddp.reducer.reducer import Reducer as Reducer
from gradwire.ddp.sync_batch_norm import SyncBatchNorm
from gradwire.ddp.verify import describe as describe
from gradwire.ddp.verify import verify_same as verify_same

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = [
    "BucketLog",
    "DistributedDataParallel",
    "LoggingData",
    "SyncBatchNorm",
    "broadcast_coalesced",
]
