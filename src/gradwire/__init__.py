"""Gradwire: the communication layer of data-parallel PyTorch training."""

from gradwire import shm
from gradwire._version import __version__
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
    "shm",
]
