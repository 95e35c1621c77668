"""The store through which torch.distributed formed a group: small messages beside collectives."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from gradwire.errors import NotSupportedError

__all__ = ["find_store", "store_of"]


def find_store(group: ProcessGroup) -> Store | None:
    """The group's store; None if it has none: if it was destroyed, for instance."""
    try:
        store: Store | None = dist.distributed_c10d._get_process_group_store(group)
    except KeyError:  # destroyed, or made by hand: unknown to torch.distributed
        return None
    return store


def store_of(group: ProcessGroup, use: str) -> Store:
    """The group's store.

    Args:
        group: The group.
        use: What happens through the store, for the error.

    Raises:
        NotSupportedError: It has none.
    """
    store = find_store(group)
    if store is None:
        raise NotSupportedError(
            f"the group has no store, through which {use}: use a group that torch.distributed "
            "made with one (init_process_group or new_group; not MPI)"
        )
    return store
