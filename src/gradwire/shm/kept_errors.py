"""Errors that a group keeps, to say later why it failed.

An exception that has been raised has a traceback, with the frames of all that it passed, and so all
that their callers have: models, batches, the group itself. A group that kept one would keep them as
long as it lives, and, as PyTorch's C++ has the group, for ever: no garbage collector sees such a
cycle. So what is kept is a copy, which is never raised itself.
"""

from __future__ import annotations

import copy

from gradwire.errors import DistributedError

__all__ = ["without_frames"]


def without_frames(error: BaseException) -> BaseException:
    """An error that says the same, with the causes of this one, and has not been raised.

    Args:
        error: Of any type. One of the caller's, as a signal's handler raises, may have a
            constructor by which it cannot be copied: it becomes a DistributedError that names it.
    """
    try:
        kept: BaseException = copy.copy(error)
    except Exception:
        kept = DistributedError(f"{type(error).__name__}: {error}")
    if error.__cause__ is not None:
        kept.__cause__ = without_frames(error.__cause__)
    return kept
