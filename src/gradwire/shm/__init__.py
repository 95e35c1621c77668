"""A process-group backend for the ranks of one host, in shared memory."""

from gradwire.shm.register import empty, is_available, register, shares_memory

__all__ = ["empty", "is_available", "register", "shares_memory"]

register()
