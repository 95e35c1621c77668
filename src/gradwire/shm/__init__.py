"""Process-group backend: shared memory within a host, an engine such as Gloo between hosts."""

from gradwire._torch import warn_if_untested
from gradwire.shm.hierarchy.engine import Options
from gradwire.shm.hierarchy.mpi import mpi_engine
from gradwire.shm.register import empty, is_available, register, shares_memory, teams

__all__ = ["Options", "empty", "is_available", "mpi_engine", "register", "shares_memory", "teams"]

warn_if_untested()
register()
