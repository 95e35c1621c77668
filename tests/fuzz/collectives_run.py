"""Runs programs of collectives: many in one call of the ranks, each held against its reference.

The reference is the same program on a list of tensors, one for each rank, in one process and in
more digits; its gradients are autograd's.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import reduce as fold
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from fuzz.collectives_ops import INTEGERS, OPS, Call, Ranks, Step, bystander, cast
from fuzz.collectives_plan import IN_ANY_ORDER, Leaf, Plan
from fuzz.ranks import results_of_ranks
from gradwire import collectives

# -- what a rank computes by itself, in the program and in its reference -------------------------


def leaf_values(plan: Plan, index: int, rank: int) -> Tensor:
    leaf = plan.leaves[index]
    generator = torch.Generator().manual_seed((plan.seed * 64 + index) * 8 + rank)
    value = _numbers(leaf, leaf.shapes[rank], generator)
    dtype = getattr(torch, leaf.dtype)
    if dtype.is_complex:
        value = torch.complex(value, _numbers(leaf, leaf.shapes[rank], generator))
    if not (dtype.is_floating_point or dtype.is_complex):
        value = (4 * value).round()
    return value.to(dtype)


def _numbers(leaf: Leaf, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if leaf.grid:
        return torch.randint(-6, 7, tuple(shape), generator=generator).double() / 4
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def weights(seed: int, rank: int, like: Tensor) -> Tensor:
    """Numbers that differ by place and rank, as a loss multiplies with."""
    generator = torch.Generator().manual_seed(seed * 8 + rank)
    real = torch.float64
    value = torch.randint(1, 9, like.shape, generator=generator).to(real) / 4 - 1.125
    if like.is_complex():
        value = torch.complex(value, torch.randint(-4, 5, like.shape, generator=generator).to(real))
    return value.to(like.device, like.dtype)


def fit(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """In any shape: the tensor itself where it has it, or its numbers over and over."""
    x = cast(x, dtype)
    if x.shape == tuple(shape):
        return x
    flat = x.reshape(-1)
    if not len(flat):
        return flat.new_zeros(tuple(shape)) + flat.sum().to(dtype)
    places = torch.arange(math.prod(shape), device=flat.device) % len(flat)
    return flat[places].reshape(tuple(shape))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """In another layout; some of these change the values, in the reference too."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "expanded" and x.dim() and len(x):
        return x[:1].expand(x.shape)
    if layout == "offset" and x.dim():
        return torch.stack([x, x]).flatten(0, 1)[len(x) :]
    if layout == "conj":
        return x.conj()
    if layout == "neg" and (x.is_floating_point() or x.is_complex()):
        return torch._neg_view(x)
    if layout == "reversed" and x.dim():
        return x.flip(0)
    return x


def pairing(results: Sequence[Tensor], step: Step) -> Tensor:
    if len(results) == 1:
        return results[0]
    used = results[:1] + results[2:] if step.args.get("unused") else results
    widest = max((y.dtype for y in used), key=lambda d: (d.is_complex, d.itemsize))
    # cat's backward leaves empty tensors out, and this rank's with them what comes before.
    nothing = torch.stack([y.reshape(-1)[:0].to(widest).sum() for y in used]).sum()
    return torch.cat([y.reshape(-1).to(widest) for y in used]) + nothing.to(widest)


def after(y: Tensor, step: Step) -> Tensor:
    if step.post == "half":
        return y * 0.5
    if step.post == "in_place":
        return y.mul_(0.5)
    if step.post == "tanh":
        return (y * 0.4).tanh()
    return 0.3 * y * y if step.post == "square" else y


def loss_of(y: Tensor, kind: str, seed: int, rank: int) -> Tensor:
    """A register's part of a rank's loss."""
    w = weights(seed, rank, y)
    if kind == "sum":
        part = y.sum() * (1.5 + rank)
    elif kind == "transposed" and y.dim() > 1:
        part = (y.transpose(0, -1) * weights(seed, rank, y.transpose(0, -1))).sum()
    elif kind == "expanded" and y.dim():
        part = (y.sum(0, keepdim=True) * weights(seed, rank, y[:1])).sum()
    elif kind == "part":
        part = (y.reshape(-1)[::2] * w.reshape(-1)[::2]).sum()
    elif kind == "square":
        part = (y * y * w).sum()
    elif kind == "conj":
        part = (y.conj() * w).sum()
    elif kind == "twice":
        part = y.sum() * 0.5 + (y * w).sum()
    else:
        part = (y * w).sum()
    return cast(part, torch.float64)


# -- the reference ---------------------------------------------------------------------------

WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip


@dataclass
class Reference:
    """Results of steps, and first and second derivatives by leaf, on each rank; and their sizes."""

    results: dict[int, list[tuple[Tensor, ...] | None]] = field(default_factory=dict)
    grads: list[list[Tensor | None]] = field(default_factory=list)
    second: list[list[Tensor | None]] = field(default_factory=list)
    scales: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])


def wide(dtype: str) -> torch.dtype:
    own: torch.dtype = getattr(torch, dtype)
    return WIDE.get(own, own)


def reference(plan: Plan) -> Reference:
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
        loss_of(registers[s.number][r], s.losses[r], plan.seed * 64 + s.number, r)
        for s in plan.steps
        for r in range(plan.ranks)
        if s.losses and s.dtype not in INTEGERS
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
                total = total + loss_of(g, "weights", plan.seed * 64 + 63 - index, rank)
    return total


def _leaf(plan: Plan, index: int) -> Ranks:
    leaf = plan.leaves[index]
    values = [leaf_values(plan, index, r).to(wide(leaf.dtype)) for r in range(plan.ranks)]
    differentiable = values[0].is_floating_point() or values[0].is_complex()
    return [
        v.requires_grad_(w and differentiable) for v, w in zip(values, leaf.wanted, strict=True)
    ]


def _step(plan: Plan, step: Step, registers: dict[int, Ranks], found: Reference) -> Ranks:
    members = step.members or tuple(range(plan.ranks))
    given, dtype = registers[step.given], wide(step.dtype)
    xs = []
    for shape, layout, rank in zip(step.shapes, step.layouts, members, strict=True):
        xs.append(laid_out(fit(given[rank], shape, dtype), layout))
    made = OPS[step.op].formula(xs, step)
    registered = [bystander(cast(x, dtype)) for x in given]
    results: list[tuple[Tensor, ...] | None] = [None] * plan.ranks
    for rank, y in zip(members, made, strict=True):
        ys = (y,) if isinstance(y, Tensor) else tuple(y)
        results[rank] = tuple(y.detach().clone() for y in ys)
        # A view of what other ranks have too is not to be changed in place.
        registered[rank] = after(pairing([y.clone() for y in ys], step), step)
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


# -- the program -----------------------------------------------------------------------------


@dataclass
class Seen:
    """What a rank saw of a program; `wrong` is what must not be, whatever the numbers are."""

    results: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    grads: list[Tensor | None] = field(default_factory=list)
    second: list[Tensor | None] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Groups:
    """The groups of programs that run one after the other."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], Any] = {(): dist.group.WORLD}

    def __getitem__(self, members: tuple[int, ...]) -> Any:
        """The group with these members, in this order; every rank asks for it."""
        if members not in self.made:
            order = {"sort_ranks": False} if IN_ANY_ORDER else {}
            self.made[members] = dist.new_group([*members], **order)
            if dist.get_rank() in members:
                assert dist.get_process_group_ranks(self.made[members]) == [*members]
        return self.made[members]


class _Program:
    def __init__(self, plan: Plan, groups: Groups) -> None:
        self.plan, self.groups, self.rank = plan, groups, dist.get_rank()
        self.seen = Seen()
        self.token: Tensor | None = None
        self.leaves = [self.leaf(i) for i in range(len(plan.leaves))]
        self.registers: dict[int, Tensor] = dict(enumerate(self.leaves))
        self.late: dict[int, Any] = {}
        if (plan.twice or plan.by_grad) and self.leaves[0].requires_grad:
            # Derivatives that are asked for by name go through moves that depend on what is named.
            self.token = 0 * self.leaves[0].abs().sum().double()

    def leaf(self, index: int) -> Tensor:
        x = leaf_values(self.plan, index, self.rank).to(self.plan.device)
        wanted = self.plan.leaves[index].wanted[self.rank]
        return x.requires_grad_(wanted and (x.is_floating_point() or x.is_complex()))

    def run(self) -> Seen:
        before = [x.detach().clone() for x in self.leaves]
        for step in self.plan.steps:
            self.step(step)
        loss = self.loss()
        if loss.requires_grad:
            self.derive(loss)
        for index, (x, was) in enumerate(zip(self.leaves, before, strict=True)):
            if not same_bits(x, was):
                self.seen.wrong.append(f"leaf {index} was changed")
        return self.seen

    def register(self, number: int) -> Tensor:
        if number in self.late:
            self.registers[number] = self.late.pop(number)()
        return self.registers[number]

    def step(self, step: Step) -> None:
        group = self.groups[step.members]
        given = self.register(step.given)
        if step.members and self.rank not in step.members:
            dtype = getattr(torch, step.dtype)
            self.registers[step.number] = bystander(cast(given, dtype))
        elif step.checkpoint:
            reentrant = step.checkpoint == "reentrant"
            self.registers[step.number] = checkpoint(
                lambda given: self.begin(step, group, given)(), given, use_reentrant=reentrant
            )
        elif step.late:
            self.late[step.number] = self.begin(step, group, given)
        else:
            self.registers[step.number] = self.begin(step, group, given)()

    def begin(self, step: Step, group: Any, given: Tensor) -> Any:
        dtype, own = getattr(torch, step.dtype), group.rank()
        x = laid_out(fit(given, step.shapes[own], dtype), step.layouts[own])
        before, version = x.detach().clone(), x._version
        c = Call(step, x, group, self.token, x.requires_grad and torch.is_grad_enabled())
        handle = OPS[step.op].call(c)
        self.token = c.token

        def finish() -> Tensor:
            result = handle.wait() if step.asynchronous else handle
            ys = tuple(_pytree.tree_leaves(result))
            if step.number not in self.seen.results:  # not in a checkpoint's second run
                self.look(step, ys, x, before, version)
                self.seen.results[step.number] = tuple(y.detach().clone().cpu() for y in ys)
            return after(_tied(pairing(ys, step), x, step), step)

        return finish

    def look(
        self, step: Step, ys: tuple[Tensor, ...], x: Tensor, before: Tensor, version: int
    ) -> None:
        """Inputs as they were, results in memory of their own."""
        wrong = []
        if not same_bits(x, before) or x._version != version:
            wrong.append("the input was changed")
        if any(
            y.numel() and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            for y in ys
        ):
            wrong.append("a result shares memory with the input")
        if any(not y.is_contiguous() or y.is_conj() or y.is_neg() for y in ys):
            wrong.append("a result is not contiguous, or lazy")
        self.seen.wrong += [f"step {step.number}, {step.op}: {what}" for what in wrong]

    def loss(self) -> Tensor:
        plan, total = self.plan, torch.zeros((), dtype=torch.float64)
        for step in plan.steps:
            y = self.register(step.number)
            if step.losses and step.dtype not in INTEGERS:
                seed = plan.seed * 64 + step.number
                total = total + loss_of(y, step.losses[self.rank], seed, self.rank)
        return total if self.token is None else collectives.tie(total, self.token)

    def derive(self, loss: Tensor) -> None:
        wanted = [x for x in self.leaves if x.requires_grad]
        grads = self.gradients(loss, wanted, create_graph=self.plan.twice)
        self.seen.grads = self.by_leaf([None if g is None else g.detach().cpu() for g in grads])
        if not self.plan.twice:
            return
        columns = [[g] for g in self.by_leaf(grads)]
        again = second_loss(self.plan, columns, [self.rank])
        if again.requires_grad:
            second = self.gradients(again, wanted, create_graph=False)
            self.seen.second = self.by_leaf([None if g is None else g.cpu() for g in second])

    def gradients(self, loss: Tensor, wanted: Any, *, create_graph: bool) -> Any:
        if self.plan.by_grad:
            return torch.autograd.grad(loss, wanted, create_graph=create_graph, allow_unused=True)
        for x in wanted:
            x.grad = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
            loss.backward(create_graph=create_graph)
        grads = [x.grad for x in wanted]
        for x in wanted:
            x.grad = None  # or it and the graph keep each other
        return grads

    def by_leaf(self, grads: Any) -> list[Tensor | None]:
        rest = iter(grads)
        return [next(rest) if x.requires_grad else None for x in self.leaves]


def _tied(y: Tensor, x: Tensor, step: Step) -> Tensor:
    """The result, which backward goes from to what came before the step, on every rank."""
    loose = step.args.get("receivers", "tensor") != "tensor" or step.args.get("like") == "meta"
    return y + x.reshape(-1)[:0].sum().to(y.dtype) if loose else y


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether all numbers are the same, NaN included."""
    return bool(torch.equal(x.detach(), y) or torch.equal(_bits(x), _bits(y)))


def _bits(x: Tensor) -> Tensor:
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


# -- both ------------------------------------------------------------------------------------

LIMIT = 20  # seconds
EPS = {
    "float64": 1e-12, "complex128": 1e-12, "float32": 1e-5, "complex64": 1e-5,
    "float16": 2e-2, "bfloat16": 0.1,
}  # fmt: skip


def _on_ranks(plans: Sequence[Plan]) -> Iterator[Seen]:
    groups = Groups()
    if any(step.checkpoint for plan in plans for step in plan.steps):
        importlib.import_module("torch._dynamo")  # as the first checkpoint does, for seconds
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*is deprecated.*")
    for plan in plans:
        check = _checks(plan, dist.get_backend())
        with nullcontext() if check is None else collectives.checks(check):
            yield _Program(plan, groups).run()


def _checks(plan: Plan, backend: str) -> bool | None:
    """Whether ranks compare; on Gloo they do where gradients are not wanted on all."""
    # A leaf that wants none anywhere will do: in a subgroup it may meet one that does.
    uneven = not all(all(leaf.wanted) for leaf in plan.leaves)
    return True if uneven and backend == "gloo" else plan.checks


def run_batch(plans: Sequence[Plan], backend: str) -> list[str]:
    """What is wrong with the first plans, up to one that ends the ranks' call."""
    seen, ended = results_of_ranks(_on_ranks, plans, backend, LIMIT)
    problems = [
        "\n".join(differences(p, own, reference(p))) for p, own in zip(plans, seen, strict=False)
    ]
    return problems + ended


def differences(plan: Plan, seen: Sequence[Seen], expected: Reference) -> Iterator[str]:
    """What is not as it should be, forward first."""
    eps = max(EPS.get(kind, 0) for kind in _dtypes(plan))
    # Gradients of repeated numbers are added up one by one.
    sizes = [math.prod(shape) for step in plan.steps for shape in step.shapes]
    eps *= 1 + max(sizes, default=0) / 500
    for rank, own in enumerate(seen):
        yield from (f"rank {rank}: {what}" for what in own.wrong)
    for step in plan.steps:
        yield from _in_step(step, seen, expected, eps)
    for name, order in (("grads", 1), ("second", 2)):
        for index, wanted in enumerate(getattr(expected, name)):
            for rank, g in enumerate(wanted):
                got = getattr(seen[rank], name)
                off = _off(got[index] if got else None, g, eps * expected.scales[order] * order**3)
                if off:
                    yield f"{name} of leaf {index} on rank {rank}: {off}"


def _dtypes(plan: Plan) -> set[str]:
    return {leaf.dtype for leaf in plan.leaves} | {step.dtype for step in plan.steps}


def _in_step(step: Step, seen: Sequence[Seen], expected: Reference, eps: float) -> Iterator[str]:
    members = step.members or range(len(seen))
    for rank, wanted in enumerate(expected.results[step.number]):
        if wanted is None:
            continue
        got = seen[rank].results[step.number]
        if len(got) != len(wanted):
            yield f"step {step.number}, {step.op} on rank {rank}: {len(got)} results"
            continue
        for y, z in zip(got, wanted, strict=True):
            off = _off(y, z, eps * expected.scales[0])
            if off:
                yield f"step {step.number}, {step.op} on rank {rank}: {off}"
    if OPS[step.op].has("same") and not step.args.get("invariant"):
        first, *others = (seen[rank].results[step.number] for rank in members)
        if any(not same_bits(y, z) for own in others for y, z in zip(first, own, strict=True)):
            yield f"step {step.number}, {step.op}: ranks have different bits"


def _off(got: Tensor | None, wanted: Tensor | None, tolerance: float) -> str:
    """How a tensor differs, None and zeros being the same."""
    if got is None or wanted is None:
        there = got if wanted is None else wanted
        big = there is not None and there.numel() and there.abs().max().item() > tolerance
        return f"{got} for {wanted}" if big else ""
    if got.shape != wanted.shape:
        return f"shape {tuple(got.shape)} for {tuple(wanted.shape)}"
    if not (got.is_floating_point() or got.is_complex()):
        return "" if torch.equal(got, wanted.to(got.dtype)) else f"{got} for {wanted}"
    if got.is_complex() != wanted.is_complex():
        return f"{got.dtype} for {wanted.dtype}"
    equal = torch.isclose(got.to(wanted.dtype), wanted, 0, tolerance, equal_nan=True)
    return "" if equal.all() else f"{got} for {wanted} (to {tolerance:.1e})"
