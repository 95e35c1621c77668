"""Gradwire: the communication layer of data-parallel PyTorch training.

Here are the names that most training scripts use; the packages have the rest: `gradwire.hooks`,
`gradwire.collectives`, `gradwire.ddp`, `gradwire.devices`, `gradwire.errors` and
`gradwire.recorder` come with it,
`gradwire.compat` and `gradwire.testing` are imported by name.
"""

import torch  # noqa: F401  # first, as it may import parts of gradwire for GRADWIRE_COMPAT=1

from gradwire import _gloo_threads, shm
from gradwire._version import __version__
from gradwire.collectives import all_gather, all_reduce
from gradwire.ddp import DistributedDataParallel
from gradwire.devices import DataParallel
from gradwire.errors import GradwireError
from gradwire.hooks import GradBucket
from gradwire.recorder import timeline

del _gloo_threads  # imported for what it does at exit

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "GradBucket",
    "GradwireError",
    "__version__",
    "all_gather",
    "all_reduce",
    "shm",
    "timeline",
]
