"""Errors that a group keeps, to say later why it failed.

An exception that has been raised has a traceback, with the frames of all that it passed, and so all
that their callers have: models, batches, the group itself. A group that kept one would keep them as
long as it lives, and, as PyTorch's C++ has the group, for ever: no garbage collector sees such a
cycle. So what is kept is a copy, which is never raised itself.
"""

from __future__ import annotations

import copy
from contextlib import suppress

from gradwire.errors import DistributedError

__all__ = ["without_frames"]


def without_frames(error: BaseException) -> BaseException:
    """An error that says the same, with the causes of this one, and has not been raised.

    Args:
        error: Of any type. One of the caller's, as a signal's handler raises, may be such that it
            cannot be copied: it becomes a DistributedError that names it.
    """
    kept = copied = _copy(error)
    seen = {id(error)}  # an error may be raised from one that was raised from it
    while (cause := error.__cause__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        copied.__cause__ = _copy(cause)
        error, copied = cause, copied.__cause__
    return kept


def _copy(error: BaseException) -> BaseException:
    kind = type(error)
    with suppress(Exception):
        kept = copy.copy(error)
        if kept is not error and type(kept) is kind and kept.args == error.args:
            return _with_own_notes(kept)
    # copies are made by constructors, and one may take other arguments than its base's, or put a
    # message around them: it is left out
    base = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    try:
        kept = kind.__new__(kind, *error.args)
        base.__init__(kept, *error.args)  # type: ignore[misc]
        vars(kept).update(vars(error))
    except Exception:
        return DistributedError(f"{kind.__name__}: {error}")
    return _with_own_notes(kept)


def _with_own_notes(kept: BaseException) -> BaseException:
    if hasattr(kept, "__notes__"):  # who catches one may add to them
        kept.__notes__ = list(kept.__notes__)
    return kept
