"""Every collective of torch.distributed as a differentiable function with its true adjoint."""

from gradwire.collectives.agreement import checks
from gradwire.collectives.all_gather_list import all_gather_list
from gradwire.collectives.all_gather_reduce_scatter import (
    all_gather,
    reduce_scatter,
)
from gradwire.collectives.all_reduce import (
    all_reduce,
    invariant,
    vary,
)
from gradwire.collectives.all_to_all import all_to_all
from gradwire.collectives.broadcast_reduce import (
    broadcast,
    reduce,
)
from gradwire.collectives.coalesced import (
    all_gather_coalesced,
    all_reduce_coalesced,
    broadcast_coalesced,
    reduce_coalesced,
    reduce_scatter_coalesced,
)
from gradwire.collectives.gather_scatter import (
    gather,
    scatter,
)
from gradwire.collectives.halo import halo_exchange
from gradwire.collectives.handles import Handle
from gradwire.collectives.objects import (
    all_gather_object,
    barrier,
)
from gradwire.collectives.permute import ppermute, shift
from gradwire.collectives.point_to_point import (
    join,
    recv,
    send,
    send_recv,
)
from gradwire.collectives.prefix import (
    exscan,
    scan,
)
from gradwire.collectives.reductions import Premul
from gradwire.collectives.statistics import (
    logsumexp,
    mean,
    norm,
    softmax,
    var,
)

__all__ = [
    "Handle",
    "Premul",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_list",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "checks",
    "exscan",
    "gather",
    "halo_exchange",
    "invariant",
    "join",
    "logsumexp",
    "mean",
    "norm",
    "ppermute",
    "recv",
    "reduce",
    "reduce_coalesced",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "scan",
    "scatter",
    "send",
    "send_recv",
    "shift",
    "softmax",
    "var",
    "vary",
]
