"""torch.distributed's face of a team: its methods, options, handles and names.

C++ callers (DistributedDataParallel's reducer, functional collectives) and Python callers reach
different methods for the same thing, and older versions of torch have other names for some, so
that several names stand for one method here.
"""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="assignment"

from __future__ import annotations

from gradwire.shm.movement import Movement
from gradwire.shm.point_to_point import PointToPoint
from gradwire.shm.reductions import Reductions

__all__ = ["ShmProcessGroup"]


class ShmProcessGroup(Reductions, Movement, PointToPoint):
    """The ranks of one host, over shared memory."""

    # the names of torch before 2.13
    _allgather_base = Movement.all_gather_single
    allgather_into_tensor_coalesced = Movement.all_gather_single_coalesced
    _reduce_scatter_base = Reductions.reduce_scatter_single
    reduce_scatter_tensor_coalesced = Reductions.reduce_scatter_single_coalesced
    alltoall_base = Movement.all_to_all_single
