"""The reference: a program's collectives on a list of tensors, one for each rank, in one process.

Plain torch operations in more digits; their gradients are autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from fuzz import collectives_local as local
from fuzz.collectives_plan import Plan, Step

__all__ = ["Reference", "factor_of", "reference"]

WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip
Ranks = list[Tensor]


@dataclass
class Reference:
    """What a program gives.

    Attributes:
        results: For each step, on each rank, the collective's results; None outside the group.
        grads: Of each leaf on each rank; None where none is wanted.
        second: Likewise.
        scales: The largest numbers in forward, of gradients, and of second derivatives.
    """

    results: dict[int, list[tuple[Tensor, ...] | None]] = field(default_factory=dict)
    grads: list[list[Tensor | None]] = field(default_factory=list)
    second: list[list[Tensor | None]] = field(default_factory=list)
    scales: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])


def factor_of(rank: int) -> float:
    """A rank's factor for `Premul`."""
    return 0.5 + rank


def wide(dtype: str) -> torch.dtype:
    """What stands for a dtype."""
    own: torch.dtype = getattr(torch, dtype)
    return WIDE.get(own, own)


def reduced(xs: Sequence[Tensor], op: str) -> Tensor:
    """One tensor of all ranks'."""
    if op == "avg":
        return torch.stack([*xs]).mean(0)
    if op == "max":
        return torch.stack([*xs]).amax(0)
    if op == "min":
        return torch.stack([*xs]).amin(0)
    pairwise: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add, "premul": torch.add, "product": torch.mul,
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


def scan(xs: Ranks, step: Step) -> Ranks:
    return [_reduced(xs[: r + 1], step) for r in range(len(xs))]


def exscan(xs: Ranks, step: Step) -> Ranks:
    op, x = step.args["op"], xs[0]
    if op in ("max", "min"):
        kind = torch.iinfo if x.dtype in (torch.int32, torch.int64) else torch.finfo
        if x.dtype == torch.bool:
            neutral = float(op == "min")
        elif x.is_floating_point():
            neutral = float("-inf" if op == "max" else "inf")
        else:
            neutral = kind(x.dtype).min if op == "max" else kind(x.dtype).max
    else:
        neutral = float(op == "product")
    first = torch.full_like(x, neutral)
    return [first, *(_reduced(xs[:r], step) for r in range(1, len(xs)))]


def _dims(xs: Ranks, step: Step) -> list[int]:
    dim = step.args["dim"]
    return [d % xs[0].dim() for d in ([dim] if isinstance(dim, int) else dim)]


def _flat(xs: Ranks, dims: Sequence[int]) -> Tensor:
    """All ranks' numbers in a last dim; the dims that stay come before."""
    kept = [d for d in range(xs[0].dim()) if d not in dims]
    staying = [xs[0].shape[d] for d in kept]
    counts = [math.prod(x.shape[d] for d in dims) for x in xs]
    rows = [
        x.permute([*kept, *dims]).reshape([*staying, n]) for x, n in zip(xs, counts, strict=True)
    ]
    return torch.cat(rows, -1)


def statistic(xs: Ranks, step: Step) -> Ranks:
    dims = _dims(xs, step)
    if step.args.get("p") == float("inf"):  # ranks that tie share equally, whatever each has
        own = [x.abs().amax(dims, keepdim=True) if dims else x.abs() for x in xs if x.numel()]
        y = torch.stack(own).amax(0) if own else xs[0].real.sum(dims, keepdim=True)
        y = y.squeeze(tuple(dims)) if dims else y
    else:
        numbers: Any = _flat(xs, dims)
        y = {
            "mean": lambda: numbers.mean(-1),
            "var": lambda: _variance(numbers, step.args["correction"]),
            "norm": lambda: torch.linalg.vector_norm(numbers, step.args["p"], -1),
            "logsumexp": lambda: numbers.logsumexp(-1),
        }[step.op]()
    if step.args["keepdim"]:
        for d in sorted(dims):
            y = y.unsqueeze(d)
    return [y] * len(xs)


def _variance(numbers: Tensor, correction: float) -> Tensor:
    centred = numbers - numbers.mean(-1, keepdim=True)
    return (centred * centred.conj()).real.sum(-1) / (numbers.shape[-1] - correction)


def softmax(xs: Ranks, step: Step) -> Ranks:
    dims = _dims(xs, step)
    total = _flat(xs, dims).logsumexp(-1)
    for d in sorted(dims):
        total = total.unsqueeze(d)
    return [(x - total).exp() for x in xs]


def _leaves(xs: Ranks, step: Step) -> list[Ranks]:
    """For each leaf of a tree, the ranks' tensors."""
    trees = [_pytree.tree_leaves(local.tree_of(x, step)) for x in xs]
    return [[*leaf] for leaf in zip(*trees, strict=True)]


def coalesced(xs: Ranks, step: Step) -> list[Ranks]:
    single = {
        "all_reduce_coalesced": all_reduce, "reduce_coalesced": reduce,
        "broadcast_coalesced": broadcast, "all_gather_coalesced": _rows_gathered,
        "reduce_scatter_coalesced": _rows_dealt,
    }[step.op]  # fmt: skip
    leaves = [single(leaf, step) for leaf in _leaves(xs, step)]
    return [[leaf[r] for leaf in leaves] for r in range(len(xs))]


def _rows_gathered(xs: Ranks, step: Step) -> Ranks:
    return [torch.cat(xs)] * len(xs)


def _rows_dealt(xs: Ranks, step: Step) -> Ranks:
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
    others = fold(torch.add, [x - x.detach() for x in xs])
    return [x.detach() + others for x in xs]


def invariant(xs: Ranks, step: Step) -> Ranks:
    return [reduced(xs, "sum" if xs[0].dtype != torch.bool else "bor")] * len(xs)


def barrier(xs: Ranks, step: Step) -> Ranks:
    return xs


OPS: dict[str, Callable[[Ranks, Step], Any]] = {
    f.__name__: f
    for f in (
        all_reduce, reduce, broadcast, all_gather, all_gather_list, gather, scatter, reduce_scatter,
        all_to_all, ppermute, shift, halo_exchange, scan, exscan, softmax, send, send_recv, vary,
        invariant, barrier,
    )
} | dict.fromkeys(("mean", "var", "norm", "logsumexp"), statistic)  # fmt: skip


def reference(plan: Plan) -> Reference:
    """A program's results and gradients."""
    found = Reference()
    leaves = [_leaf(plan, i) for i in range(len(plan.leaves))]
    registers: dict[int, Ranks] = dict(enumerate(leaves))
    for step in plan.steps:
        registers[step.number] = _step(plan, step, registers, found)
    everything = [y for ranks in registers.values() for y in ranks]
    found.scales[0] = _largest(
        [*everything, *(y for ys in found.results.values() for own in ys for y in own or ())]
    )
    losses = [
        local.loss_of(registers[s.number][r], s.losses[r], plan.seed * 64 + s.number, r)
        for s in plan.steps
        for r in range(plan.ranks)
        if s.losses and s.dtype not in ("int64", "int32", "bool")
    ]
    wanted = [x for ranks in leaves for x in ranks if x.requires_grad]
    loss = fold(torch.add, losses, torch.zeros(()))
    grads = _grads(loss, wanted, everything, plan.twice, found, 1)
    found.grads = _by_leaf(leaves, grads)
    if plan.twice:
        again = second_loss(plan, found.grads, range(plan.ranks))
        second = _grads(again, wanted, everything, False, found, 2)
        found.second = _by_leaf(leaves, second)
    return found


def second_loss(plan: Plan, grads: Sequence[Sequence[Tensor | None]], ranks: Any) -> Tensor:
    """What second derivatives are taken of: first ones, with weights."""
    total = torch.zeros((), dtype=torch.float64)
    for index, of_ranks in enumerate(grads):
        for rank, g in zip(ranks, of_ranks, strict=True):
            if g is not None:
                total = total + local.loss_of(g, "weights", plan.seed * 64 + 63 - index, rank)
    return total


def _leaf(plan: Plan, index: int) -> Ranks:
    leaf = plan.leaves[index]
    values = [local.leaf_values(plan, index, r).to(wide(leaf.dtype)) for r in range(plan.ranks)]
    differentiable = values[0].is_floating_point() or values[0].is_complex()
    return [
        v.requires_grad_(w and differentiable) for v, w in zip(values, leaf.wanted, strict=True)
    ]


def _step(plan: Plan, step: Step, registers: dict[int, Ranks], found: Reference) -> Ranks:
    members = step.members or tuple(range(plan.ranks))
    given, dtype = registers[step.inputs[0]], wide(step.dtype)
    xs = []
    for shape, layout, rank in zip(step.shapes, step.layouts, members, strict=True):
        x = local.laid_out(local.fit(given[rank], shape, dtype), layout)
        if step.args.get("op") == "premul":
            factor: Any = factor_of(rank)
            if step.args["factor"] == "tensor":
                factor = local.fit(registers[step.inputs[1]][rank], x.shape, dtype)
            x = x * factor
        xs.append(x)
    made = coalesced(xs, step) if step.op.endswith("coalesced") else OPS[step.op](xs, step)
    registered = [local.bystander(local.cast(x, dtype)) for x in given]
    results: list[tuple[Tensor, ...] | None] = [None] * plan.ranks
    for rank, y in zip(members, made, strict=True):
        ys = (y,) if isinstance(y, Tensor) else tuple(y)
        results[rank] = tuple(y.detach().clone() for y in ys)
        # A view of what other ranks have too is not to be changed in place.
        registered[rank] = local.after(local.pairing([y.clone() for y in ys], step), step)
    found.results[step.number] = results
    return registered


def _largest(tensors: Sequence[Tensor | None]) -> float:
    sizes = [
        x.detach().abs().nan_to_num(0, 0, 0).max().item()
        for x in tensors
        if x is not None and x.numel() and (x.is_floating_point() or x.is_complex())
    ]
    return max([1.0, *sizes])


def _grads(
    loss: Tensor, wanted: Ranks, everything: Ranks, create: bool, found: Reference, order: int
) -> list[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(wanted)
    others = [y for y in everything if y.requires_grad]
    grads = torch.autograd.grad(
        loss, [*wanted, *others], create_graph=create, retain_graph=True, allow_unused=True
    )
    found.scales[order] = _largest(grads) * found.scales[0] ** (order - 1)
    return [*grads[: len(wanted)]]


def _by_leaf(leaves: Sequence[Ranks], grads: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    rest = iter(grads)
    return [[next(rest) if x.requires_grad else None for x in ranks] for ranks in leaves]
