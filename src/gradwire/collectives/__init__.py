"""Every collective of torch.distributed as a differentiable function with its true adjoint."""

from gradwire.collectives.arguments import check_dense as check_dense
from gradwire.collectives.autograd import unstack as unstack
from gradwire.collectives.consistency import checks
from gradwire.collectives.handles import Handle
from gradwire.collectives.ops.all_gather_reduce_scatter import (
    all_gather,
    all_gather_list,
    reduce_scatter,
)
from gradwire.collectives.ops.all_reduce import all_reduce, invariant, vary
from gradwire.collectives.ops.all_to_all import all_to_all
from gradwire.collectives.ops.broadcast_reduce import broadcast, reduce
from gradwire.collectives.ops.coalesced import (
    all_gather_coalesced,
    all_gather_object,
    all_reduce_coalesced,
    reduce_scatter_coalesced,
)
from gradwire.collectives.ops.gather_scatter import gather, scatter
from gradwire.collectives.ops.permute import halo_exchange, ppermute, shift
from gradwire.collectives.ops.point_to_point import barrier, recv, send, send_recv, tie
from gradwire.collectives.wire import backend_of as backend_of

# Names imported as themselves are for other packages of gradwire, and not public.
__all__ = [
    "Handle",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_list",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "barrier",
    "broadcast",
    "checks",
    "gather",
    "halo_exchange",
    "invariant",
    "ppermute",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "scatter",
    "send",
    "send_recv",
    "shift",
    "tie",
    "vary",
]
