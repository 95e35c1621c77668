"""Small gradients that accumulate directly in a bucket's buffer.

Autograd stores the first gradient of a parameter whose `.grad` is None, and the bucket then copies
it in and the result out. If `.grad` is a tensor, autograd adds to it. A bucket therefore lends its
buffer: when a backward begins, it sets each `.grad` that is None to zeros in the buffer. Autograd
accumulates there, and the bucket copies nothing.

For large gradients this takes longer: zeroing and adding are five passes over memory, copying takes
two.

Making and freeing a tensor takes 1 µs, as long as autograd takes to add to a tiny gradient. The
lent tensors are therefore kept, and reused if nothing else refers to any of them and none was
altered. Except for their version, they then cannot be distinguished from new ones.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire._scope import outside_contexts
from gradwire.ddp.buckets.ownership import holders


class OwnTensors:
    """Tensors with the memory of views, each with its own version counter.

    Views would share one counter: a write to one would count as a write to all.

    Args:
        views: Views whose memory the tensors use.
    """

    def __init__(self, views: Sequence[Tensor] = ()) -> None:
        self._views = views
        self._tensors: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._tensors)

    def get(self) -> Sequence[Tensor]:
        """Return a tensor for each view."""
        if not self._tensors:
            self._tensors = [view.data for view in self._views]
        return self._tensors

    def are_unused(self) -> bool:
        """Return True if nothing else refers to any of the tensors and none was altered."""
        tensors, count = self._tensors, len(self._tensors)
        # A sum is enough because no tensor has fewer references than one that only the list holds.
        # All passes are calls of C functions, 0.3 µs per tensor in total.
        return (
            sum(map(sys.getrefcount, tensors)) == count * _REFERENCES
            and sum(map(holders, tensors)) == count * _HOLDERS
            and all(map(Tensor.is_set_to, tensors, self._views))
            and not any(map(_requires_grad, tensors))
            and not any(map(_attributes, tensors))
            and not any(map(weakref.getweakrefcount, tensors))
        )

    def clear(self) -> None:
        """Drop the tensors; `get` makes new ones."""
        self._tensors = []


_requires_grad = attrgetter("requires_grad")
_attributes = attrgetter("__dict__")


def _counts() -> tuple[int, int]:
    """Measure the Python and C++ reference counts of a tensor that only one list holds.

    Return zeros if the counts do not show a second reference: then no tensor is reused.
    """
    with outside_contexts():
        tensors = [torch.empty(0, dtype=torch.float32, device="cpu").data]
    counts = sum(map(sys.getrefcount, tensors)), sum(map(holders, tensors))
    kept = [*tensors]
    noticed = sum(map(sys.getrefcount, tensors)) == counts[0] + len(kept)
    return counts if noticed else (0, 0)


_REFERENCES, _HOLDERS = _counts()


_SCATTERED = 8
"""Maximum number of small gradients that are not lent, for zeroing all small ones in one call."""


class LentGradients:
    """Zeros in a bucket's buffer that are lent as gradients in one backward.

    Args:
        parameters: Parameters of the bucket.
        places: Positions in `parameters` of those with small gradients.
    """

    def __init__(self, parameters: Sequence[Parameter], places: Sequence[int]) -> None:
        self._parameters, self._small = parameters, places
        # Subclasses may handle gradients themselves; an empty tensor has no address.
        self._places = [i for i in places if type(p := parameters[i]) is Parameter and p.numel()]
        # Not None: a parameter whose gradient is None would match it.
        self._nothing: list[object] = [object()] * len(parameters)
        self._tensors, self._pending = self._nothing, False
        self._versions = [0] * len(parameters)  # version counters at the time of lending
        self._own = OwnTensors()

    def __bool__(self) -> bool:
        return bool(self._places)

    def set_views(self, views: Sequence[Tensor]) -> None:
        """Set the views of a new buffer, one for each parameter."""
        self._views = views
        self._own = OwnTensors([views[i] for i in self._places])

    @property
    def own_uses(self) -> int:
        """Number of tensors kept here that use the buffer; see `drop_unless_unused`."""
        return len(self._own)

    def drop_unless_unused(self) -> None:
        """Drop the tensors lent in the last backward unless nothing else refers to any of them.

        Tensors that are kept are lent again. After a drop, remaining references count as uses of
        the buffer.
        """
        if not self._own.are_unused():
            self.drop()

    def drop(self) -> None:
        """Drop the tensors that were lent in earlier backwards."""
        self._own.clear()

    def lend(self, without: Collection[int], together: Tensor | None) -> None:
        """Set gradients that are None to zeros. Call `drop_unless_unused` first.

        Args:
            without: Positions of parameters whose gradient must not change.
            together: Part of the buffer that contains all small gradients and nothing else that is
                in use, if there is one.
        """
        parameters, views = self._parameters, self._views
        dtype = views[0].dtype
        free = [
            i
            for i in self._places
            if (p := parameters[i]).grad is None
            and p.requires_grad
            and p.grad_dtype is dtype
            # the user's hooks must find None where there is no gradient yet
            and not (p._backward_hooks or p._post_accumulate_grad_hooks)
        ]
        if without:
            free = [i for i in free if i not in without]
        if not free:
            return
        first = self._tensors is self._nothing  # False: an earlier backward has added to some
        kept = len(self._small) - len(free)
        if first and together is not None and kept <= _SCATTERED and not self._lie_in({*free}):
            together.zero_()
        else:
            torch._foreach_zero_([views[i] for i in free])
        own, versions = dict(zip(self._places, self._own.get(), strict=True)), self._versions
        tensors = self._tensors = self._tensors.copy()
        self._pending = True  # set before lending: a signal handler may raise within the loop
        for i in free:
            tensor = own[i]
            versions[i] = tensor._version
            tensors[i] = parameters[i].grad = tensor

    def _lie_in(self, free: Collection[int]) -> bool:
        """Return True if a gradient that is not in `free` lies in its view."""
        for i in self._small:
            gradient = self._parameters[i].grad
            if i in free or gradient is None or gradient.layout != torch.strided:
                continue
            if gradient.data_ptr() == self._views[i].data_ptr():
                return True
        return False

    def not_lent(self, places: Sequence[int]) -> list[int]:
        """Return the positions whose gradient is not the lent tensor."""
        parameters, tensors = self._parameters, self._tensors
        return [i for i in places if parameters[i].grad is not tensors[i]]

    def let_go(self, places: Sequence[int]) -> None:
        """Drop references to the tensors at these positions, which are no longer lent."""
        for i in places:
            self._tensors[i] = self._nothing[i]

    def take_back(self, unused: Collection[int] = ()) -> None:
        """Set lent gradients that nothing was added to back to None. The others stay lent.

        Args:
            unused: Positions of parameters without a gradient, even if hooks wrote to the zeros.
        """
        for i in self._places if self._pending else ():
            tensor = self._tensors[i]
            # The values decide too: writes through .data or NumPy do not change the version.
            if not isinstance(tensor, Tensor):
                continue
            if tensor._version != self._versions[i] and i not in unused:
                continue
            if not tensor.any():
                if self._parameters[i].grad is tensor:
                    self._parameters[i].grad = None
                self._tensors[i] = self._nothing[i]

    def settle(self) -> None:
        """Keep all lent gradients: all have arrived."""
        self._pending = False

    def forget(self) -> None:
        """End lending: gradients keep their tensors."""
        self._tensors, self._pending = self._nothing, False
