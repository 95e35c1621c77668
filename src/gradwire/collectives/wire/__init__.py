"""Collectives on plain tensors, without gradients: the only package that calls torch.distributed.

Only the first dim is split or concatenated. Every function starts its collective and returns a
`Pending`, whose `wait` returns a new, contiguous result. Backends differ in their capabilities
(`backends.Backend`); a missing one is composed of other collectives.
"""

from gradwire.collectives.wire.backends import (
    Pending,
    backend_of,
    contiguous_copy,
    dense,
    device_of,
    done,
    empty_rows,
    in_bytes,
    placeholder,
    without_tangent,
    zeros_like,
)
from gradwire.collectives.wire.movement import (
    all_gather,
    all_gather_list,
    all_to_all,
    barrier,
    broadcast,
    exchange_ints,
    gather,
    gather_ints,
    receive,
    scatter,
    send,
)
from gradwire.collectives.wire.reductions import (
    all_reduce,
    check_computable,
    reduce,
    reduce_locally,
    reduce_scatter,
    split_sizes,
    wider,
)

__all__ = [
    "Pending",
    "all_gather",
    "all_gather_list",
    "all_reduce",
    "all_to_all",
    "backend_of",
    "barrier",
    "broadcast",
    "check_computable",
    "contiguous_copy",
    "dense",
    "device_of",
    "done",
    "empty_rows",
    "exchange_ints",
    "gather",
    "gather_ints",
    "in_bytes",
    "placeholder",
    "receive",
    "reduce",
    "reduce_locally",
    "reduce_scatter",
    "scatter",
    "send",
    "split_sizes",
    "wider",
    "without_tangent",
    "zeros_like",
]
