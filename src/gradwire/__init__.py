"""Gradwire: the communication layer of data-parallel PyTorch training."""

from gradwire import shm
from gradwire._version import __version__
from gradwire.collectives import (
    all_gather,
    all_gather_list,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    invariant,
    ppermute,
    reduce,
    reduce_scatter,
    scatter,
    shift,
    vary,
)
from gradwire.ddp import DistributedDataParallel
from gradwire.devices import DataParallel
from gradwire.errors import GradwireError
from gradwire.gradients import GradBucket

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "GradBucket",
    "GradwireError",
    "__version__",
    "all_gather",
    "all_gather_list",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "invariant",
    "ppermute",
    "reduce",
    "reduce_scatter",
    "scatter",
    "shift",
    "shm",
    "vary",
]
