"""A program on one rank, over gradwire's collectives."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from fuzz import collectives_local as local
from fuzz.collectives_calls import Call, call
from fuzz.collectives_case import INTEGERS
from fuzz.collectives_plan import IN_ANY_ORDER, Plan, Step
from fuzz.collectives_reference import second_loss
from gradwire import collectives

__all__ = ["Groups", "Seen", "run_program"]


@dataclass
class Seen:
    """What a rank saw of a program.

    Attributes:
        results: Of each step.
        grads: Of each leaf.
        second: Likewise, of the second derivatives.
        wrong: What must not be, whatever the numbers are.
    """

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


def run_program(plan: Plan, groups: Groups, checks: bool | None) -> Seen:
    """Run it; what was seen."""
    with nullcontext() if checks is None else collectives.checks(checks):
        return _Program(plan, groups).run()


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
        x = local.leaf_values(self.plan, index, self.rank).to(self.plan.device)
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
            self.registers[step.number] = local.bystander(local.cast(given, dtype))
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
        """Start the collective; what waits for it, and does the rest of the step."""
        dtype, own = getattr(torch, step.dtype), group.rank()
        x = local.laid_out(local.fit(given, step.shapes[own], dtype), step.layouts[own])
        before, version = x.detach().clone(), x._version
        c = Call(step, x, group, self.token, x.requires_grad and torch.is_grad_enabled())
        handle = call(c)
        self.token = c.token

        def finish() -> Tensor:
            result = handle.wait() if step.asynchronous else handle
            ys = tuple(_pytree.tree_leaves(result))
            if step.number not in self.seen.results:  # not in a checkpoint's second run
                self.look(step, ys, x, before, version)
                self.seen.results[step.number] = tuple(y.detach().clone().cpu() for y in ys)
            return local.after(_tied(local.pairing(ys, step), x, step), step)

        return finish

    def look(
        self, step: Step, ys: tuple[Tensor, ...], x: Tensor, before: Tensor, version: int
    ) -> None:
        """Inputs as they were, results in memory of their own."""
        wrong = []
        if not same_bits(x, before) or x._version != version:
            wrong.append("the input was changed")
        if any(y.numel() and _memory(y) == _memory(x) for y in ys):
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
                total = total + local.loss_of(y, step.losses[self.rank], seed, self.rank)
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


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
