"""Communication between the devices of one process: six ops, and DataParallel, which uses them."""

from gradwire._containers import register_container
from gradwire.devices.broadcast_reduce import (
    broadcast,
    broadcast_coalesced,
    reduce_add,
    reduce_add_coalesced,
)
from gradwire.devices.copying import HOST as HOST
from gradwire.devices.data_parallel import (
    DataParallel,
    data_parallel,
    parallel_apply,
    replicate,
)
from gradwire.devices.placement import Device as Device
from gradwire.devices.placement import default_devices as default_devices
from gradwire.devices.scatter_gather import (
    gather,
    gather_nested,
    scatter,
    scatter_kwargs,
    scatter_nested,
)

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = [
    "DataParallel",
    "broadcast",
    "broadcast_coalesced",
    "data_parallel",
    "gather",
    "gather_nested",
    "parallel_apply",
    "reduce_add",
    "reduce_add_coalesced",
    "register_container",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "scatter_nested",
]
