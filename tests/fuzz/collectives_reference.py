"""The reference: a program on a list of tensors, one for each rank, in one process.

In more digits than the program's; gradients are autograd's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

from fuzz import collectives_local as local
from fuzz.collectives_formulas import OPS, Ranks
from fuzz.collectives_plan import Plan, Step

__all__ = ["Reference", "reference", "second_loss"]

WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip


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


def wide(dtype: str) -> torch.dtype:
    """What stands for a dtype."""
    own: torch.dtype = getattr(torch, dtype)
    return WIDE.get(own, own)


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
    given, dtype = registers[step.given], wide(step.dtype)
    xs = []
    for shape, layout, rank in zip(step.shapes, step.layouts, members, strict=True):
        xs.append(local.laid_out(local.fit(given[rank], shape, dtype), layout))
    made = OPS[step.op](xs, step)
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
