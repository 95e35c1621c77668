"""Small gradients that accumulate where they travel.

A parameter without a gradient keeps the first one that autograd brings: a bucket then copies it in,
and the result out. One that has a gradient has it added to. So a bucket lends its buffer: when a
backward begins, it sets the gradients that are None to zeros there. Autograd writes only to them,
whatever else uses the memory that it brings, and the bucket has nothing left to copy.

For large gradients this takes longer: zeroing and adding are five passes over memory, where copying
takes two.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.ddp.buckets.own_tensors import OwnTensors

__all__ = ["LentGradients"]

_SCATTERED = 8
"""Up to so many others between them, those that are lent are zeroed in one piece."""


class LentGradients:
    """What a bucket lends to its parameters' gradients in one backward.

    Args:
        parameters: The bucket's.
        places: Of those that are small.
    """

    def __init__(self, parameters: Sequence[Parameter], places: Sequence[int]) -> None:
        self._parameters, self._small = parameters, places
        # subclasses may see to their gradients themselves; what is empty lies nowhere
        self._places = [i for i in places if type(p := parameters[i]) is Parameter and p.numel()]
        self._nothing: list[object] = [object()] * len(parameters)  # None would be no gradient
        self._tensors, self._pending = self._nothing, False
        self._versions = [0] * len(parameters)  # that the tensors were lent with
        self._own = OwnTensors()

    def __bool__(self) -> bool:
        return bool(self._places)

    def set_views(self, views: Sequence[Tensor]) -> None:
        """The buffer's views, one for each parameter, from here on."""
        self._views = views
        self._own = OwnTensors([views[i] for i in self._places])

    @property
    def own_uses(self) -> int:
        """How many tensors are kept here that lie in the buffer; see `drop_unless_unused`."""
        return len(self._own)

    def drop_unless_unused(self) -> None:
        """Keep what was lent in the last backward to lend it again, if nobody else has any of it.

        Else it is as if it was not kept: who has it counts among those who use the buffer.
        """
        if not self._own.are_unused():
            self.drop()

    def drop(self) -> None:
        """Keep nothing of what was lent in earlier backwards."""
        self._own.clear()

    def lend(self, without: Collection[int], together: Tensor | None) -> None:
        """Set gradients that are None to zeros, after `drop_unless_unused`.

        Args:
            without: Places of those that are to stay as they are.
            together: The part of the buffer in which all small ones lie, and nothing else that is
                in use yet, if there is one.
        """
        parameters, views = self._parameters, self._views
        dtype = views[0].dtype
        free = [
            i
            for i in self._places
            if (p := parameters[i]).grad is None
            and p.requires_grad
            and p.grad_dtype is dtype
            # hooks of the user's find None where there is none yet, as without the wrapper
            and not (p._backward_hooks or p._post_accumulate_grad_hooks)
        ]
        if without:
            free = [i for i in free if i not in without]
        if not free:
            return
        first = self._tensors is self._nothing  # what came in an earlier backward stays lent
        kept = len(self._small) - len(free)
        if first and together is not None and kept <= _SCATTERED and not self._lie_in({*free}):
            together.zero_()
        else:
            torch._foreach_zero_([views[i] for i in free])
        own, versions = dict(zip(self._places, self._own.get(), strict=True)), self._versions
        tensors = self._tensors = self._tensors.copy()
        self._pending = True  # before the first: a signal's handler may raise in between
        for i in free:
            tensor = own[i]
            versions[i] = tensor._version
            tensors[i] = parameters[i].grad = tensor

    def _lie_in(self, free: Collection[int]) -> bool:
        """Whether a gradient that is not free lies in its view."""
        for i in self._small:
            gradient = self._parameters[i].grad
            if i in free or gradient is None or gradient.layout != torch.strided:
                continue
            if gradient.data_ptr() == self._views[i].data_ptr():
                return True
        return False

    def not_lent(self, places: Sequence[int]) -> list[int]:
        """Those of the places whose gradient is not, or is no more, what was lent."""
        parameters, tensors = self._parameters, self._tensors
        return [i for i in places if parameters[i].grad is not tensors[i]]

    def let_go(self, places: Sequence[int]) -> None:
        """Hold none of these, which are not lent any more."""
        for i in places:
            self._tensors[i] = self._nothing[i]

    def take_back(self, unused: Collection[int] = ()) -> None:
        """Gradients that have not come are None again; what has come stays lent.

        Args:
            unused: Places of those that get none, whatever hooks have done with the zeros.
        """
        for i in self._places if self._pending else ():
            tensor = self._tensors[i]
            # values: what writes by way of .data or NumPy leaves the version as it is
            if not isinstance(tensor, Tensor):
                continue
            if tensor._version != self._versions[i] and i not in unused:
                continue
            if not tensor.any():
                if self._parameters[i].grad is tensor:
                    self._parameters[i].grad = None
                self._tensors[i] = self._nothing[i]

    def settle(self) -> None:
        """All that is lent has come."""
        self._pending = False

    def forget(self) -> None:
        """What is in the gradients is theirs."""
        self._tensors, self._pending = self._nothing, False
