"""Every collective of torch.distributed as a differentiable function with its true adjoint."""

from gradwire.collectives.all_to_all_permute import all_to_all, halo_exchange, ppermute, shift
from gradwire.collectives.coalesced import (
    all_gather_coalesced,
    all_gather_object,
    all_reduce_coalesced,
    reduce_scatter_coalesced,
)
from gradwire.collectives.consistency import checks
from gradwire.collectives.operation import Handle
from gradwire.collectives.operation import unstack as unstack
from gradwire.collectives.send_receive import barrier, recv, send, send_recv, tie
from gradwire.collectives.validation import check_dense as check_dense
from gradwire.collectives.with_root import broadcast, gather, reduce, scatter
from gradwire.collectives.without_root import (
    all_gather,
    all_gather_list,
    all_reduce,
    invariant,
    reduce_scatter,
    vary,
)

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
