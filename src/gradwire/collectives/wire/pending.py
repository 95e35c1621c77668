"""A collective under way, whose backend's errors are raised as gradwire's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import Work

from gradwire.collectives.wire.failures import translated

__all__ = ["Pending", "done"]


class Pending:
    """A collective under way.

    Args:
        works: What has to be waited for.
        finish: Called once after that; returns the result.
    """

    __slots__ = ("_finish", "_works")

    def __init__(self, works: Sequence[Work], finish: Callable[[], Tensor]) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> Tensor:
        """The result, when it has arrived.

        Raises:
            PeerLostError, CollectiveTimeoutError: Another rank is gone, or stayed away.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            ours = translated(error)
            if ours is error:
                raise
            raise ours from error
        return self._finish()


def done(result: Tensor) -> Pending:
    """A collective for which nothing has to be sent."""
    return Pending((), lambda: result)
