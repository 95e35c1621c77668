"""The only place that calls torch.distributed: each collective on plain tensors, without gradients.

Tensors arrive with the dim that is cut or joined in front. Every function starts its collective
and returns a `Pending`, whose `wait` gives a fresh, contiguous result. Engines differ in what they
can do; what one lacks is put together here from what it has.
"""

from gradwire.collectives.wire.movement import (
    all_gather,
    all_gather_list,
    all_to_all,
    barrier,
    broadcast,
    gather,
    receive,
    scatter,
    send,
)
from gradwire.collectives.wire.pending import Pending, done
from gradwire.collectives.wire.reductions import all_reduce, reduce, reduce_locally, reduce_scatter

__all__ = [
    "Pending",
    "all_gather",
    "all_gather_list",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "done",
    "gather",
    "receive",
    "reduce",
    "reduce_locally",
    "reduce_scatter",
    "scatter",
    "send",
]
