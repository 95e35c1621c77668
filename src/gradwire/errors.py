"""Every exception of gradwire, in one tree.

Catch `GradwireError` for all of them, or the built-in class beside it::

    GradwireError
    ├── ArgumentError(ValueError)          an argument's value cannot be used
    ├── ArgumentTypeError(TypeError)       an argument's type cannot be used
    ├── NotSupportedError(NotImplementedError)   asked for something that is not built
    └── DistributedError(RuntimeError)     something went wrong between ranks
        ├── MismatchError                  ranks disagree on what they are doing
        │   └── CheckedMismatchError       ... and all of them will compare what differs
        ├── PeerLostError                  another rank died or left
        ├── CollectiveTimeoutError(TimeoutError)  another rank stayed silent too long
        ├── PeerFailedError                another rank reported an error of its own
        ├── HookError                      a communication hook failed on this rank
        ├── ReductionError                 a backward left gradients out, or got them twice
        └── BrokenGroupError               the group cannot be used again after an error

Wrong arguments raise before anything is sent. `BoundEarlyWarning(UserWarning)` is a warning.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BoundEarlyWarning",
    "BrokenGroupError",
    "CheckedMismatchError",
    "CollectiveTimeoutError",
    "DistributedError",
    "GradwireError",
    "HookError",
    "MismatchError",
    "NotSupportedError",
    "PeerFailedError",
    "PeerLostError",
    "ReductionError",
]


class GradwireError(Exception):
    """Base class of every exception that gradwire raises on purpose."""


class ArgumentError(GradwireError, ValueError):
    """An argument has a value that cannot be used; nothing was sent."""


class ArgumentTypeError(GradwireError, TypeError):
    """An argument has a type that cannot be used; nothing was sent."""


class NotSupportedError(GradwireError, NotImplementedError):
    """A feature was asked for that gradwire does not have; the message says what to use."""


class DistributedError(GradwireError, RuntimeError):
    """Something went wrong between ranks."""


class MismatchError(DistributedError):
    """Ranks disagree: the message names the field and each rank's value."""


class CheckedMismatchError(MismatchError):
    """Ranks disagree in a call that all of them check, which will say what differs.

    A backend raises it on every rank or on none; `gradwire.collectives` turns it into another.
    """


class PeerLostError(DistributedError):
    """Another rank of the group died or closed its connection."""


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """Another rank did not take part within the group's timeout."""


class PeerFailedError(DistributedError):
    """Another rank reported an error; its message is carried in this one."""


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
    """The group's ranks are out of step after an error and cannot be brought back."""


class BoundEarlyWarning(UserWarning):
    """Modules took names of PyTorch before gradwire was put in place, and stay on PyTorch's."""
