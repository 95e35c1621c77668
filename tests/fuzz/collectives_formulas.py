"""What each collective gives: formulas on a list of tensors, one for each rank.

Plain torch operations, which autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from fuzz import collectives_local as local
from fuzz.collectives_plan import Step

__all__ = ["OPS", "Ranks"]

Ranks = list[Tensor]


def reduced(xs: Sequence[Tensor], op: str) -> Tensor:
    """One tensor of all ranks'."""
    if op == "avg":
        return torch.stack([*xs]).mean(0)
    if op == "max":
        return torch.stack([*xs]).amax(0)
    if op == "min":
        return torch.stack([*xs]).amin(0)
    pairwise: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add, "product": torch.mul,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }  # fmt: skip
    return fold(pairwise[op], xs)


def _reduced(xs: Ranks, step: Step) -> Tensor:
    return reduced(xs, step.args["op"])


def all_reduce(xs: Ranks, step: Step) -> Ranks:
    total = _reduced(xs, step)
    if not step.args.get("invariant"):
        return [total] * len(xs)
    # Each rank's cotangent is whole already: it goes to the rank's own part alone.
    share = 1 / len(xs) if step.args["op"] == "avg" else 1
    return [total.detach() + (x - x.detach()) * share for x in xs]


def reduce(xs: Ranks, step: Step) -> Ranks:
    total, root = _reduced(xs, step), step.args["root"]
    return [total if r == root else torch.zeros_like(total) for r in range(len(xs))]


def broadcast(xs: Ranks, step: Step) -> Ranks:
    return [xs[step.args["root"]]] * len(xs)


def _joined(xs: Ranks, step: Step) -> Tensor:
    if step.args["form"] == "stack":
        return torch.stack(xs, step.args["dim"])
    return torch.cat([x if x.dim() else x.reshape(1) for x in xs], step.args["dim"])


def all_gather(xs: Ranks, step: Step) -> Ranks:
    return [_joined(xs, step)] * len(xs)


def all_gather_list(xs: Ranks, step: Step) -> list[Ranks]:
    return [xs] * len(xs)


def gather(xs: Ranks, step: Step) -> Ranks:
    whole, root = _joined(xs, step), step.args["root"]
    return [whole if r == root else torch.zeros_like(whole) for r in range(len(xs))]


def scatter(xs: Ranks, step: Step) -> Ranks:
    return [*local.pieces_of(xs[step.args["root"]], step)]


def reduce_scatter(xs: Ranks, step: Step) -> Ranks:
    return [*local.pieces_of(_reduced(xs, step), step)]


def all_to_all(xs: Ranks, step: Step) -> Any:
    dim, splits = step.args["dim"], step.args["splits"]
    cut = [x.split(row, dim) for x, row in zip(xs, splits, strict=True)]
    came = [[pieces[r] for pieces in cut] for r in range(len(xs))]
    if step.args["form"] == "list":
        return came
    if step.args["form"] == "numbers":
        return [[piece.reshape(()) for piece in pieces] for pieces in came]
    return [torch.cat(pieces, step.args.get("concat_dim", dim)) for pieces in came]


def ppermute(xs: Ranks, step: Step) -> Ranks:
    came = {target: xs[source] for source, target in step.args["pairs"]}
    return [came.get(r, torch.zeros_like(x)) for r, x in enumerate(xs)]


def shift(xs: Ranks, step: Step) -> Ranks:
    sources = [r - step.args["k"] for r in range(len(xs))]
    if step.args["wrap"]:
        return [xs[s % len(xs)] for s in sources]
    return [xs[s] if 0 <= s < len(xs) else torch.zeros_like(xs[0]) for s in sources]


def halo_exchange(xs: Ranks, step: Step) -> Ranks:
    widths, dim, world = step.args["widths"], step.args["dim"], len(xs)
    before, behind = (widths, widths) if isinstance(widths, int) else widths

    def edge(rank: int, first: bool, width: int) -> Tensor:
        x = xs[rank % world]
        start = 0 if first else x.shape[dim] - width
        part = x.narrow(dim, start, width)
        return part if step.args["wrap"] or 0 <= rank < world else torch.zeros_like(part)

    return [
        torch.cat([edge(r - 1, False, before), x, edge(r + 1, True, behind)], dim)
        for r, x in enumerate(xs)
    ]


def _leaves(xs: Ranks, step: Step) -> list[Ranks]:
    """For each leaf of a tree, the ranks' tensors."""
    trees = [_pytree.tree_leaves(local.tree_of(x, step)) for x in xs]
    return [[*leaf] for leaf in zip(*trees, strict=True)]


def coalesced(xs: Ranks, step: Step) -> list[Ranks]:
    leaves = [COALESCED[step.op](leaf, step) for leaf in _leaves(xs, step)]
    return [[leaf[r] for leaf in leaves] for r in range(len(xs))]


def _rows_gathered(xs: Ranks, step: Step) -> Ranks:
    return [torch.cat(xs)] * len(xs)


def _scattered_rows(xs: Ranks, step: Step) -> Ranks:
    total = _reduced(xs, step)
    rows = len(total) // len(xs)
    return [total[r * rows : (r + 1) * rows] for r in range(len(xs))]


def send(xs: Ranks, step: Step) -> Any:
    return [
        [*(xs[a] for a, b in step.args["moves"] if b == r), local.bystander(x)]
        for r, x in enumerate(xs)
    ]


def send_recv(xs: Ranks, step: Step) -> Ranks:
    moving = {rank for pair in step.args["pairs"] for rank in pair}
    moved = ppermute(xs, step)
    return [moved[r] if r in moving else local.bystander(x) for r, x in enumerate(xs)]


def vary(xs: Ranks, step: Step) -> Ranks:
    if not (xs[0].is_floating_point() or xs[0].is_complex()):
        return xs
    others = fold(torch.add, [x - x.detach() for x in xs])
    return [x.detach() + others for x in xs]


def invariant(xs: Ranks, step: Step) -> Ranks:
    return [reduced(xs, "sum" if xs[0].dtype != torch.bool else "bor")] * len(xs)


def barrier(xs: Ranks, step: Step) -> Ranks:
    return xs


COALESCED: dict[str, Callable[[Ranks, Step], Ranks]] = {
    "all_reduce_coalesced": all_reduce, "all_gather_coalesced": _rows_gathered,
    "reduce_scatter_coalesced": _scattered_rows,
}  # fmt: skip
OPS: dict[str, Callable[[Ranks, Step], Any]] = {
    f.__name__: f
    for f in (
        all_reduce, reduce, broadcast, all_gather, all_gather_list, gather, scatter, reduce_scatter,
        all_to_all, ppermute, shift, halo_exchange, send, send_recv, vary,
        invariant, barrier,
    )
} | dict.fromkeys(COALESCED, coalesced)  # fmt: skip
