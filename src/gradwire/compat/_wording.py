"""Errors as programs that were written for PyTorch's class expect them.

Frameworks and scripts tell PyTorch's errors apart by class, and some by a phrase in their text. So
our messages, which name parameters and remedies, are followed by the phrases that are looked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from gradwire.errors import ArgumentError, ReductionError

__all__ = ["ConstructionError", "refused", "unfinished"]

UNFINISHED = "Expected to have finished reduction in the prior iteration"
REMEDIES = (
    "passing the keyword argument `find_unused_parameters=True`",
    "making sure all `forward` function outputs participate in calculating loss",
)
DEBUG = "set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
INDICES = "Parameter indices which did not receive grad for rank"
NAMES = "Parameters which did not receive grad for rank"


class ConstructionError(ArgumentError, RuntimeError):
    """An argument cannot be used; a RuntimeError too, as which PyTorch raises it."""


def refused(error: ArgumentError, group: object, mesh: object) -> ConstructionError:
    """The error of a constructor that cannot use its arguments."""
    words = ""
    if mesh is not None:
        words = "Only 1D device mesh is supported, but got another"
        if group is not None:
            words = "Cannot specify both process_group and device_mesh arguments."
    return ConstructionError(f"{error} (PyTorch's words: {words})" if words else str(error))


def unfinished(error: ReductionError, rank: int, names: Sequence[str]) -> ReductionError:
    """The error of a backward that left parameters out, with what PyTorch says of it.

    Args:
        error: Ours; its `parameters` got no gradient.
        rank: In the group.
        names: All parameters, in the order in which PyTorch counts them.
    """
    if not error.parameters:
        return error
    indices = " ".join(str(names.index(name)) for name in error.parameters)
    told = f"{NAMES} {rank}: {', '.join(error.parameters)}"
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        told = f"for their names here, {DEBUG}"
    words = f"{UNFINISHED}; {'; '.join(REMEDIES)}. {told}. {INDICES} {rank}: {indices}"
    return ReductionError(f"{error}\n(PyTorch's words: {words})", error.parameters)
