"""What engines say when a rank is gone or silent, as errors of ours."""

from __future__ import annotations

from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError

__all__ = ["translated"]

_LOST = ("connection closed", "connection reset", "connection refused", "broken pipe", "socket")


def translated(error: RuntimeError) -> RuntimeError:
    """The error as one of ours if it is known, otherwise itself."""
    if isinstance(error, DistributedError):  # an engine of our own
        return error
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        return CollectiveTimeoutError(f"another rank did not take part in time: {error}")
    if any(sign in text for sign in _LOST):
        return PeerLostError(f"another rank is gone: {error}")
    return error
