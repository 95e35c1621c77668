"""A message that is being put together from its pieces."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import DistributedError
from gradwire.shm.header import DTYPES
from gradwire.shm.mailbox import PostedReceive
from gradwire.shm.message_ring import Head

__all__ = ["Assembly"]


class Assembly:
    """A message of which not all has arrived.

    Args:
        head: Of any of its pieces.

    Attributes:
        receive: The receive that takes it, once one is found.
        arrived: How many of its bytes have arrived.
        data: Where it is put together: the receive's tensor if that is possible, or memory of its
            own; None before `place`.
        address: Of `data`.
    """

    __slots__ = ("address", "arrived", "data", "dtype", "head", "nbytes", "receive")

    def __init__(self, head: Head) -> None:
        self.head, self.dtype = head, DTYPES[head.dtype]
        self.nbytes = head.elements * self.dtype.itemsize
        self.receive: PostedReceive | None = None
        self.arrived = 0
        self.data: Tensor | None = None
        self.address = 0

    def place(self) -> None:
        """Decide where it is put together.

        Raises:
            DistributedError: There is no memory for it.
        """
        if self.place_in_receive():
            return
        elements = self.head.elements
        try:
            self._put_into(torch.empty(elements, dtype=self.dtype, device="cpu"))
        except (RuntimeError, MemoryError) as error:  # torch raises either
            raise DistributedError(
                f"there is no memory for a message of {self.nbytes} bytes ({error})"
            ) from error

    def place_in_receive(self) -> bool:
        """Put it together in its receive's tensor, if that is possible; whether it is."""
        receive = self.receive
        if receive is None or not receive.takes_in_place(self.dtype, self.head.elements):
            return False
        self._put_into(receive.tensor)
        return True

    def detach(self) -> None:
        """Go on without the receive, as if it had not been posted."""
        self.receive = None
        if self.data is not None:
            self._put_into(self.data.clone())

    def _put_into(self, data: Tensor) -> None:
        self.data, self.address = data, data.data_ptr()
