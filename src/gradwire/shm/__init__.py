"""A process-group backend for the ranks of one host, in shared memory."""

from gradwire._torch import warn_if_untested
from gradwire.shm.register import empty, is_available, register, shares_memory

__all__ = ["empty", "is_available", "register", "shares_memory"]

warn_if_untested()
register()
