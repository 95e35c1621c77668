"""What a scatter cuts, as each rank knows it: the root has it, a receiver expects it or is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.lists import concat, piece_sizes, pieces_of
from gradwire.collectives.args.ranks import dense_tensor, with_data
from gradwire.collectives.args.sizes import dim_in_front, equal_part, valid_sizes
from gradwire.collectives.args.transforms import refuse_in_transforms
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import Call
from gradwire.collectives.wire.ints import device_of
from gradwire.errors import ArgumentError

__all__ = ["Whole", "told"]


@dataclass(frozen=True)
class Whole:
    """What a scatter cuts: the rows, with the cut dim in front.

    Args:
        rows: The pieces, one after the other; on a receiver what stands for them.
        sizes: How many rows each rank gets.
        dim: Where the cut dim was.
        numbers: Whether the pieces have no dim at all.
        expected_rows: How many rows a receiver's `like` has.
    """

    rows: Tensor
    sizes: tuple[int, ...]
    dim: int
    numbers: bool = False
    expected_rows: int = 0

    @classmethod
    def of(cls, xs: object, dim: int, sizes: Sequence[int] | None, group: ProcessGroup) -> Whole:
        """On the root."""
        if isinstance(xs, Tensor):
            front, dim = dim_in_front(xs, dim)
            with_data(xs, "xs")
            if sizes is None:
                return cls(front, (equal_part(len(front), group, "xs"),) * group.size(), dim)
            given = valid_sizes(sizes, group, "sizes")
            if sum(given) != len(front):
                raise ArgumentError(f"sizes is {list(given)}: xs has {len(front)} in dim {dim}")
            return cls(front, given, dim)
        pieces, dim, numbers = pieces_of(xs, dim, group, "xs")
        with_data(pieces[0], "xs[0]")
        known = piece_sizes(pieces, dim, sizes, group)
        return cls(concat([piece.movedim(dim, 0) for piece in pieces]), known, dim, numbers)

    @classmethod
    def expected(
        cls, like: Tensor, dim: int, sizes: Sequence[int] | None, group: ProcessGroup
    ) -> Whole:
        """On a receiver that knows what it gets."""
        dense_tensor(like, "like")
        numbers = not like.dim()
        front, dim = rows, dim = dim_in_front(like, dim)
        if like.is_meta:
            refuse_in_transforms("like on meta", "give a tensor that is transformed as xs is")
            rows = torch.empty((0, *front.shape[1:]), dtype=like.dtype, device=device_of(group))
            rows.requires_grad_(like.requires_grad)
        given = (len(front),) * group.size()
        if sizes is not None:
            given = valid_sizes(sizes, group, "sizes")
        return cls(rows, given, dim, numbers, len(front))

    def hung_on(self, xs: Tensor | Sequence[Tensor] | None) -> Whole:
        """With a receiver's own tensors as the origin of its rows, of which there are none."""
        own = [xs] if isinstance(xs, Tensor) else xs or ()
        empty = [x.reshape(-1)[:0].to(self.rows) for x in own if x.requires_grad]
        if not empty or not self.rows.requires_grad:
            return self
        # Not cat, whose backward leaves empty tensors out.
        return replace(self, rows=torch.stack(empty).reshape(self.rows.shape))


def told(
    whole: Whole | None, root: int, dim: int, group: ProcessGroup
) -> tuple[Whole, consistency.Note]:
    """The root tells what it is about to cut; the same on all ranks."""
    at_root = group.rank() == root
    rows = torch.empty(0) if whole is None else whole.rows
    call = Call("scatter", None, None, root=root, detail=f"dim={dim}", ragged=True)
    if whole is None:
        call = call._replace(wants_grad=consistency.grad_mode())
    else:
        call = call._replace(
            shape=() if whole.numbers else tuple(rows.shape),
            dtype=rows.dtype,
            wants_grad=consistency.wants_grad(rows),
            send=whole.sizes if at_root else (),
            receive=() if at_root else _expects(whole.expected_rows, root, group),
        )
    rows, note, answers = consistency.agree(group, rows, call)
    consistency.check_told(answers, root)
    if whole is not None:
        return replace(whole, rows=rows, sizes=tuple(answers[root].send)), note
    shape, dtype, sizes = answers[root].shape, answers[root].dtype, tuple(answers[root].send)
    assert shape is not None
    empty = torch.empty((0, *shape[1:]), dtype=dtype, device=device_of(group))
    empty.requires_grad_(rows.requires_grad)
    return Whole(empty, sizes, dim % max(1, len(shape)), not shape), note


def _expects(size: int, root: int, group: ProcessGroup) -> list[int]:
    """What a receiver that knows its size expects from each rank."""
    return [size if rank == root else -1 for rank in range(group.size())]
