"""Bucket of dense gradients that share a buffer.

On the CPU, a large gradient is copied in and scaled as soon as it is ready, while it is in the
processor's cache, and small gradients accumulate in the buffer from the start (`LentGradients`).
Where they cannot, and on accelerators, one call copies gradients in when the bucket is ready, and
one call copies them out. After it was copied in, the tensor of a large gradient is set to the
buffer's memory if possible: autograd's memory is freed at once, and nothing is copied back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.buckets import views
from gradwire.ddp.buckets.bucket import Bucket, BucketContext, Member, dense_gradient, move_out
from gradwire.ddp.buckets.ownership import are_unused, is_conj_or_neg, uses
from gradwire.shm import empty

AT_ONCE_BYTES = 32 << 10
"""Minimum size of a large gradient. From this size, three Python calls cost less than more passes
over memory."""
MOVE_BYTES = 1 << 20
"""Minimum size of an accelerator's gradient that is set to the buffer's memory. This saves memory,
not time: beside an H100 with a slow processor it takes 16 µs of Python, copying 1 MiB back 1 µs."""
CACHED = ("cpu",)
"""Types of devices whose large gradients are copied in one by one. On an H100, with 50 large
gradients, this took 3 ms of a step of 55."""

SCATTERED = 8
"""Maximum number of small gradients that are not lent, for zeroing all small ones in one call."""

_Entry = tuple[int, Tensor, Tensor]
"""Position of a parameter in the bucket, its gradient, and its view of the buffer."""


class PackedBucket(Bucket):
    """Bucket of dense gradients of one dtype and device that share a buffer."""

    def __init__(
        self, members: Sequence[Member], scale: float, context: BucketContext, *, extra_numel: int
    ) -> None:
        cached = members[0].parameter.device.type in CACHED
        # the order must be the same on all ranks: it depends on sizes, not on this rank's counts
        if scale != 1.0:
            # large ones first, so that one call scales the others
            members = sorted(members, key=lambda m: m.parameter.nbytes < AT_ONCE_BYTES)
        # Gradients of Tensor subclasses keep their class; their values may be in inner tensors.
        plain = all(type(m.parameter) is Parameter for m in members)
        self._moves_after_copy = not cached
        self._as_views = context.options.gradient_as_bucket_view and plain
        self._group, self._lazy = context.group, context.options.lazy
        self.extra_numel = extra_numel
        self._views: list[Tensor] = []  # empty without a buffer
        large = [i for i, m in enumerate(members) if cached and m.parameter.nbytes >= AT_ONCE_BYTES]
        self._at_once = len(large)
        self._at_once_numel = sum(members[i].parameter.numel() for i in large)
        # positions of the members that are copied in early by parameter index, those of the others,
        # and those of large members that do not arrive exactly once on this rank
        self._place = {members[i].index: i for i in large if members[i].count == 1}
        self._late = [i for i in range(len(members)) if members[i].index not in self._place]
        self._late_large = [i for i in large if members[i].count != 1]
        self._small_together = scale != 1.0 or not large
        lends = context.lend and not self._lazy
        small = [i for i in self._late if i not in self._late_large] if lends else ()
        self._lent = LentGradients([m.parameter for m in members], small)
        super().__init__(members, scale, context, early=self._place.keys())
        if not self._lazy:
            self._allocate()

    def _allocate(self) -> None:
        first = self.parameters[0]
        count = sum(p.numel() for p in self.parameters) + self.extra_numel
        if first.device.type == "cpu":
            self.flat = empty(count, dtype=first.dtype, group=self._group)
        else:
            self.flat = torch.empty(count, dtype=first.dtype, device=first.device)
        self._views = views(self.flat, self.like)
        # With a scale, the gradients that are not scaled one by one are last.
        self._small = self.flat[self._at_once_numel :]
        self.extra = self.flat[count - self.extra_numel :]
        self._pointers = [view.data_ptr() for view in self._views]
        self._own_uses = uses(self.flat)
        self._lent.set_views(self._views)

    def _ensure_writable(self) -> None:
        """Before the first write of a backward, allocate a new buffer if the old one is in use."""
        # Gradients of the last backward are in the buffer. They may be written to while they are
        # their parameters' `.grad`, but not if the user kept one and cleared `.grad`.
        self._lent.drop_unless_unused()
        if not self._views or (not self._as_views and self._is_kept()):
            self._allocate()
        self._writable = True

    def _is_kept(self) -> bool:
        """Return True if tensors other than the parameters' gradients use the buffer."""
        others = uses(self.flat) - self._own_uses - len(self._lent.kept)
        if not others:
            return False
        in_buffer = 0
        places = zip(self.parameters, self._views, self._pointers, strict=True)
        for parameter, view, pointer in places:
            gradient = parameter.grad
            if gradient is not None and gradient.layout == torch.strided:
                # the pointer of an empty tensor is always 0
                here = pointer != 0 and gradient.data_ptr() == pointer
                in_buffer += here and gradient is not view
        return others != in_buffer

    def reset(self) -> None:
        self._lent.take_back()
        self._lent.forget()
        super().reset()
        if self._lazy and self._views:  # until the next backward, only gradients keep the buffer
            self.record_use()
            del self.flat, self.extra, self._small
            self._views = []
        self._writable = self._as_views and not self._lazy
        self._saved: dict[int, Tensor] = {}
        self._copied_in: Sequence[_Entry] = ()

    def lend(self) -> None:
        if self._deferred or not self._lent.places:
            return
        if self._writable:  # gradients are views, or an earlier backward has ended incomplete
            self._lent.drop_unless_unused()
        else:
            self._ensure_writable()
        # Not for a ready gradient that was cleared since: its bucket may be in flight.
        kept = self.unused.union(self.ready)
        without = {i for i, m in enumerate(self.members) if m in kept} if kept else ()
        self._lent.lend(without, self._small if self._small_together else None)

    def take_back(self) -> None:
        self._lent.take_back(self._unused_places())

    def move_out(self) -> None:
        for parameter, pointer in zip(self.parameters, self._pointers, strict=True):
            move_out(parameter, pointer)

    def copy_in_early(self, member: int, incoming: Sequence[Tensor]) -> None:
        if not self._writable:
            self._ensure_writable()
        place = self._place[member]
        parameter, view = self.parameters[place], self._views[place]
        gradient = dense_gradient(parameter)
        if gradient.data_ptr() == self._pointers[place]:
            if self.scale != 1.0:
                view.mul_(self.scale)
            return
        torch.mul(gradient, self.scale, out=view)
        if self._may_move(place, names=1):
            self._move_to(parameter, gradient, view)

    def _may_move(self, place: int, *, names: int) -> bool:
        """Return True if a gradient may be moved to the buffer; see `Ownership.may_move`."""
        member, parameter = self.members[place], self.parameters[place]
        return self._as_views or self._ownership.may_move(member, parameter, names=names)

    def _move_to(self, parameter: Parameter, gradient: Tensor, view: Tensor) -> None:
        if self._as_views:
            parameter.grad = view
        elif is_conj_or_neg(gradient):  # set_ would keep the bit
            parameter.grad = view.detach()
        else:
            gradient.set_(view)  # type: ignore[call-overload]  # torch's stub lacks this form

    def _outside_before(self) -> list[_Entry]:
        """Return the entries of gradients that are not in the buffer before the reduction."""
        places = range(len(self.members)) if self._deferred else self._late
        elsewhere = self._lent.not_lent(places)
        if not elsewhere:  # the usual case: checking hundreds again takes 0.1 ms
            return []
        self._lent.let_go(elsewhere)
        outside = self._outside(self._used(elsewhere))
        if outside:
            self._lent.kept = []
        if outside and self._is_kept():
            # the user has replaced a gradient and keeps the one in the buffer; the others in it get
            # their results by a copy
            left = self.flat
            self._allocate()
            self.flat.copy_(left)
            self._lent.forget()
            outside = self._outside(self._used(places))
        return outside

    def _outside_after(self, places: Sequence[int], source: Sequence[Tensor]) -> list[_Entry]:
        """Return the entries of gradients that are not in `source` after the reduction."""
        # Entries from `copy_in` are reused where they are still valid: checking a tiny gradient
        # again takes as long as copying it.
        copied, self._copied_in = self._copied_in, ()
        valid = source is self._views and all(self.parameters[i].grad is g for i, g, _ in copied)
        if copied and valid:
            known = {i for i, _, _ in copied}
            return [*copied, *self._outside([i for i in places if i not in known], source)]
        return self._outside(places, source)

    def _outside(
        self, places: Sequence[int], source: Sequence[Tensor] | None = None
    ) -> list[_Entry]:
        """Return the entries of gradients that do not lie in their view, of the buffer if None."""
        own: Sequence[Tensor] = self._views
        pointers = self._pointers
        if source is not None and source is not own:
            own, pointers = source, [view.data_ptr() for view in source]
        else:
            places = self._lent.not_lent(places)
        found = [(i, dense_gradient(self.parameters[i]), own[i]) for i in places]
        return [entry for entry in found if entry[1].data_ptr() != pointers[entry[0]]]

    def copy_in(self) -> None:
        if not self._writable:  # no gradient was copied in early
            self._ensure_writable()
        if self.unused:
            self.take_back()
        self._lent.pending = False  # all have arrived
        outside = self._outside_before()
        if outside:
            torch._foreach_copy_([v for _, _, v in outside], [g for _, g, _ in outside])
        outside = self._without_moved(outside)
        if not (self.unused or self._deferred or self._as_views):
            self._copied_in = outside
        if self._as_views and not self._with_graph:
            for place, _, view in outside:
                self.parameters[place].grad = view  # a replaced .grad keeps its old value
        for i in self._unused_places():
            self._copy_in_unused(i)
        if self.scale != 1.0:
            (self.flat if self._deferred else self._small).mul_(self.scale)
            if self._late_large and not self._deferred:
                for i in self._used(self._late_large):
                    self._views[i].mul_(self.scale)

    def _without_moved(self, outside: list[_Entry]) -> list[_Entry]:
        """Set an accelerator's large gradients to the buffer; return the entries of the others."""
        if not self._moves_after_copy or self._as_views or self._deferred:
            return outside
        kept: list[_Entry] = []
        for entry in outside:
            place, gradient, view = entry
            if gradient.nbytes >= MOVE_BYTES and self._may_move(place, names=2):
                self._move_to(self.parameters[place], gradient, view)
            else:
                kept.append(entry)
        return kept

    def _used(self, places: Sequence[int]) -> Sequence[int]:
        if not self.unused:
            return places
        return [i for i in places if self.members[i] not in self.unused]

    def _unused_places(self) -> list[int]:
        return [i for i, m in enumerate(self.members) if m in self.unused] if self.unused else []

    def _copy_in_unused(self, place: int) -> None:
        """Copy in a gradient that accumulated earlier; save it in case no rank adds to it."""
        view = self._views[place]
        gradient = self.parameters[place].grad
        if gradient is None:
            view.zero_()
            return
        self._saved[place] = gradient.detach().clone()
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(self._saved[place])
        if place < self._at_once and not self._deferred:
            view.mul_(self.scale)

    def zero(self) -> None:
        self._lent.kept = []
        if not self._views or uses(self.flat) > self._own_uses:
            self._allocate()
        self.flat.zero_()

    def copy_out(self, reduced: Tensor | None, untouched: Collection[int]) -> None:
        source = self._views
        if reduced is not None and reduced.dtype is not self.flat.dtype:
            of_result, own = (t.untyped_storage().data_ptr() for t in (reduced, self.flat))
            # in the same memory, a direct copy would overwrite values before they are read
            self.flat.copy_(reduced.clone() if of_result == own else reduced)
        elif reduced is not None and reduced.data_ptr() != self.flat.data_ptr():
            source = views(reduced, self.like)
        places = self._used(range(len(self.members)))
        away = self._outside_after(places, source)
        if away and self._with_graph:
            for i in places:
                old = dense_gradient(self.parameters[i])
                with torch.enable_grad():  # the reduced value with the history of the local one
                    self.parameters[i].grad = old + (source[i] - old).detach()
        elif away:
            self._copy_to_gradients(away)
        for i in self._unused_places():
            self._copy_out_unused(i, source[i], touched=self.members[i] not in untouched)

    def _copy_to_gradients(self, away: Sequence[_Entry]) -> None:
        indices = [self.members[place] for place, _, _ in away]
        # The list has no name: it must be freed before references are counted below.
        elsewhere = self._ownership.used_elsewhere(indices, [g for _, g, _ in away])
        plain: list[_Entry] = []
        for entry, used in zip(away, elsewhere, strict=True):
            place, gradient, reduced = entry
            if used and self._may_move(place, names=2):
                self._move_to(self.parameters[place], gradient, reduced.clone())
            elif is_conj_or_neg(gradient):
                gradient.copy_(reduced)
            else:
                plain.append(entry)
        if plain:
            torch._foreach_copy_([g for _, g, _ in plain], [r for _, _, r in plain])

    def _copy_out_unused(self, place: int, reduced: Tensor, *, touched: bool) -> None:
        parameter, view = self.parameters[place], self._views[place]
        gradient = parameter.grad
        if not touched:
            if gradient is not None and gradient.data_ptr() == view.data_ptr():
                view.copy_(self._saved[place])
        elif gradient is None:
            parameter.grad = view.copy_(reduced) if self._as_views else reduced.clone()
        elif gradient.data_ptr() != reduced.data_ptr():
            gradient.copy_(reduced)


class LentGradients:
    """Zeros in a bucket's buffer that are lent as gradients in one backward."""

    # Autograd stores the first gradient of a parameter whose `.grad` is None, and the bucket then
    # copies it in and the result out. If `.grad` is a tensor, autograd adds to it. A bucket
    # therefore sets each small `.grad` that is None to zeros in its buffer when a backward begins,
    # and copies nothing. For large gradients this takes longer: zeroing and adding are five passes
    # over memory, copying takes two.

    def __init__(self, parameters: Sequence[Parameter], places: Sequence[int]) -> None:
        self._parameters, self._small = parameters, places
        # Subclasses may handle gradients themselves; an empty tensor has no address.
        self.places = [i for i in places if type(p := parameters[i]) is Parameter and p.numel()]
        # Not None: a parameter whose gradient is None would match it.
        self._nothing: list[object] = [object()] * len(parameters)
        self._tensors = self._nothing
        self.pending = False  # zeros were lent to which nothing may have been added yet
        self._versions = [0] * len(parameters)  # version counters at the time of lending
        # Making and freeing a tensor takes 1 µs, as long as autograd takes to add to a tiny
        # gradient. The lent tensors are therefore kept, and reused if nothing else refers to any of
        # them and none was altered. Except for their version, they then cannot be distinguished
        # from new ones.
        self.kept: list[Tensor] = []  # kept from earlier backwards, one for each place
        self._kept_views: list[Tensor] = []

    def set_views(self, views: Sequence[Tensor]) -> None:
        """Set the views of a new buffer, one for each parameter."""
        self._views = views
        self.kept, self._kept_views = [], [views[i] for i in self.places]

    def drop_unless_unused(self) -> None:
        """Drop the tensors lent in the last backward unless nothing else refers to any of them."""
        # Kept ones are lent again. After a drop, remaining references count as uses of the buffer.
        if not are_unused(self.kept, self._kept_views):
            self.kept = []

    def lend(self, without: Collection[int], together: Tensor | None) -> None:
        """Set gradients that are None to zeros, except at positions in `without`."""
        # Call `drop_unless_unused` first. `together` is a part of the buffer that contains all
        # small gradients and nothing else that is in use.
        parameters, views = self._parameters, self._views
        dtype = views[0].dtype
        free = [
            i
            for i in self.places
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
        if first and together is not None and kept <= SCATTERED and not self._lie_in({*free}):
            together.zero_()
        else:
            torch._foreach_zero_([views[i] for i in free])
        if not self.kept:
            self.kept = [view.data for view in self._kept_views]
        own, versions = dict(zip(self.places, self.kept, strict=True)), self._versions
        tensors = self._tensors = self._tensors.copy()
        self.pending = True  # set before lending: a signal handler may raise within the loop
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
        """Set lent gradients that nothing was added to back to None. The others stay lent."""
        for i in self.places if self.pending else ():
            tensor = self._tensors[i]
            # The values decide too: writes through .data or NumPy do not change the version.
            if not isinstance(tensor, Tensor):
                continue
            # unused parameters have no gradient, even if hooks wrote to the zeros
            if tensor._version != self._versions[i] and i not in unused:
                continue
            if not tensor.any():
                if self._parameters[i].grad is tensor:
                    self._parameters[i].grad = None
                self._tensors[i] = self._nothing[i]

    def forget(self) -> None:
        """End lending: gradients keep their tensors."""
        self._tensors, self.pending = self._nothing, False
