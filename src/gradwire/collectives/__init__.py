"""Every collective of torch.distributed as a differentiable function with its true adjoint."""

from gradwire.collectives.agreement import checks
from gradwire.collectives.all_gather_reduce_scatter import (
    all_gather,
    all_gather_list,
    reduce_scatter,
)
from gradwire.collectives.all_reduce import all_reduce, invariant, vary
from gradwire.collectives.all_to_all import all_to_all, ppermute, shift
from gradwire.collectives.broadcast_reduce import broadcast, reduce
from gradwire.collectives.gather_scatter import gather, scatter
from gradwire.collectives.handles import Handle
from gradwire.collectives.objects import all_gather_object, barrier
from gradwire.collectives.reductions import Premul

__all__ = [
    "Handle",
    "Premul",
    "all_gather",
    "all_gather_list",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "checks",
    "gather",
    "invariant",
    "ppermute",
    "reduce",
    "reduce_scatter",
    "scatter",
    "shift",
    "vary",
]
