"""Every exception of gradwire, in one tree.

Catch `GradwireError` for all of them, or the built-in class beside it::

    GradwireError
    ├── ArgumentError(ValueError)          an argument's value cannot be used
    ├── ArgumentTypeError(TypeError)       an argument's type cannot be used
    ├── NotSupportedError(NotImplementedError)   a feature that gradwire does not have
    ├── CheckpointError(OSError)           a checkpoint could not be written
    └── DistributedError(RuntimeError)     something went wrong between ranks
        ├── MismatchError                  ranks disagree on what they are doing
        │   └── CheckedMismatchError       ... in a call that all of them check
        ├── PeerLostError                  another rank died or closed its connection
        ├── CollectiveTimeoutError(TimeoutError)  another rank did not take part in time
        ├── PeerFailedError                another rank reported an error of its own
        ├── HookError                      a communication hook failed on this rank
        ├── ReductionError                 a parameter got no gradient in a backward, or two
        ├── BrokenGroupError               the group cannot be used again after an error
        └── RunOverError                   the others were done without this process

Wrong arguments raise before anything is sent. Those by the name of `...Warning` are warnings. All
are in one file, so that they can be caught without importing the package that raises them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BoundEarlyWarning",
    "BrokenGroupError",
    "CheckedMismatchError",
    "CheckpointError",
    "CollectiveTimeoutError",
    "DistributedError",
    "GradwireError",
    "HookError",
    "MismatchError",
    "NotKeptWarning",
    "NotSavedWarning",
    "NotSupportedError",
    "PeerFailedError",
    "PeerLostError",
    "ReductionError",
    "RunOverError",
]


class GradwireError(Exception):
    """Base class of every exception that gradwire raises on purpose."""


class ArgumentError(GradwireError, ValueError):
    """An argument has a value that cannot be used; nothing was sent."""


class ArgumentTypeError(GradwireError, TypeError):
    """An argument has a type that cannot be used; nothing was sent."""


class NotSupportedError(GradwireError, NotImplementedError):
    """A feature that gradwire does not have; the message says what to use instead."""


class CheckpointError(GradwireError, OSError):
    """A checkpoint could not be written, and its partial files are removed; or it is damaged."""


class DistributedError(GradwireError, RuntimeError):
    """Something went wrong between ranks."""


class MismatchError(DistributedError):
    """Ranks disagree: the message names the field and each rank's value.

    Attributes:
        values: Each rank's value, by its rank in the group; empty where that is not what differs.
    """

    def __init__(self, message: str = "", values: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.values = tuple(map(str, values))


class CheckedMismatchError(MismatchError):
    """Ranks disagree in a call that all of them check.

    A backend raises it on every rank or on none. `gradwire.collectives` then compares the ranks'
    calls and raises a MismatchError that names what differs.
    """


class PeerLostError(DistributedError):
    """Another rank of the group died or closed its connection."""


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """Another rank did not take part within the group's timeout."""


class PeerFailedError(DistributedError):
    """Another rank reported an error; this message contains its own.

    Attributes:
        ranks: Ranks in the group that reported an error; empty where that is not known.
    """

    def __init__(self, message: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class HookError(DistributedError):
    """A communication hook raised, or returned something that is not a bucket's result."""


class ReductionError(DistributedError):
    """A backward pass left parameters without a gradient, or gave one of them two.

    Attributes:
        parameters: The names of those that got none, where that is the error.
    """

    def __init__(self, message: str, parameters: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.parameters = tuple(parameters)


class BrokenGroupError(DistributedError):
    """The group cannot be used any more: it failed before, or was destroyed or aborted.

    After an error, its ranks may be out of step in a way that cannot be resynchronized.
    """


class RunOverError(DistributedError):
    """An elastic run was done before this process was taken in, or without it.

    This is not a failure: a program that does not catch it ends with exit code `code` and the
    message, without a traceback, so that launchers do not start it again.

    Attributes:
        code: 0, or 1 if this process was never a part of the run.
    """

    def __init__(self, message: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class NotKeptWarning(UserWarning):
    """An elastic run steps an object whose state a new member would not receive."""


class NotSavedWarning(UserWarning):
    """A communication hook's state has no `state_dict`, and is not saved."""


class BoundEarlyWarning(UserWarning):
    """Modules imported names of PyTorch before `compat.install()`, and keep PyTorch's objects."""


def require_linux(feature: str) -> None:
    """Raise unless this is Linux."""
    if sys.platform != "linux":
        raise NotSupportedError(
            f"{feature} needs Linux, but this is {sys.platform}: use it there, or in a container"
        )


def printable(text: str) -> str:
    """Return an error's text with control characters, line breaks among them, as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
