"""A collective under way, whose backend's errors are raised as gradwire's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gradwire._engine_errors import backend_failure, backend_timeout, is_over, is_transport
from gradwire.errors import DistributedError
from gradwire.recorder import failed, number_of_last, ring

__all__ = ["Pending", "done"]


class Pending:
    """A collective under way.

    Args:
        works: What has to be waited for.
        finish: Called once after that; returns the result.
        group: The group of the works, if there are any.
    """

    __slots__ = ("_finish", "_group", "_number", "_since", "_works")

    def __init__(
        self, works: Sequence[Work], finish: Callable[[], Tensor], group: ProcessGroup | None = None
    ) -> None:
        self._works, self._finish, self._group = works, finish, group
        self._since = time.monotonic() if works else 0.0
        self._number = number_of_last(group) if works else 0

    def wait(self) -> Tensor:
        """The result, when it has arrived.

        Raises:
            PeerLostError, CollectiveTimeoutError: Another rank is gone, or stayed away.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            if isinstance(error, DistributedError) or not is_transport(error):
                raise
            raise self._failure(error) from error
        if self._number and self._group is not None:
            ring.end(self._group, self._number)
        return self._finish()

    def _failure(self, error: RuntimeError) -> DistributedError:
        assert self._group is not None
        timed_out = is_over(self._since, backend_timeout(self._group))
        what = "another rank did not take part in time" if timed_out else "another rank is gone"
        failure = backend_failure(error, what, timed_out=timed_out)
        failed(failure)
        return failure


def done(result: Tensor) -> Pending:
    """A collective for which nothing has to be sent."""
    return Pending((), lambda: result)
