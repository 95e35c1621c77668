"""Process-group backend: shared memory within a host, an engine such as Gloo between hosts."""

from gradwire._torch import warn_if_untested
from gradwire.shm.engine import Options
from gradwire.shm.engine import cut_gloo as cut_gloo
from gradwire.shm.engine import in_time as in_time
from gradwire.shm.operations import Operations as Operations
from gradwire.shm.register import ShmProcessGroup as ShmProcessGroup
from gradwire.shm.register import empty, is_available, register, shares_memory, teams
from gradwire.shm.register import join as join
from gradwire.shm.register import shm_backend_of as shm_backend_of
from gradwire.shm.rendezvous import connect_all as connect_all
from gradwire.shm.work import ShmWork as ShmWork

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = ["Options", "empty", "is_available", "register", "shares_memory", "teams"]

warn_if_untested()
register()
