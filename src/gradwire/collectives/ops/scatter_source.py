"""Source of a scatter, as each rank knows it before any data is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import consistency, wire
from gradwire.collectives.arguments import (
    check_dense,
    check_has_data,
    move_to_front,
    piece_sizes,
    pieces_of,
    refuse_in_transforms,
    sizes_of_split,
    valid_sizes,
)
from gradwire.collectives.autograd import concat
from gradwire.collectives.consistency import CheckContext, Refusal
from gradwire.collectives.signature import CallSignature


@dataclass(frozen=True)
class ScatterSource:
    """Tensor that a scatter splits, with the split dim in front.

    Args:
        rows: Rows of all pieces on the root; on a receiver, any number of rows of the same shape,
            which stand for them in the graph.
        sizes: Number of rows of each rank.
        dim: Original position of the split dim.
        scalars: True if the pieces are 0-d.
        expected_rows: Number of rows of a receiver's `like`.
    """

    rows: Tensor
    sizes: tuple[int, ...]
    dim: int
    scalars: bool = False
    expected_rows: int = 0

    @classmethod
    def on_root(
        cls, xs: object, dim: int, sizes: Sequence[int] | None, group: ProcessGroup
    ) -> ScatterSource:
        """Create from the root's tensor or list of tensors."""
        if isinstance(xs, Tensor):
            front, dim = move_to_front(xs, dim)
            check_has_data(xs, "xs")
            split = sizes_of_split(sizes, front, dim, group, names=("sizes", "xs"))
            return cls(front, split, dim)
        pieces, dim, scalars = pieces_of(xs, dim, group, "xs")
        check_has_data(pieces[0], "xs[0]")
        known = piece_sizes(pieces, dim, sizes, group)
        return cls(concat([piece.movedim(dim, 0) for piece in pieces]), known, dim, scalars)

    @classmethod
    def from_like(
        cls, like: Tensor, dim: int, sizes: Sequence[int] | None, group: ProcessGroup
    ) -> ScatterSource:
        """Create on a receiver that has a tensor of the shape that it will receive."""
        check_dense(like, "like")
        scalars = not like.dim()
        front, dim = rows, dim = move_to_front(like, dim)
        if like.is_meta:
            refuse_in_transforms("like on meta", "give a tensor with the same transforms as xs")
            rows = wire.placeholder((0, *front.shape[1:]), like.dtype, like.requires_grad, group)
        given = (front.shape[0],) * group.size()
        if sizes is not None:
            given = valid_sizes(sizes, group, "sizes")
        return cls(rows, given, dim, scalars, front.shape[0])

    def attach_to(self, xs: Tensor | Sequence[Tensor] | None) -> ScatterSource:
        """Return a copy for a receiver without rows, whose rows depend on the receiver's tensors.

        A derivative of second order then reaches these tensors, with zeros, and this rank takes
        part in the collectives that they depend on.
        """
        own = [xs] if isinstance(xs, Tensor) else xs or ()
        empty = [x.reshape(-1)[:0].to(self.rows) for x in own if x.requires_grad]
        if not empty or not self.rows.requires_grad:
            return self
        # Not torch.cat, whose backward skips empty tensors.
        return replace(self, rows=torch.stack(empty).reshape(self.rows.shape))


def agree_on_source(
    source: ScatterSource | Refusal | None, root: int, dim: int, group: ProcessGroup
) -> tuple[ScatterSource, CheckContext]:
    """Compare the call; ranks without a source receive shape and sizes from the root.

    Args:
        source: Source of this rank, if it has one; on the root, an argument error if it has none.
        root: Root's rank in the group.
        dim: Argument of the public function.
        group: Process group.

    Raises:
        MismatchError: On every rank, if the ranks disagree.
        ArgumentError, ArgumentTypeError: On every rank, if the root's arguments cannot be used, or
            its tensor has too many dims for a signature.
    """
    refusal: Refusal | None = None
    if isinstance(source, Refusal):
        source, refusal = None, source
    at_root = group.rank() == root
    call = CallSignature("scatter", None, None, root=root, detail=f"dim={dim}", ragged=True)
    if source is None:
        call = call._replace(wants_grad=consistency.grad_mode())
    else:
        call = call._replace(
            shape=() if source.scalars else tuple(source.rows.shape),
            dtype=source.rows.dtype,
            wants_grad=consistency.wants_grad(source.rows),
            send=source.sizes if at_root else (),
            receive=() if at_root else _expected(source.expected_rows, root, group),
        )
    own = None if source is None else source.rows
    rows, context, peers = consistency.agree_with_root(group, own, call, root, refusal)
    sizes = tuple(peers[root].send)
    if source is not None:
        return replace(source, rows=rows, sizes=sizes), context
    empty = rows.new_empty((0, *rows.shape[1:])).requires_grad_(rows.requires_grad)
    return ScatterSource(empty, sizes, dim % max(1, rows.dim()), not rows.dim()), context


def _expected(rows: int, root: int, group: ProcessGroup) -> list[int]:
    """Return the number of rows that a receiver with `like` expects from each rank."""
    return [rows if rank == root else -1 for rank in range(group.size())]
