"""A process-group backend for the ranks of one host, in shared memory."""

from gradwire._torch import warn_if_untested
from gradwire.shm.persistent import PersistentAllReduce, all_reduce_init
from gradwire.shm.register import empty, is_available, register, shares_memory

__all__ = [
    "PersistentAllReduce",
    "all_reduce_init",
    "empty",
    "is_available",
    "register",
    "shares_memory",
]

warn_if_untested()
register()
