"""The error that `run_ranks` raises when ranks fail, and its message."""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.errors import DistributedError

__all__ = ["RankError", "describe"]


class RankError(DistributedError):
    """One or more ranks of a `run_ranks` call raised an exception or died.

    The message has each failed rank's traceback; `__cause__` is the first rank's exception.

    Attributes:
        failures: The exception of each failed rank, in the order in which they failed: a
            `DistributedError` that describes it if it cannot be unpickled here, and a
            `PeerLostError` if the rank died.

    Example:
        >>> try:
        ...     run_ranks(lambda: 1 // dist.get_rank(), world_size=2)  # rank 0 divides by zero
        ... except RankError as error:
        ...     print(error.failures)
        {0: ZeroDivisionError(...)}
    """

    def __init__(self, message: str, failures: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


def describe(headline: str, sections: Mapping[str, str]) -> str:
    """A message: a headline, then a titled section for each rank."""
    parts = [headline]
    parts += [f"--- {title} ---\n{text}".rstrip() for title, text in sections.items()]
    return "\n\n".join(parts)
