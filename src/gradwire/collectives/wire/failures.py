"""Which of gradwire's errors a backend's error is: a rank is gone, or did not take part in time."""

from __future__ import annotations

from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError

__all__ = ["kind_of", "translated"]

_LOST = ("connection", "broken pipe", "peer", "socket")


def kind_of(error: BaseException) -> type[DistributedError] | None:
    """Which of our errors a backend's error is; None if it is none of them."""
    if isinstance(error, DistributedError):  # a backend of our own
        return type(error)
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        return CollectiveTimeoutError
    if any(sign in text for sign in _LOST):
        return PeerLostError
    return None


def translated(error: RuntimeError) -> RuntimeError:
    """The error as one of ours if it is known, otherwise itself."""
    kind = kind_of(error)
    if kind is None or isinstance(error, kind):
        return error
    if kind is CollectiveTimeoutError:
        return kind(f"another rank did not take part in time: {error}")
    return kind(f"another rank is gone: {error}")
